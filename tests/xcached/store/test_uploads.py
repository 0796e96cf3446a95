"""Entries and runs of the store are queued for a remote store when somebody asks for it."""

from __future__ import annotations

import os

import pytest
from support.conversation import key_of
from support.stores import shelf

from xcache.wire import protocol
from xcached.store import uploads
from xcached.store.uploads import Uploads

TIER, OTHER = "file:///one", "file:///two"
OWN, STRANGER = 1, 2


@pytest.fixture
def filled(tmp_path):
    """Five entries that may be shared, and one that may not; they were there before the tiers."""
    with shelf(tmp_path) as made:
        for number in range(5):
            made.put(key_of(f"{number}"), b"x", b"program", compile_seconds=float(number))
        made.put(key_of("stranger's"), b"y", b"program", uid=STRANGER, compile_seconds=9.0)
        yield made


def pushed(shelf, tier: str = TIER, *, even_quick: bool = True) -> dict[str, protocol.Scalar]:
    """Push on the writer thread, to the end."""
    steps = shelf.uploads.push(tier, even_quick=even_quick)
    found: list[dict[str, protocol.Scalar]] = []

    def work(_store) -> None:
        try:
            while True:
                next(steps)
        except StopIteration as end:
            found.append(end.value)

    assert shelf.call(work) == protocol.Done()
    return found[0]


def queued(shelf, tier: str = TIER) -> list[str]:
    return [name for name, of in shelf.query("SELECT name, tier FROM uploads ORDER BY rowid") if of == tier]


def begin(shelf, told: list[int]) -> None:
    def make(store) -> None:
        shelf.uploads = Uploads(store, lambda uid: uid == OWN, lambda: told.append(os.getpid()))
        shelf.uploads.send_to({TIER: 2.0, OTHER: 0.0})

    shelf.call(make)


def test_the_dearest_come_first_and_what_has_no_room_is_counted(filled, monkeypatch):
    monkeypatch.setattr(uploads, "_MOST_ROWS", 3)
    monkeypatch.setattr(uploads, "_ROWS_OF_A_STEP", 2)
    told: list[int] = []
    begin(filled, told)
    assert pushed(filled) == {"name": TIER, "entries": 3, "runs": 0, "left": 2}
    assert queued(filled) == [key_of(number) for number in "432"]
    assert not queued(filled, OTHER)
    assert told
    # The rows that wait stay, and take the room.
    assert pushed(filled) == {"name": TIER, "entries": 0, "runs": 0, "left": 2}
    assert queued(filled) == [key_of(number) for number in "432"]
    filled.check()


def test_what_compiled_faster_than_the_setting_demands_stays_unless_all_is_wanted(filled):
    begin(filled, [])
    assert pushed(filled, even_quick=False)["entries"] == 3
    # Rows that are queued already are not counted again.
    assert pushed(filled)["entries"] == 2
    assert pushed(filled, OTHER, even_quick=False)["entries"] == 5
    assert key_of("stranger's") not in queued(filled) + queued(filled, OTHER)
