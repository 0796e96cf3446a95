"""The messages of Bazel's caches, which anybody may have written."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcached.tiers.action_results import MOST_BYTES_OF_REFERENCE, Reference, read, with_content, with_reference

DIGESTS = st.builds(
    Reference, sha256=st.text("0123456789abcdef", min_size=64, max_size=64), size=st.integers(0, 2**63 - 1)
)
# execution_metadata with a worker's name, and exit_code: what servers may add.
METADATA = b"\x4a\x06\x0a\x04host" + b"\x20\x00"


@given(st.binary(min_size=1, max_size=300))
def test_a_content(content: bytes) -> None:
    message = with_content(content)
    assert read(message) == content
    assert read(METADATA + message + METADATA) == content
    for end in range(len(message)):
        with pytest.raises(ValueError, match=r"beyond|neither"):
            read(message[:end])


@given(DIGESTS)
def test_a_reference(reference: Reference) -> None:
    message = with_reference(reference)
    assert read(message) == reference
    assert read(METADATA + message + METADATA) == reference
    assert len(message) + 100 < MOST_BYTES_OF_REFERENCE
    for end in range(len(message)):
        with pytest.raises(ValueError, match=r"beyond|neither"):
            read(message[:end])


@given(st.binary(max_size=200))
def test_any_bytes(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(read(message), (bytes, Reference))


@given(DIGESTS, st.integers(0, 100), st.integers(0, 255))
def test_a_spoiled_byte(reference: Reference, place: int, byte: int) -> None:
    message = bytearray(with_reference(reference))
    message[place % len(message)] = byte
    with contextlib.suppress(ValueError):
        assert isinstance(read(bytes(message)), (bytes, Reference))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        METADATA,
        b"\x2a\x00",
        b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01x",
        b"\x2a" + b"\x80" * 20,
        b"\x00\x00",
        b"\x12\x00",
        b"\x12\x04\x12\x02\x0a\x00",
        b"\x28\x05",
        with_content(b"x") + with_reference(Reference("0" * 64, 1)),
        with_reference(Reference("0" * 64, 1)) * 2,
        with_reference(Reference("A" * 64, 1)),
        with_reference(Reference("0" * 63, 1)),
        with_reference(Reference("0" * 64, 2**63)),
    ],
)
def test_what_is_no_object(message: bytes) -> None:
    with pytest.raises(ValueError):
        read(message)
