"""Samples for fuzzing, made from the protocol's annotations, so that they include new messages."""

from __future__ import annotations

import struct
import types
import typing

from support.places import TESTS, digest, put_message
from xcache.keys.options import LEFT_OUT
from xcache.wire import commands, envelope, framing, protocol
from xcached.tiers import action_results as action_results_of_bazel

CORPUS = TESTS / "fuzz" / "corpus"
KEY = "ab" * 32
RAWS = [b"an executable, or what passes for one " * 8, bytes(range(256)) * 3, b"x", bytes(300_000)]
_SAMPLES: dict[typing.Any, typing.Any] = {str: KEY, int: 5, float: 2.5, bool: True, bytes: b"bytes"}


def kept(target: str) -> list[bytes]:
    """Return a target's corpus: samples, and every case that ever broke something."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def messages() -> list[protocol.Message]:
    """Return two of every message, with all fields and with as few as possible, and typical puts."""
    made = [
        kind(*(_sample(hint, full) for hint in typing.get_type_hints(kind).values()))
        for kind in typing.get_args(protocol.Message)
        for full in (True, False)
    ]
    large = b"x" * (protocol.INLINE_LIMIT + 1)
    return [*made, put_message(KEY, b"content", b"program"), put_message(KEY, large, b"program", payload=None)]


def requests() -> list[protocol.Message]:
    """Return all messages but Stop."""
    return [message for message in messages() if not isinstance(message, commands.Stop)]


def bodies() -> list[bytes]:
    """Return the bodies of frames with these messages."""
    return [framing.encode(3, message)[4:] for message in messages()]


def streams() -> list[bytes]:
    """Return conversations of a few frames each."""
    frames = [framing.encode(number, message) for number, message in enumerate(messages())]
    return [b"".join(frames[start : start + 3]) for start in range(0, len(frames), 3)]


def envelopes() -> list[bytes]:
    """Return sealed contents."""
    return [envelope.seal(KEY, raw) for raw in RAWS] + [envelope.seal("cd" * 32, RAWS[0])]


ENVELOPE_WORDS = [
    *(b"xcache\x00\x01", bytes.fromhex(KEY), envelope.seal(KEY, b"")[:48]),
    *(envelope.compress(b""), envelope.compress(RAWS[0])),
    # Beginnings of frames: valid, skippable, with a dictionary, of an older format.
    *(b"\x28\xb5\x2f\xfd", struct.pack("<II", 0x184D2A50, 8) + bytes(8), b"\x37\xa4\x30\xec", b"\x25\xb5\x2f\xfd"),
    # Blocks: the last one, empty; one byte 128 KiB times; a raw one.
    *(b"\x01\x00\x00", b"\x02\x00\x10x", b"\x03\x00\x10x", b"\x18\x00\x00xyz"),
    *(struct.pack(">Q", 2**33), struct.pack("<Q", 2**33), bytes(8)),
]


def wire_fields() -> list[bytes]:
    """Return fields of compile options: at the top, in the build options and in the debug options."""
    numbers = (1, 2, 3, 7, 9, 61, 109, 357, 500, 2**29 - 1, *list(LEFT_OUT)[::8])
    debug = [field(number, value) for number in numbers for value in (0, 2**64 - 1, b"", b"value")]
    build = [field(3, each) for each in debug] + [field(9, field(3, b"\1\2"))]
    top = [field(3, each) for each in build] + [field(7, field(1, b"xla_dump_to") + field(2, b"x"))]
    return [*debug, *build, *top, varint(2**64), b"\xff" * 11, b"\x0b", b"\x0c", b"\x1d", b"\x19"]


def varint(value: int) -> bytes:
    """Return a number as protocol buffers write it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes) -> bytes:
    """Return a field as protocol buffers write it."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def action_results() -> list[bytes]:
    """Return messages of caches for Bazel: with a content, with the name of one, and with what servers add."""
    references = [action_results_of_bazel.Reference(KEY, size) for size in (0, 300_000, 2**63 - 1)]
    samples = [
        action_results_of_bazel.with_content(b"content"),
        *map(action_results_of_bazel.with_reference, references),
    ]
    return [*samples, *(field(9, field(1, b"host")) + sample + field(4, 0) for sample in samples)]


_SPACES = [" ", "\n", "\t", "\0", "\x1c", "\u2003"]
_FILES = ["--xla_gpu_ptx_file=", "--xla_gpu_topology_filename=/", "--xla_gpu_llvm_ir_file=x\0y", "x" * 300, "/", "."]
_PARTS = ["--", "-", "=", '"', "'", "\\", "ü", "x y", "true", "rest", "--rest=1"]
_FLAGS = ["--xla_a=1", "--xla_a", " --xla_b=", "--xla_dump_to=/x", '--xla_c="a b\\"c"', "--xla_d='e f'"]
FLAG_WORDS = [
    *map(str.encode, [*_SPACES, *_FILES, *_PARTS, *_FLAGS]),
    *(b"\xff", b"\xe2\x82", b"\xed\xa0\x80"),
]


def flags() -> list[bytes]:
    """Return environments: XLA_FLAGS, LIBTPU_INIT_ARGS and arguments, separated by byte 0x1e."""
    return [
        b"--xla_cpu_a=1 --xla_gpu_b=\"x y\" --xla_dump_to=/x\x1e--xla_tpu_c='z'\x1e--xla_d=4\x1e--xla_e",
        b"\x1e\x1e--xla_f=\x1eother",
        b'  --xla_a="unfinished',
        b"--xla_gpu_load_autotune_results_from=nowhere",
        b"nowhere.txt",
        b"",
    ]


def _sample(hint: typing.Any, full: bool) -> typing.Any:
    inside = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return _sample(inside[0 if full else -1], full)
    if typing.get_origin(hint) is list:
        return [_sample(inside[0], full)] if full else []
    if typing.get_origin(hint) is dict:
        return {digest(b"name")[:8]: _sample(inside[1], full)} if full else {}
    if hint is types.NoneType:
        return None
    return _SAMPLES[hint] if full else hint()


def hello() -> bytes:
    """Return the greeting of a well-behaved client."""
    return framing.encode(1, protocol.Hello(protocol.VERSION, "fuzz", 1, "fuzz"))
