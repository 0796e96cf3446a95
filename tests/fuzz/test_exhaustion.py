"""A peer's message costs no more memory than a frame may have, and time in proportion to its bytes."""

from __future__ import annotations

import resource
import struct
import time
import tracemalloc

import msgpack
import pytest
import zstandard
from support import seeds

from xcache.errors import DamagedError, ProtocolError
from xcache.keys import flags
from xcache.wire import envelope, framing, protocol
from xcache.wire.hashing import digest

# Generous: what took the square of its size would take minutes.
BOUND = 30.0


@pytest.fixture
def in_time():
    """The processor's time counts, and not the wall clock's: others may use the machine."""
    start = time.process_time()
    yield
    assert time.process_time() - start < BOUND


def largest_found() -> protocol.Message:
    found = next(message for message in seeds.messages() if isinstance(message, protocol.Found))
    return found._replace(payload=b"x" * (protocol.MAX_FRAME - 1000))


def test_many_small_frames_in_one_piece(in_time):
    frame = framing.encode(1, protocol.Done())
    count = 4 * protocol.MAX_FRAME // len(frame)
    assert sum(1 for _ in framing.FrameReader().feed(frame * count)) == count


def test_a_large_frame_in_single_bytes(in_time):
    frame = framing.encode(1, largest_found())
    reader = framing.FrameReader()
    got = [each for at in range(len(frame)) for each in reader.feed(frame[at : at + 1])]
    assert got == [(1, largest_found())]


def test_a_reader_holds_one_frame_whatever_has_passed_through_it():
    frame, reader = framing.encode(1, largest_found()), framing.FrameReader()
    tracemalloc.start()
    try:
        for _ in range(20):
            for at in range(0, len(frame), 65536):
                for _, _ in reader.feed(frame[at : at + 65536]):
                    pass
        list(reader.feed(frame[:-1]))
        assert tracemalloc.get_traced_memory()[0] < 2 * protocol.MAX_FRAME
        assert tracemalloc.get_traced_memory()[1] < 6 * protocol.MAX_FRAME
    finally:
        tracemalloc.stop()


UNREADABLE = {
    "something behind it": msgpack.packb([1, "Get", "x" * 500_000]) + b"\xc0" * 500_000,
    "something behind what is deep": b"\x91" * 1000 + b"\xc0\xc0",
    "a text that is none": b"\x93\x01\xa3Get\xdb" + struct.pack(">I", 900_000) + b"\xff" * 900_000,
    "an unknown name": msgpack.packb([1, "x" * 900_000]),
    "a key that is none": msgpack.packb({tuple(range(4000)): 1, "x": b"\xff" * 500_000}),
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=list(UNREADABLE))
def test_an_unreadable_message_does_not_fill_the_log(body):
    """The reason goes into the daemon's log, and into a program's standard error."""
    with pytest.raises(ProtocolError) as caught:
        framing.decode(body)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("claimed", [2**20, 2**28, 2**33])
def test_an_envelope_that_claims_gigabytes_and_has_none_takes_none(claimed):
    frame = envelope.compress(b"an executable, or what passes for one " * 20)
    head = frame[:4] + b"\xe4" + struct.pack("<Q", claimed)
    lying = envelope.seal(seeds.KEY, b"x")[:40] + struct.pack(">Q", claimed) + head
    lying += frame[zstandard.frame_header_size(frame) :]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedError, match="cannot be decompressed"):
        envelope.open_sealed(seeds.KEY, digest(lying), lying)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_a_long_file_of_flags(tmp_path, in_time):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1 " * 300_000)
    assert flags.collect({"XLA_FLAGS": str(file)}, ()) == b"\n".join([b"XLA_FLAGS xla_a='1'"] * 300_000)
