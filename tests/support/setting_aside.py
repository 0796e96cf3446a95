"""Helpers for tests of quarantined entries."""

from __future__ import annotations

from support.conversation import Conversation, key_of
from support.places import digest
from xcache.wire import protocol

KEY = key_of("a")
LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def quarantined(place) -> list[tuple[object, ...]]:
    return place.query("SELECT key, blob, reason FROM quarantined ORDER BY id")


def files(place, folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place.dir / folder).rglob("*") if path.is_file()}


def complain(talk: Conversation, payload: bytes, reason: str = "its digest differs", *, whole: bool = False) -> None:
    """Get an entry, and complain of it as a reader does."""
    talk.get(KEY)
    assert talk.ask(protocol.Complain(KEY, digest(payload), reason, whole)) == protocol.Done()


def strikes(place) -> list[tuple[object, ...]]:
    return place.query("SELECT count FROM strikes ORDER BY rowid")
