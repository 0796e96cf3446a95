"""What is damaged is served no more, is kept to be looked at, and can be replaced."""

from __future__ import annotations

import pytest
from conversation import talking
from places import digest
from setting_aside import KEY, LARGE, complain, files, quarantined

from xcache import protocol


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["in a row", "in a file"])
def test_what_is_complained_of_is_set_aside_with_its_bytes_and_the_reason(place, talk, payload):
    talk.put(KEY, payload)
    complain(talk, payload)
    assert talk.get(KEY) is None
    assert quarantined(place) == [(KEY, digest(payload), "its digest differs")]
    assert list(files(place, "quarantine").values()) == [payload]
    assert place.query("SELECT amount FROM statistics WHERE name = 'quarantined'") == [(1.0,)]
    assert talk.status()["entries"] == 0
    assert not [name for name in files(place, "blobs") if name == digest(payload)]


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["in a row", "in a file"])
def test_the_fresh_one_takes_its_place_also_if_it_is_the_same(place, talk, payload):
    talk.put(KEY, payload)
    complain(talk, payload)
    assert talk.put(KEY, payload) == protocol.Stored(True)
    assert talk.get(KEY) == payload
    assert len(quarantined(place)) == 1


def test_a_complaint_of_what_was_replaced_meanwhile_is_passed_over(place, talk):
    talk.put(KEY, b"old")
    talk.put(KEY, b"new", overwrite=True)
    complain(talk, b"old")
    assert talk.get(KEY) == b"new"
    assert quarantined(place) == []


def test_a_complaint_of_nothing_is_nothing(place, talk):
    complain(talk, b"whatever")
    assert talk.ask(protocol.Complain("no key", "no digest", "no reason")) == protocol.Done()
    assert quarantined(place) == []


def test_a_file_that_is_gone_is_set_aside_without_bytes(place, talk):
    talk.put(KEY, LARGE)
    (place.dir / "blobs" / digest(LARGE)[:2] / digest(LARGE)).unlink()
    assert talk.get(KEY) is None
    talk.ask(protocol.Sync())
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
    talk.ask(protocol.Sync())
    assert [reason for *_, reason in quarantined(place)] == ["its row is damaged"]
    assert talk.put(KEY, b"x") == protocol.Stored(True)
    assert talk.get(KEY) == b"x"


def test_only_so_much_is_kept(place):
    place.start_daemon(XCACHE_MAX_SIZE="20M")
    with talking(place) as talk:
        for number in range(8):
            payload = bytes([number]) * 300_000
            talk.put(KEY, payload)
            complain(talk, payload)
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
        again.ask(protocol.Sync())
    assert list(files(place, "quarantine").values()) == [LARGE]


def test_clear_clears_it(place, talk):
    talk.put(KEY, LARGE)
    complain(talk, LARGE)
    talk.ask(protocol.Clear())
    assert quarantined(place) == []
    assert files(place, "quarantine") == {}
