"""The digest of a file's content."""

from __future__ import annotations

import hashlib
import random
import threading

import pytest

from xcache.wire import hashing
from xcache.wire.hashing import digest, file_digest

PART = 16 * 1024**2


@pytest.fixture
def content() -> bytearray:
    """Two parts and a piece of a third one."""
    return bytearray(random.Random(0).randbytes(2 * PART + 100_000))


def digest_of(tmp_path, content: bytes, threads: int = 1) -> str:
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        return file_digest(file, threads)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART])
def test_the_digest_of_a_small_file_is_that_of_its_content(tmp_path, size):
    assert digest_of(tmp_path, b"x" * size, 4) == digest(b"x" * size)


def test_any_number_of_threads_makes_the_same_digest(tmp_path, content):
    parts = [content[at : at + PART] for at in range(0, len(content), PART)]
    expected = digest(b"".join(hashlib.sha256(part).digest() for part in parts))
    assert {digest_of(tmp_path, content, threads) for threads in (1, 2, 3, 4, 9)} == {expected}


@pytest.mark.parametrize("at", [0, PART - 1, PART, 2 * PART, -1])
def test_each_byte_counts(tmp_path, content, at):
    before = digest_of(tmp_path, content, 2)
    content[at] ^= 1
    assert digest_of(tmp_path, content, 2) != before


def test_the_order_of_parts_and_the_length_count(tmp_path, content):
    swapped = content[PART : 2 * PART] + content[:PART] + content[2 * PART :]
    found = {digest_of(tmp_path, each) for each in (content, content + b"\0", content[:-1], swapped)}
    assert len(found) == 4


def test_a_process_without_more_threads_makes_the_same_digest(tmp_path, content, monkeypatch):
    expected = digest_of(tmp_path, content)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert digest_of(tmp_path, content, 3) == expected


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_part_that_cannot_be_read_is_an_error(tmp_path, content, monkeypatch, error, failing):
    part_digest = hashing._part_digest

    def fail(descriptor: int, number: int) -> bytes:
        if number == failing:
            raise error
        return part_digest(descriptor, number)

    monkeypatch.setattr(hashing, "_part_digest", fail)
    with pytest.raises(error):
        digest_of(tmp_path, content, 2)
