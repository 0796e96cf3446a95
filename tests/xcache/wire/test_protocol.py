"""Messages are read as they were written; any other bytes are a ProtocolError and nothing worse."""

from __future__ import annotations

import random
import struct
import tracemalloc
import types
import typing

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xcache.errors import ProtocolError
from xcache.wire import commands, framing, protocol

LEAVES = {
    str: st.text(max_size=40),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=200),
    types.NoneType: st.none(),
}
MESSAGES = typing.get_args(protocol.Message)


def strategy_of(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Return a strategy for values that fit an annotation, so that a new message is covered from its first day."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return st.one_of([strategy_of(argument) for argument in arguments])
    if typing.get_origin(hint) is list:
        return st.lists(strategy_of(arguments[0]), max_size=5)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(strategy_of(arguments[0]), strategy_of(arguments[1]), max_size=5)
    return LEAVES[hint]


def strategy_for(message: type[typing.Any]) -> st.SearchStrategy[typing.Any]:
    return st.builds(message, **{name: strategy_of(h) for name, h in typing.get_type_hints(message).items()})


any_message = st.one_of([strategy_for(message) for message in MESSAGES])
requests = st.integers(0, 2**32)
SAMPLES: dict[str, typing.Any] = {
    "Hello": protocol.Hello(1, "0.1", 7, "train.py"),
    "Found": protocol.Found("d" * 64, 5, 1.5, b"bytes"),
    "Put": protocol.Put(
        "k", False, "m", "cpu", "cpu", "0", "zstd", 1, 2.0, "d", 3, "p", 4, "s", 5, {"a": "b"}, {"c": "d"}, b"x", None
    ),
    "Remove": commands.Remove(["a", "b"]),
    "Report": protocol.Report({"hits": 1, "seconds": 2.5}),
    "Status": protocol.Status(
        {"pid": 1, "name": "x", "nothing": None, "yes": True, "part": 0.5}, [{"pid": 1, "seconds": 0.5}], []
    ),
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_is_read_as_it_was_written(message):
    @settings(max_examples=30)
    @given(requests, strategy_for(message))
    def check(request, sent):
        ((got_request, got),) = framing.FrameReader().feed(framing.encode(request, sent))
        assert (got_request, got) == (request, sent)
        assert type(got) is message

    check()


@settings(max_examples=30)
@given(st.lists(st.tuples(requests, any_message), max_size=8), st.randoms(use_true_random=False))
def test_however_the_stream_is_cut_the_messages_are_the_same(sent, chance):
    stream = b"".join(framing.encode(request, message) for request, message in sent)
    for longest in (1, 7, len(stream) + 1):
        reader, got, at = framing.FrameReader(), [], 0
        while at < len(stream):
            end = at + chance.randint(1, longest)
            got += reader.feed(stream[at:end])
            at = end
        assert got == sent


@pytest.mark.parametrize("name", SAMPLES)
def test_a_frame_that_is_cut_short_is_no_message(name):
    body = framing.encode(3, SAMPLES[name])[4:]
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            framing.decode(body[:length])
    with pytest.raises(ProtocolError):
        framing.decode(body + b"\x00")


@pytest.mark.parametrize("name", SAMPLES)
def test_any_changed_byte_gives_a_message_or_a_ProtocolError(name):  # noqa: N802 - the name of the class
    body = bytearray(framing.encode(3, SAMPLES[name])[4:])
    outcomes = set()
    for at in range(len(body)):
        for value in (0, 0x7F, 0x80, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xD4, 0xDD, 0xDF, 0xFF, body[at] ^ 1):
            changed = body[:at] + bytes([value]) + body[at + 1 :]
            outcomes.add(understood(bytes(changed)))
    assert False in outcomes


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x81" * 2000)
@example(b"\x91" * 5000)
@example(b"\xd5\xff\x00\x00")
@example(msgpack.packb([1, "Get", msgpack.Timestamp(1)]))
@example(msgpack.packb([1, "Get", msgpack.ExtType(5, b"")]))
@example(b"\x93\x01\xa3Get\xa1\xff")
def test_garbage_gives_a_message_or_a_ProtocolError(body):  # noqa: N802 - the name of the class
    assert understood(body) in (True, False)


def understood(body: bytes) -> bool:
    """Return whether a body is a message that can be sent, too; fail on any exception but ProtocolError."""
    try:
        request, message = framing.decode(body)
    except ProtocolError:
        return False
    assert type(message) in MESSAGES
    assert len(list(framing.FrameReader().feed(framing.encode(request, message)))) == 1
    return True


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [1],
        ["1", "Missing"],
        [True, "Missing"],
        [1.0, "Missing"],
        [1, b"Missing"],
        [1, "Nothing"],
        [1, "__class__"],
        [1, "Get"],
        [1, "Get", None],
        [1, "Get", b"key"],
        [1, "Get", "key", "more"],
        [1, "Missing", None],
        [1, "Get", "k" * (protocol.MAX_TEXT + 1)],
        [1, "Remove", "key"],
        [1, "Remove", ["key", 5]],
        [1, "Remove", {"key": "value"}],
        [1, "Remove", ["k"] * 5000],
        [1, "Report", {"hits": "many"}],
        [1, "Report", {"hits": True}],
        [1, "Report", {b"hits": 1}],
        [1, "Report", [1]],
        [1, "Status", {"a": [1]}],
        [1, "Stored", 1],
        [1, "Removed", True, 5],
        [1, "Found", "d", 5, True, None],
        [1, "Found", "d", 5.0, 1.0, None],
        [1, "Found", "d", 5, 1.0, "text"],
        [1, "Hello", 1, "v", 2],
        {"a": 1},
        5,
        "Missing",
        None,
    ],
    ids=lambda parts: repr(parts)[:40],
)
def test_a_frame_that_is_no_message_is_refused(parts):
    with pytest.raises(ProtocolError):
        framing.decode(msgpack.packb(parts))


def test_hello_and_welcome_may_grow():
    """Each end must be able to read another version's number, or it could not step aside."""
    for message in (protocol.Hello(9, "9.0", 1, "p"), protocol.Welcome(9, "9.0", 1, "/d", [], "")):
        body = msgpack.packb([1, type(message).__name__, *message, {"new": [1]}, "field"])
        assert framing.decode(body) == (1, message)


def test_the_welcome_of_an_older_daemon_is_understood():
    body = msgpack.packb([1, "Welcome", 9, "9.0", 1, "/d"])
    assert framing.decode(body) == (1, protocol.Welcome(9, "9.0", 1, "/d", None, None))
    with pytest.raises(ProtocolError, match="fields"):
        framing.decode(msgpack.packb([1, "Welcome", 9, "9.0", 1]))


def test_an_integer_will_do_where_a_number_is_wanted():
    assert framing.decode(msgpack.packb([1, "Found", "d", 5, 2, None, 0.0, 0]))[1].compile_seconds == 2


def test_a_frame_above_the_limit_is_refused_before_it_has_arrived():
    with pytest.raises(ProtocolError, match="above the limit"):
        list(framing.FrameReader().feed(struct.pack(">I", protocol.MAX_FRAME + 1)))
    with pytest.raises(ProtocolError, match="above the limit"):
        framing.encode(1, protocol.Found("d", 1, 1.0, b"x" * protocol.MAX_FRAME))
    just = protocol.Found("d", 1, 1.0, b"x" * (protocol.MAX_FRAME - 100))
    assert list(framing.FrameReader().feed(framing.encode(1, just))) == [(1, just)]


@pytest.mark.parametrize(
    "body",
    [
        b"\xdc\x10\x00" * (protocol.MAX_FRAME // 3),
        b"\xdd\x7f\xff\xff\xff" * 1000,
        b"\xde\x04\x00\xa1a" * (protocol.MAX_FRAME // 5),
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x92" * protocol.MAX_FRAME,
        b"\x9f" + b"\x90" * (protocol.MAX_FRAME - 1),
    ],
    ids=["arrays", "huge arrays", "maps", "huge map", "huge bytes", "deep", "empties"],
)
def test_a_frame_that_lies_costs_no_more_memory_than_its_limit_allows(body):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            framing.decode(body)
        assert tracemalloc.get_traced_memory()[1] < 64 * protocol.MAX_FRAME
    finally:
        tracemalloc.stop()


UNSAYABLE = {
    "text that is too long": commands.Remove(["k" * (protocol.MAX_TEXT + 1)]),
    "text inside that is too long": protocol.Report({"k" * (protocol.MAX_TEXT + 1): 1}),
    "a name that is not UTF-8, as sys.argv[0] may hold it": protocol.Hello(1, "v", 1, "caf\udce9.py"),
    "too large a number": protocol.Stored(2**64),
    "too many keys": commands.Remove(["k"] * 5000),
    "too many counters": protocol.Report({str(n): 1 for n in range(2000)}),
}


@pytest.mark.parametrize("message", UNSAYABLE.values(), ids=list(UNSAYABLE))
def test_a_message_that_would_not_be_understood_is_not_sent(message):
    """If sent, it would end the sender's connection, or raise an exception that nobody expects."""
    with pytest.raises(ProtocolError):
        framing.encode(1, message)


def test_a_stream_of_noise_never_does_worse_than_end():
    chance = random.Random(1)
    ended = 0
    for _ in range(300):
        reader = framing.FrameReader()
        try:
            for _ in range(20):
                list(reader.feed(struct.pack(">I", chance.randrange(40)) + chance.randbytes(chance.randrange(60))))
        except ProtocolError:
            ended += 1
    assert ended > 0


@pytest.mark.parametrize("item", [b"\x90", b"\x80"], ids=["lists", "dictionaries"])
def test_a_frame_has_no_more_lists_than_take_a_moment_to_decode(item):
    rows = b"\xdc\x0f\xa0" + item * 4000
    body = b"\x93\x07" + msgpack.packb("RememberAliases") + b"\xdc\x00\x03" + rows * 3
    with pytest.raises(ProtocolError, match="more than"):
        framing.decode(body)


def test_a_list_within_a_list_is_short():
    """A frame of a million empty texts would take the daemon half a second to check."""
    fields = ["x"] * protocol.MAX_FIELDS
    assert framing.decode(framing.encode(7, protocol.RememberAliases([fields]))[4:]) == (
        7,
        protocol.RememberAliases([fields]),
    )
    with pytest.raises(ProtocolError, match="too long"):
        framing.encode(7, protocol.RememberAliases([[*fields, "x"]]))
    row = {f"{number}": number for number in range(protocol.MAX_FIELDS + 1)}
    with pytest.raises(ProtocolError, match="too long"):
        framing.encode(7, commands.Entries([row]))
