"""Puts that are kept, those that are refused, and not-cacheable marks."""

from __future__ import annotations

import os

from support.conversation import key_of, talking
from support.places import digest, get_message, put_message

from xcache.wire import commands, protocol


def test_the_writer_of_an_entry_is_the_process_the_kernel_names(place, talk):
    """A Hello can claim any process; the credentials of the socket cannot."""
    with talking(place) as liar:
        liar.ask(protocol.Hello(1, "v", 1, "someone else"))
        liar.put(key_of("a"), b"a")
    assert place.query("SELECT writer_pid, writer_uid, writer_program FROM entries") == [
        (os.getpid(), os.getuid(), "test.py")
    ]


LARGE = b"l" * (protocol.INLINE_LIMIT + 1)
BAD_PUTS = {
    "key": {"key": "../../../etc/passwd"},
    "key in capitals": {"key": "AB" * 32},
    "empty key": {"key": ""},
    "digest": {"digest": "../x"},
    "program digest": {"program_digest": "x"},
    "stored program digest": {"program_stored_digest": "0" * 63},
    "component": {"components": dict.fromkeys(("program", *protocol.DESCRIBED_COMPONENTS), "x")},
    "no components": {"components": {}},
    "wrong digest": {"digest": digest(b"other")},
    "wrong size": {"stored_size": 5},
    "wrong program": {"program_stored_digest": digest(b"other")},
    "wrong program size": {"program_stored_size": 5},
    "negative size": {"raw_size": -1},
    "size beyond 64 bits": {"raw_size": 2**63},
    "negative time": {"compile_seconds": -1.0},
    "no time": {"compile_seconds": float("nan")},
    "endless time": {"compile_seconds": float("inf")},
    "long codec": {"codec": "c" * 33},
    "large and inline": {
        "payload": LARGE,
        "digest": digest(LARGE),
        "stored_size": len(LARGE),
    },
    "large program inline": {
        "program": LARGE,
        "program_stored_digest": digest(LARGE),
        "program_stored_size": len(LARGE),
    },
}


def test_a_put_that_cannot_be_right_is_refused(place, talk):
    for name, changes in BAD_PUTS.items():
        answer = talk.ask(put_message(key_of(name), b"a", b"p", **changes))
        assert isinstance(answer, protocol.Refused), (name, answer)
        assert talk.get(key_of(name)) is None, name
        assert place.query("SELECT (SELECT count(*) FROM entries) + (SELECT count(*) FROM blobs)") == [(0,)], name
    for name in BAD_PUTS:
        assert talk.put(key_of(name), b"a").kept, name


def test_a_negative_size_of_a_file_is_refused(talk):
    """The digest of nothing fits any file of which nothing is read."""
    message = put_message(key_of("a"), b"", b"p", payload=None, stored_size=-1_000_000)
    assert isinstance(talk.ask(message, [b""]), protocol.Refused)
    assert talk.status()["bytes"] == 0


def test_an_entry_is_kept_unless_it_is_to_be_overwritten(talk):
    assert talk.put(key_of("a"), b"old") == protocol.Stored(True)
    assert talk.put(key_of("a"), b"new") == protocol.Stored(False)
    assert talk.get(key_of("a")) == b"old"
    assert talk.put(key_of("a"), b"new", overwrite=True) == protocol.Stored(True)
    assert talk.get(key_of("a")) == b"new"


def test_an_uncacheable_key_is_remembered_until_the_store_is_cleared(place, talk):
    assert talk.ask(protocol.MarkNotCacheable(key_of("a"), "jit_f", "a pointer")) == protocol.Done()
    assert talk.ask(get_message(key_of("a"))) == protocol.NotCacheable("a pointer")
    place.stop()
    place.start_daemon()
    with talking(place) as again:
        assert again.ask(get_message(key_of("a"))) == protocol.NotCacheable("a pointer")
        again.put(key_of("a"), b"after all")
        assert again.get(key_of("a")) == b"after all"
        again.ask(commands.Clear())
        assert again.ask(get_message(key_of("a"))).lease == 0
        assert isinstance(again.ask(protocol.MarkNotCacheable("no key", "m", "r")), protocol.Refused)


def test_memory_does_not_grow_with_what_is_stored(place, talk):
    """20 MB by descriptor, five times: nothing of it is held."""
    before = talk.status()["peak_memory"]
    payload = os.urandom(20_000_000)
    for number in range(5):
        talk.put(key_of(str(number)), payload[number:])
    assert talk.status()["peak_memory"] - before < 20_000_000
