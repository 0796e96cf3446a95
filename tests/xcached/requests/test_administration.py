"""Counts and uses are kept, and a client counts only what is its own to count."""

from __future__ import annotations

import time

import pytest
from support.conversation import key_of
from support.places import digest

from xcache.wire import commands, protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def statistics(place) -> dict[str, float]:
    rows = dict(place.query("SELECT name, amount FROM statistics"))
    rows.pop("since", None)
    return rows


def test_uses_are_seen_after_a_sync(place, talk):
    talk.put(key_of("a"), b"a")
    talk.put(key_of("b"), LARGE)
    before = time.time()
    for _ in range(3):
        talk.get(key_of("a"))
        talk.get(key_of("b"))
        talk.get(key_of("none"))
    talk.ask(commands.Sync())
    rows = place.query("SELECT hits, last_used_at >= ? FROM entries", before)
    assert rows == [(3, 1), (3, 1)]


def test_reports_add_up(place, talk):
    for _ in range(2):
        counts = {"hits": 2, "misses": -1, "saved_seconds": -0.5, "errors:connection lost": 1, "uncacheable:a: b": 3}
        assert talk.ask(protocol.Report(counts)) == protocol.Done()
    assert statistics(place) == {
        "hits": 4,
        "misses": -2,
        "saved_seconds": -1.0,
        "errors:connection lost": 2,
        "uncacheable:a: b": 6,
    }
    talk.ask(commands.ZeroStatistics())
    assert statistics(place) == {}
    assert place.query("SELECT round(amount / 100) FROM statistics") == [(round(time.time() / 100),)]


def test_a_client_cannot_invent_counters(place, talk):
    """A client cannot change counters that only the daemon can know, either."""
    invented = ("stores", "bytes_written", "evictions", "since", "entries", "", "hits ", "HITS", "errors", "warnings:x")
    talk.ask(protocol.Report(dict.fromkeys(invented, 5)))
    talk.ask(protocol.Report({"errors:" + "x" * 1000: 1}))
    assert statistics(place) == {}


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -float("inf"), 2**63, 2**64 - 1])
def test_a_count_that_cannot_be_is_not_counted_and_harms_no_other(place, talk, amount):
    for _ in range(2):
        talk.ask(protocol.Report({"hits": 1}))
        talk.ask(protocol.Report({"misses": amount, "load_seconds": amount}))
    # Still there, and still writing.
    talk.socket.settimeout(5)
    assert talk.put(key_of("a"), b"a").kept
    counted = statistics(place)
    assert counted["hits"] == 2
    assert all(abs(count) < 1e300 for count in counted.values())


def test_stores_are_counted_where_they_are_made(place, talk):
    talk.put(key_of("a"), b"12345")
    talk.put(key_of("a"), b"12345")
    talk.put(key_of("b"), b"12345", digest=digest(b"wrong"))
    assert statistics(place) == {"stores": 1, "bytes_written": 5}
