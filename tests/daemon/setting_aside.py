"""What tests of entries that are set aside have in common."""

from __future__ import annotations

from pathlib import Path

from conversation import Conversation, key_of
from places import digest

from xcache import protocol

TESTS = Path(__file__).parent.parent
KEY = key_of("a")
LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def quarantined(place) -> list[tuple[object, ...]]:
    return place.query("SELECT key, blob, reason FROM quarantined ORDER BY id")


def files(place, folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place.dir / folder).rglob("*") if path.is_file()}


def complain(talk: Conversation, payload: bytes, reason: str = "its digest differs") -> None:
    """Of what was handed out, as a reader does; if it is not there, of that."""
    talk.get(KEY)
    assert talk.ask(protocol.Complain(KEY, digest(payload), reason)) == protocol.Done()
