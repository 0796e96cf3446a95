"""Look-ups of keys that no entry can have, and of an entry whose file is gone."""

from __future__ import annotations

from support.conversation import key_of
from support.places import get_message

from xcache.wire import protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def test_a_key_of_any_kind_is_missing(talk):
    for key in ("", "short", "x" * protocol.MAX_TEXT, "ü" * 64, "' OR 1=1 --", "../etc/passwd", "\0", key_of("none")):
        assert talk.ask(get_message(key)).lease == 0


def test_an_entry_whose_file_is_gone_is_dropped_and_can_be_stored_again(place, talk):
    talk.put(key_of("a"), LARGE)
    talk.put(key_of("b"), b"small")
    for path in place.dir.glob("blobs/??/*"):
        path.unlink()
    assert talk.get(key_of("a")) is None
    assert place.query("SELECT key FROM entries") == [(key_of("b"),)]
    assert talk.put(key_of("a"), LARGE) == protocol.Stored(True)
    assert talk.get(key_of("a")) == LARGE
