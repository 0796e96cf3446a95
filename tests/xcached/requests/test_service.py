"""The meaning of each request, and the refusals."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time

import pytest
from support.conversation import key_of, talking
from support.places import digest, get_message, put_message, until

from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.errors import XcacheError
from xcache.wire import protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def statistics(place) -> dict[str, float]:
    rows = dict(place.query("SELECT name, amount FROM statistics"))
    rows.pop("since", None)
    return rows


def test_status_is_facts(place, talk):
    talk.put(key_of("a"), LARGE)
    facts = talk.status()
    assert facts["pid"] == talk.pid == place.daemon_pid()
    assert (facts["entries"], facts["bytes"]) == (1, len(LARGE) + len(b"program"))
    assert until(lambda: talk.status()["connections"] == 1)
    assert facts["max_size"] == 20 * 1024**3
    assert facts["uptime_seconds"] >= 0
    assert facts["peak_memory"] > 1_000_000


def test_the_writer_of_an_entry_is_the_process_the_kernel_names(place, talk):
    """A Hello can claim any process; the credentials of the socket cannot."""
    with talking(place) as liar:
        liar.ask(protocol.Hello(1, "v", 1, "someone else"))
        liar.put(key_of("a"), b"a")
    assert place.query("SELECT writer_pid, writer_uid, writer_program FROM entries") == [
        (os.getpid(), os.getuid(), "test.py")
    ]


def test_a_key_of_any_kind_is_missing(talk):
    for key in ("", "short", "x" * protocol.MAX_TEXT, "ü" * 64, "' OR 1=1 --", "../etc/passwd", "\0", key_of("none")):
        assert talk.ask(get_message(key)) == protocol.Missing(0)


BAD_PUTS = {
    "key": {"key": "../../../etc/passwd"},
    "key in capitals": {"key": "AB" * 32},
    "empty key": {"key": ""},
    "digest": {"digest": "../x"},
    "program digest": {"program_digest": "x"},
    "stored program digest": {"program_stored_digest": "0" * 63},
    "component": {"components": dict.fromkeys(("program", *protocol.DESCRIBED_COMPONENTS), "x")},
    "no components": {"components": {}},
    "wrong digest": {"digest": digest(b"other")},
    "wrong size": {"stored_size": 5},
    "wrong program": {"program_stored_digest": digest(b"other")},
    "wrong program size": {"program_stored_size": 5},
    "negative size": {"raw_size": -1},
    "size beyond 64 bits": {"raw_size": 2**63},
    "negative time": {"compile_seconds": -1.0},
    "no time": {"compile_seconds": float("nan")},
    "endless time": {"compile_seconds": float("inf")},
    "long codec": {"codec": "c" * 33},
}


@pytest.mark.parametrize("changes", BAD_PUTS.values(), ids=list(BAD_PUTS))
def test_a_put_that_cannot_be_right_is_refused(place, talk, changes):
    answer = talk.ask(put_message(key_of("a"), b"a", b"p", **changes))
    assert isinstance(answer, protocol.Refused), answer
    assert talk.get(key_of("a")) is None
    assert place.query("SELECT (SELECT count(*) FROM entries) + (SELECT count(*) FROM blobs)") == [(0,)]
    assert talk.put(key_of("a"), b"a").kept


def test_a_negative_size_of_a_file_is_refused(talk):
    """The digest of nothing fits any file of which nothing is read."""
    message = put_message(key_of("a"), b"", b"p", payload=None, stored_size=-1_000_000)
    assert isinstance(talk.ask(message, [b""]), protocol.Refused)
    assert talk.status()["bytes"] == 0


def test_an_entry_is_kept_unless_it_is_to_be_overwritten(talk):
    assert talk.put(key_of("a"), b"old") == protocol.Stored(True)
    assert talk.put(key_of("a"), b"new") == protocol.Stored(False)
    assert talk.get(key_of("a")) == b"old"
    assert talk.put(key_of("a"), b"new", overwrite=True) == protocol.Stored(True)
    assert talk.get(key_of("a")) == b"new"


def test_an_entry_whose_file_is_gone_is_dropped_and_can_be_stored_again(place, talk):
    talk.put(key_of("a"), LARGE)
    talk.put(key_of("b"), b"small")
    for path in place.dir.glob("blobs/??/*"):
        path.unlink()
    assert talk.get(key_of("a")) is None
    assert place.query("SELECT key FROM entries") == [(key_of("b"),)]
    assert talk.put(key_of("a"), LARGE) == protocol.Stored(True)
    assert talk.get(key_of("a")) == LARGE


def test_remove_and_clear_say_what_went(talk):
    for name in "abcd":
        talk.put(key_of(name), name.encode() * 100, b"program of " + name.encode())
    assert talk.ask(protocol.Remove([key_of("a"), key_of("none"), "no key", key_of("a")])) == protocol.Removed(1, 112)
    assert talk.ask(protocol.Remove([])) == protocol.Removed(0, 0)
    assert talk.ask(protocol.Clear()) == protocol.Removed(3, 336)
    assert talk.ask(protocol.Clear()) == protocol.Removed(0, 0)
    assert (talk.status()["entries"], talk.status()["bytes"]) == (0, 0)


def test_an_uncacheable_key_is_remembered_until_the_store_is_cleared(place, talk):
    assert talk.ask(protocol.MarkNotCacheable(key_of("a"), "jit_f", "a pointer")) == protocol.Done()
    assert talk.ask(get_message(key_of("a"))) == protocol.NotCacheable("a pointer")
    place.stop()
    place.start_daemon()
    with talking(place) as again:
        assert again.ask(get_message(key_of("a"))) == protocol.NotCacheable("a pointer")
        again.put(key_of("a"), b"after all")
        assert again.get(key_of("a")) == b"after all"
        again.ask(protocol.Clear())
        assert again.ask(get_message(key_of("a"))) == protocol.Missing(0)
        assert isinstance(again.ask(protocol.MarkNotCacheable("no key", "m", "r")), protocol.Refused)


def test_a_removed_mark_is_asked_for_anew(talk):
    """Removing a key also removes its mark."""
    talk.ask(protocol.MarkNotCacheable(key_of("a"), "jit_f", "a pointer"))
    talk.ask(protocol.Remove([key_of("a")]))
    assert talk.ask(get_message(key_of("a"))) == protocol.Missing(0)


def test_uses_are_seen_after_a_sync(place, talk):
    talk.put(key_of("a"), b"a")
    talk.put(key_of("b"), LARGE)
    before = time.time()
    for _ in range(3):
        talk.get(key_of("a"))
        talk.get(key_of("b"))
        talk.get(key_of("none"))
    talk.ask(protocol.Sync())
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
    talk.ask(protocol.ZeroStatistics())
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


def test_a_store_that_was_deleted_takes_nothing_more(place, talk):
    """``rm -rf`` of the cache is common. The next daemon must have every entry that was acknowledged after it."""
    talk.put(key_of("before"), b"before")
    shutil.rmtree(place.dir)
    try:
        kept = isinstance(talk.put(key_of("after"), b"after"), protocol.Stored)
    except ConnectionError:
        kept = False
    os.kill(talk.pid, signal.SIGKILL)
    if kept:
        place.start_daemon()
        with talking(place) as again:
            assert again.get(key_of("after")) == b"after"


def test_nothing_is_written_into_a_store_that_is_being_deleted(place, talk):
    """``rm -rf`` deletes the files first and then the folder, which must be empty by then."""
    for path in place.dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(ConnectionError):
        talk.put(key_of("after"), b"after")
        talk.ask(protocol.Sync())
    assert list(place.dir.iterdir()) == []


def test_a_store_that_was_deleted_is_followed_by_a_new_one(place, talk, monkeypatch):
    """The daemon leaves although clients ask it: on a busy machine it would never be idle."""
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    talk.put(key_of("before"), b"before")
    shutil.rmtree(place.dir)
    config = place.config(timeout=5)
    client = Client(config, "test", Launcher(config))

    def stored() -> bool:
        message = put_message(key_of("after"), b"after", b"p", payload=None, program=None)
        try:
            return client.put(message, b"after", b"p")
        except XcacheError:
            return False

    try:
        assert until(stored, 10)
        assert client.get(get_message(key_of("after"))).sealed == b"after"
    finally:
        client.close()
    assert place.query("SELECT key FROM entries") == [(key_of("after"),)]


def test_memory_does_not_grow_with_what_is_stored(place, talk):
    """20 MB by descriptor, five times: nothing of it is held."""
    before = talk.status()["peak_memory"]
    payload = os.urandom(20_000_000)
    for number in range(5):
        talk.put(key_of(str(number)), payload[number:])
    assert talk.status()["peak_memory"] - before < 20_000_000
