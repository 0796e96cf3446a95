"""A damaged entry is not served, is kept for inspection, and can be replaced."""

from __future__ import annotations

import os

import pytest
from support.conversation import key_of, talking
from support.places import digest, get_message
from support.setting_aside import KEY, LARGE, complain, files, quarantined

from xcache.wire import commands, envelope, protocol


# These are no envelopes of their key, which is damage like any other.
@pytest.mark.parametrize("content", [b"small", LARGE], ids=["in a row", "in a file"])
def test_a_damaged_entry_is_set_aside_with_its_bytes_and_the_reason(place, talk, content):
    talk.put(KEY, content)
    complain(talk, content)
    assert talk.get(KEY) is None
    assert quarantined(place) == [(KEY, digest(content), "its digest differs")]
    assert list(files(place, "quarantine").values()) == [content]
    assert place.query("SELECT amount FROM statistics WHERE name = 'quarantined'") == [(1.0,)]
    assert talk.status()["entries"] == 0
    assert not [name for name in files(place, "blobs") if name == digest(content)]


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["in a row", "in a file"])
def test_the_fresh_one_takes_its_place_also_if_it_is_the_same(place, talk, content):
    talk.put(KEY, content)
    complain(talk, content)
    assert talk.put(KEY, content) == protocol.Stored(True)
    assert talk.get(KEY) == content
    assert len(quarantined(place)) == 1


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["in a row", "in a file"])
def test_an_entry_that_is_not_damaged_stays_whatever_a_reader_says(place, talk, content):
    sealed = envelope.seal(KEY, content)
    talk.put(KEY, sealed)
    complain(talk, sealed)
    assert talk.get(KEY) == sealed
    assert quarantined(place) == []


def test_an_entry_that_was_not_loaded_stays_until_a_fresh_one_is_there_and_its_bytes_are_kept(place, talk):
    sealed, fresh = envelope.seal(KEY, os.urandom(100_000)), envelope.seal(KEY, b"fresh")
    talk.put(KEY, sealed)
    complain(talk, sealed, "it could not be loaded", whole=True)
    assert talk.get(KEY) == sealed
    assert talk.put(KEY, fresh, overwrite=True) == protocol.Stored(True)
    assert talk.get(KEY) == fresh
    assert quarantined(place) == [(KEY, digest(sealed), "it could not be loaded")]
    assert list(files(place, "quarantine").values()) == [sealed]


def test_a_reader_is_not_given_an_unusable_entry_again(place, talk):
    """It may compile it for all who cannot, and who still can get what there is."""
    talk.put(KEY, b"old")
    wanted = get_message(KEY, 60.0)._replace(unusable=digest(b"old"))
    lease = talk.ask(wanted)
    assert lease.lease
    with talking(place) as other, talking(place) as third:
        waiting = other.say(wanted)
        assert isinstance(other.hear()[1], protocol.Wait)
        assert third.get(KEY) == b"old"
        talk.put(KEY, b"fresh", overwrite=True)
        assert other.answer(waiting).payload == b"fresh"
    assert talk.ask(wanted).payload == b"fresh"


def test_a_late_complaint_does_not_set_aside_what_was_stored_afresh(place, talk):
    """Two programs met the same damage; between their complaints the very same bytes came back."""
    sealed = envelope.seal(KEY, b"whole")
    talk.put(KEY, sealed)
    assert talk.get(KEY) == sealed
    place.execute("UPDATE blobs SET content = ?", b"other")
    with talking(place) as other:
        complain(other, sealed)
    assert talk.put(KEY, sealed) == protocol.Stored(True)
    assert talk.ask(protocol.Complain(KEY, digest(sealed), "its digest differs", False)) == protocol.Done()
    assert talk.get(KEY) == sealed
    assert len(quarantined(place)) == 1


def test_a_complaint_of_what_was_replaced_meanwhile_is_passed_over(place, talk):
    talk.put(KEY, b"old")
    talk.put(KEY, b"new", overwrite=True)
    complain(talk, b"old")
    assert talk.get(KEY) == b"new"
    assert quarantined(place) == []


def test_an_entry_whose_size_is_damaged_is_set_aside(place, talk):
    """Its bytes are whole, but every reader refuses them for the size, and a new compile may make the same bytes."""
    sealed = envelope.seal(KEY, os.urandom(200_000))
    talk.put(KEY, sealed)
    assert talk.get(KEY) == sealed
    place.execute("UPDATE blobs SET stored_size = stored_size + 1 WHERE digest = ?", digest(sealed))
    complain(talk, sealed)
    assert len(quarantined(place)) == 1
    assert talk.put(KEY, sealed) == protocol.Stored(True)
    assert talk.get(KEY) == sealed


def test_a_complaint_of_nothing_is_nothing(place, talk):
    complain(talk, b"whatever")
    assert talk.ask(protocol.Complain("no key", "no digest", "no reason", False)) == protocol.Done()
    assert quarantined(place) == []


def test_a_file_that_is_gone_is_set_aside_without_bytes(place, talk):
    talk.put(KEY, LARGE)
    (place.dir / "blobs" / digest(LARGE)[:2] / digest(LARGE)).unlink()
    assert talk.get(KEY) is None
    talk.ask(commands.Sync())
    assert quarantined(place) == [(KEY, digest(LARGE), "its file is gone")]
    assert files(place, "quarantine") == {}
    assert talk.put(KEY, LARGE) == protocol.Stored(True)
    assert talk.get(KEY) == LARGE


def test_an_entry_without_its_content_can_be_stored_again(place, talk):
    talk.put(KEY, b"x")
    place.stop()
    place.execute("DELETE FROM blobs WHERE digest = ?", digest(b"x"))
    place.start_daemon()
    with talking(place) as again:
        assert again.get(KEY) is None
        assert again.put(KEY, b"x") == protocol.Stored(True)
        assert again.get(KEY) == b"x"


@pytest.mark.parametrize(
    "change",
    [
        "blobs SET content = 'text'",
        "blobs SET content = CAST(x'ff00ff' AS TEXT)",
        "blobs SET content = 1.5",
        "blobs SET stored_size = 'large'",
        "entries SET compile_seconds = 'long'",
        "entries SET compile_seconds = NULL",
    ],
)
def test_a_row_that_was_altered_is_set_aside(place, talk, change):
    talk.put(KEY, b"x")
    place.execute(f"UPDATE {change}")
    assert talk.get(KEY) is None
    talk.ask(commands.Sync())
    assert [reason for *_, reason in quarantined(place)] == ["its row is damaged"]
    assert talk.put(KEY, b"x") == protocol.Stored(True)
    assert talk.get(KEY) == b"x"


def test_only_so_much_is_kept(place):
    place.start_daemon(XCACHE_MAX_SIZE="20M")
    with talking(place) as talk:
        for number in range(8):
            content = bytes([number]) * 300_000
            talk.put(KEY, content)
            complain(talk, content)
        # A twentieth of the store.
        assert sum(map(len, files(place, "quarantine").values())) == 900_000
        assert len(quarantined(place)) == 3
        for number in range(120):
            talk.put(KEY, b"small %d" % number)
            complain(talk, b"small %d" % number)
        assert len(quarantined(place)) == 100


def test_a_restart_keeps_it_and_sweeps_what_no_row_speaks_of(place, talk):
    talk.put(KEY, LARGE)
    complain(talk, LARGE)
    (place.dir / "quarantine" / "left over").write_bytes(b"x")
    place.stop()
    place.start_daemon()
    with talking(place) as again:
        again.ask(commands.Sync())
    assert list(files(place, "quarantine").values()) == [LARGE]


def test_clear_clears_it(place, talk):
    talk.put(KEY, LARGE)
    complain(talk, LARGE)
    talk.ask(commands.Clear())
    assert quarantined(place) == []
    assert files(place, "quarantine") == {}


def test_an_entry_that_was_replaced_while_a_reader_looked_for_its_file_stays(place, talk):
    """Overwritten again and again, while all of them are predicted: the reader comes for files that just went."""
    keys = [key_of(str(number)) for number in range(64)]
    for key in keys:
        talk.put(key, os.urandom(40_000))
    item = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.5}
    talk.ask(protocol.Remember("p", "", [{"key": key, **item} for key in keys], {digest(b"o"): b"o"}))
    with talking(place) as reader:
        for number in range(200):
            stored = talk.begin_put(keys[number % 8], os.urandom(40_000), overwrite=True)
            reader.ask(protocol.Predict("p", ""))
            while reader.descriptors:
                os.close(reader.descriptors.pop())
            assert talk.answer(stored) == protocol.Stored(True)
    assert quarantined(place) == []
    assert talk.status()["entries"] == len(keys)
