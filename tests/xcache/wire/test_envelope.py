"""The envelope: the bytes that went in come out, or DamagedError does."""

from __future__ import annotations

import hashlib
import os
import random
import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from xcache.errors import DamagedError
from xcache.wire import envelope
from xcache.wire.hashing import digest

KEY, OTHER = "ab" * 32, "cd" * 32
RAW = b"an executable, or what passes for one " * 5
HEADER = struct.Struct(">8s32sQ")


def opened(sealed: bytes, key: str = KEY) -> bytes:
    """Open an envelope whose digest is right, whatever is in it."""
    return envelope.open_sealed(key, digest(sealed), sealed)


@given(st.binary(min_size=1, max_size=5000))
def test_round_trip(raw):
    sealed = envelope.seal(KEY, raw)
    assert opened(sealed) == raw


def test_round_trip_of_something_large():
    raw = hashlib.sha256(b"seed").digest() * 300_000
    assert opened(envelope.seal(KEY, raw)) == raw


def test_content_that_repeats_far_apart_is_stored_once():
    """The executables of TPUs repeat so; without a wide window the frame is as large as its content."""
    part = random.Random(1).randbytes(3 << 20)
    sealed = envelope.seal(KEY, part * 3)
    assert len(sealed) < len(part) * 1.1
    assert opened(sealed) == part * 3


def test_large_content_is_checked_as_well():
    sealed = envelope.seal(KEY, random.Random(1).randbytes(2 << 20))
    for at in (0, 20, 45, 500_000, len(sealed) - 1):
        altered = bytearray(sealed)
        altered[at] ^= 1
        with pytest.raises(DamagedError, match="its digest differs"):
            envelope.open_sealed(KEY, digest(sealed), bytes(altered))
    with pytest.raises(DamagedError, match="another key"):
        opened(sealed, OTHER)


def test_the_same_bytes_give_the_same_envelope():
    assert envelope.seal(KEY, RAW) == envelope.seal(KEY, RAW)


def test_every_flipped_bit_is_noticed():
    sealed = envelope.seal(KEY, RAW)
    expected = digest(sealed)
    for altered in flipped(sealed):
        with pytest.raises(DamagedError):
            envelope.open_sealed(KEY, expected, altered)


def test_every_flipped_bit_is_noticed_even_where_the_digest_was_made_to_fit():
    sealed = envelope.seal(KEY, RAW)
    for altered in flipped(sealed):
        try:
            raw = opened(altered)
        except DamagedError:
            continue
        assert raw == RAW


def flipped(content: bytes):
    for bit in range(8 * len(content)):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << bit % 8
        yield bytes(altered)


def test_every_truncation_is_noticed():
    sealed = envelope.seal(KEY, RAW)
    expected = digest(sealed)
    for length in range(len(sealed)):
        with pytest.raises(DamagedError, match="digest"):
            envelope.open_sealed(KEY, expected, sealed[:length])
        with pytest.raises(DamagedError):
            opened(sealed[:length])


def test_the_entry_of_another_key_is_not_taken():
    with pytest.raises(DamagedError, match="another key"):
        opened(envelope.seal(OTHER, RAW))


def test_a_size_that_differs_from_the_frame_is_noticed():
    frame = envelope.compress(RAW)
    for size in (0, len(RAW) - 1, len(RAW) + 1, 2**64 - 1):
        with pytest.raises(DamagedError, match="size"):
            opened(HEADER.pack(b"xcache\x00\x01", bytes.fromhex(KEY), size) + frame)


def test_a_frame_that_does_not_say_its_size_is_not_opened():
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
    for size in (len(RAW), 2**64 - 1):
        with pytest.raises(DamagedError):
            opened(HEADER.pack(b"xcache\x00\x01", bytes.fromhex(KEY), size) + frame)


@pytest.mark.parametrize("claimed", [len(RAW) - 1, len(RAW) + 1, 2**20, 2**33, 2**34, 2**63])
def test_a_bomb_whose_header_and_frame_lie_alike_does_not_go_off(claimed):
    """The content size is the last 8, 4, 2 or 1 bytes of the frame's header; here it is written as 8."""
    frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(RAW)
    parameters = zstandard.get_frame_parameters(frame)
    assert (parameters.content_size, parameters.has_checksum) == (len(RAW), True)
    old_header = zstandard.frame_header_size(frame)
    lying = frame[:4] + bytes([0xC0 | 0x20 | 0x04]) + struct.pack("<Q", claimed) + frame[old_header:]
    assert zstandard.get_frame_parameters(lying).content_size == claimed
    with pytest.raises(DamagedError):
        opened(HEADER.pack(b"xcache\x00\x01", bytes.fromhex(KEY), claimed) + lying)


def test_a_frame_that_lost_its_checksum_is_not_opened():
    """One bit of its header says that it has one; without it, nothing in the frame would be found altered."""
    sealed = bytearray(envelope.seal(KEY, RAW))
    sealed[HEADER.size + 4] ^= 0x04
    with pytest.raises(DamagedError, match="checksum"):
        opened(bytes(sealed))


def test_a_frame_that_says_it_holds_nothing_is_not_opened():
    frame = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(RAW)
    lying = frame[:4] + bytes([0xC0 | 0x20 | 0x04]) + bytes(8) + frame[zstandard.frame_header_size(frame) :]
    for content in (lying, envelope.compress(b"")):
        with pytest.raises(DamagedError, match="size"):
            opened(HEADER.pack(b"xcache\x00\x01", bytes.fromhex(KEY), 0) + content)


def test_bytes_after_the_frame_are_noticed():
    with pytest.raises(DamagedError):
        opened(envelope.seal(KEY, RAW) + b"\0")
    with pytest.raises(DamagedError):
        opened(envelope.seal(KEY, RAW) + envelope.compress(RAW))


def test_bytes_that_are_no_envelope_are_refused():
    for content in (b"", b"x", b"x" * 48, b"x" * 1000, HEADER.pack(b"xcache\x00\x01", bytes.fromhex(KEY), 0)):
        with pytest.raises(DamagedError):
            opened(content)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 4094, 32 * 1024, 32 * 1024 + 1, 100_000])
def test_a_digest_is_sha_256_however_large_the_content_is(size):
    content = os.urandom(size)
    assert digest(content) == digest(memoryview(content)) == hashlib.sha256(content).hexdigest()
