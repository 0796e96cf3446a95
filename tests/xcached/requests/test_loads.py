"""An entry that crashes the programs that load it is quarantined; no other end of a program counts against it."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of, talking
from support.dying import CRASH, begin_to_die, die_while_loading, settle
from support.places import digest, until
from support.setting_aside import KEY, LARGE, quarantined, strikes

from xcache.wire import commands, protocol

ABORT = "os.abort()"
LIKE_THIS = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.001}
PREDICT = protocol.Predict("test.py", "")


def loads(place) -> bytes | None:
    with talking(place) as talk:
        content = talk.get(KEY)
        if content is not None:
            talk.say(protocol.Loading(KEY, digest(content), False))
            talk.say(protocol.Loaded())
        talk.ask(commands.Sync())
        return content


@pytest.mark.parametrize(("end", "code"), [(CRASH, -signal.SIGSEGV), (ABORT, -signal.SIGABRT)])
def test_an_entry_that_crashes_two_processes_is_set_aside(place, talk, end, code):
    talk.put(KEY, b"poison")
    assert die_while_loading(place, end) == code
    assert strikes(place) == [(1,)]
    assert talk.get(KEY) == b"poison"
    die_while_loading(place, end)
    ((key, blob, reason),) = quarantined(place)
    assert (key, blob) == (KEY, digest(b"poison"))
    assert reason.startswith("2 processes ended while they loaded it, the last was 'test.py (process ")
    assert talk.get(KEY) is None


def test_an_ordinary_end_is_no_strike(place, talk):
    talk.put(KEY, b"fine")
    by_signal = "signal.signal(signal.{0}, signal.SIG_DFL); os.kill(os.getpid(), signal.{0})"
    ends = [
        "os._exit(0)",
        "os._exit(3)",
        "sys.exit(1)",
        *(by_signal.format(name) for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGXCPU")),
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.execv(sys.executable, [sys.executable, '-c', 'import sys, os; sys.stdin.read(); os.abort()'])",
    ]
    processes = [begin_to_die(place, end, ahead=ahead, stdin=-1) for end in ends for ahead in (False, True)]
    # The two that became another program are still there.
    assert until(lambda: len([process for process in processes if process.poll() is None]) == 2)
    settle(talk)
    for process in processes:
        process.communicate(timeout=20)
    settle(talk)
    assert (strikes(place), quarantined(place)) == ([], [])
    assert talk.get(KEY) == b"fine"


def test_a_crashed_process_that_stays_a_zombie_is_a_strike(place, talk):
    """Older kernels report how a process ended only while it is a zombie."""
    talk.put(KEY, b"poison")
    with begin_to_die(place) as process:
        assert until(lambda: strikes(place) == [(1,)])
        assert process.wait(20) == -signal.SIGSEGV


def test_a_crash_during_several_loads_gives_each_entry_a_strike(place, talk):
    """None of them comes with a prediction again, until a program has loaded it and the strike is cleared."""
    names = {key_of(name): name.encode() for name in "ab"}
    for key, content in names.items():
        talk.put(key, content)
    talk.ask(protocol.Remember("test.py", "", [{"key": key} | LIKE_THIS for key in names], {digest(b"o"): b"o"}))
    assert talk.ask(PREDICT).payloads == names
    second = (
        "more = Conversation(Place(Path(root))); more.greet()\n"
        f"more.say(protocol.Loading({key_of('b')!r}, digest(more.get({key_of('b')!r})), True)); {CRASH}"
    )
    die_while_loading(place, second, key_of("a"), ahead=True)
    assert strikes(place) == [(1,), (1,)]
    assert talk.ask(PREDICT).payloads == {}
    # This one is asked for, and is not to blame.
    talk.get(key_of("a"))
    talk.say(protocol.Loading(key_of("a"), digest(b"a"), False))
    talk.say(protocol.Loaded())
    talk.ask(commands.Sync())
    assert sorted(strikes(place)) == [(0,), (1,)]
    assert talk.ask(PREDICT).payloads == {}
    die_while_loading(place, CRASH, key_of("b"))
    assert [key for key, _, _ in quarantined(place)] == [key_of("b")]


def test_an_entry_that_comes_with_a_prediction_counts_as_used_when_it_is_loaded(place, talk):
    """Under other flags, say, the program loads none of them."""
    talk.put(KEY, b"fine")
    talk.ask(protocol.Remember("test.py", "", [{"key": KEY} | LIKE_THIS], {digest(b"o"): b"o"}))
    assert talk.ask(PREDICT).payloads == {KEY: b"fine"}
    talk.ask(commands.Sync())
    assert place.query("SELECT hits FROM entries") == [(0,)]
    for ahead in (True, False):
        talk.say(protocol.Loading(KEY, digest(b"fine"), ahead))
    talk.ask(commands.Sync())
    assert place.query("SELECT hits FROM entries") == [(1,)]


def test_loads_ahead_alone_never_set_an_entry_aside(place, talk):
    """Another load beside this one may have crashed the process."""
    talk.put(KEY, b"fine")
    for _ in range(3):
        die_while_loading(place, ahead=True)
    assert strikes(place) == [(1,)]
    assert talk.get(KEY) == b"fine"


def test_a_strike_counts_before_it_is_written(place, talk):
    """The next program may ask at once, and the disk may be slow."""
    talk.put(KEY, b"poison")
    die_while_loading(place)
    with contextlib.closing(sqlite3.connect(place.dir / "store.db", isolation_level=None)) as slow:
        slow.execute("BEGIN IMMEDIATE")
        with begin_to_die(place) as process:
            process.wait(20)
        # The daemon may hear of the end a moment later.
        assert until(lambda: talk.get(KEY) is None)
        slow.execute("ROLLBACK")
    assert until(lambda: quarantined(place))


def test_programs_that_crash_at_the_same_time_make_a_strike_each(place, talk):
    talk.put(KEY, b"poison")
    gate = "sys.stdin.readline(); " + CRASH
    together = [begin_to_die(place, gate, stdin=-1) for _ in range(2)]
    assert until(lambda: talk.status()["connections"] == 3)
    for process in together:
        process.communicate(b"\n", 20)
    assert until(lambda: quarantined(place))


def test_one_process_that_loads_the_same_twice_crashes_once(place, talk):
    talk.put(KEY, b"poison")
    second = (
        "more = Conversation(Place(Path(root))); more.greet()\n"
        f"more.say(protocol.Loading(key, digest(more.get(key)), False)); {CRASH}"
    )
    die_while_loading(place, second)
    assert strikes(place) == [(1,)]


def test_strikes_outlive_the_daemon(place, talk):
    talk.put(KEY, b"poison")
    die_while_loading(place)
    assert strikes(place) == [(1,)]
    place.stop()
    place.start_daemon()
    die_while_loading(place)
    assert quarantined(place)


def test_a_successful_load_clears_a_strike(place, talk):
    """The machine may have ended the first process."""
    talk.put(KEY, b"poison")
    for _ in range(2):
        die_while_loading(place)
        assert strikes(place) == [(1,)]
        assert loads(place) == b"poison"
        assert strikes(place) == []
    assert quarantined(place) == []


def test_a_put_of_barred_bytes_is_refused(place, talk):
    talk.put(KEY, b"poison")
    for _ in range(2):
        die_while_loading(place)
    assert quarantined(place)
    assert talk.put(KEY, b"poison") == protocol.Refused(
        "set aside", "processes ended while they loaded exactly these bytes"
    )
    assert talk.put(KEY, b"wholesome") == protocol.Stored(True)
    assert loads(place) == b"wholesome"
    talk.ask(commands.Clear())
    assert talk.put(KEY, b"poison") == protocol.Stored(True)
    assert strikes(place) == []


def test_an_end_after_a_load_or_without_one_is_no_strike(place, talk):
    talk.put(KEY, b"fine")
    die_while_loading(place, "talk.say(protocol.Loaded()); " + CRASH)
    die_while_loading(place, f"talk.say(protocol.Loading({key_of('b')!r}, key, False)); " + CRASH)
    assert strikes(place) == []


def test_a_connection_closed_by_the_daemon_makes_no_strike(place, talk):
    talk.put(KEY, b"fine")
    rude = "talk.raw(bytes([255]) * 100); assert talk.was_hung_up_on(); " + CRASH
    die_while_loading(place, rude)
    with begin_to_die(place, "sys.stdin.readline(); " + CRASH, stdin=-1) as process:
        assert until(lambda: talk.status()["connections"] == 2)
        place.stop()
        process.communicate(b"\n", 20)
    assert strikes(place) == []


def test_strikes_and_complaints_count_only_for_entries_handed_to_the_process(place, talk):
    """A complaint makes the daemon read the entry, so invented ones would keep the writer thread busy."""
    talk.put(KEY, b"fine")
    other = digest(b"other")
    die_while_loading(place, f"talk.say(protocol.Loading({KEY!r}, {other!r}, False)); " + CRASH)
    die_while_loading(place, f"talk.say(protocol.Loading({key_of('b')!r}, {other!r}, False)); " + CRASH)
    assert talk.ask(protocol.Complain(KEY, other, "no reason", False)) == protocol.Done()
    talk.ask(commands.Sync())
    assert (strikes(place), quarantined(place)) == ([], [])


def test_an_entry_that_crashes_in_a_load_ahead_is_not_loaded_ahead_again(place, talk):
    """A program that asks for it may have done something that the load needs."""
    talk.put(KEY, b"particular")
    talk.ask(protocol.Remember("test.py", "", [{"key": KEY} | LIKE_THIS], {digest(b"o"): b"o"}))
    assert talk.ask(PREDICT).payloads == {KEY: b"particular"}
    die_while_loading(place, ahead=True)
    for _ in range(2):
        assert loads(place) == b"particular"
        place.stop()
        place.start_daemon()
        with talking(place) as again:
            assert again.ask(PREDICT).items == []
    assert quarantined(place) == []


def test_a_bar_ends_after_a_day(place, talk):
    """The program itself may have caused the crashes, and a compiler makes the same bytes again."""
    talk.put(KEY, b"fine")
    for _ in range(2):
        die_while_loading(place)
    assert isinstance(talk.put(KEY, b"fine"), protocol.Refused)
    place.stop()
    # The number of a row is when it was written.
    place.execute("UPDATE strikes SET rowid = rowid - ?", 25 * 3600 * 10**9)
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(KEY, b"fine") == protocol.Stored(True)
        assert loads(place) == b"fine"
    assert strikes(place) == []


def test_a_strike_is_forgotten_after_a_day(place, talk):
    talk.put(KEY, b"poison")
    die_while_loading(place)
    place.stop()
    # The number of a row is when it was written.
    place.execute("UPDATE strikes SET rowid = rowid - ?", 25 * 3600 * 10**9)
    place.start_daemon()
    die_while_loading(place)
    assert strikes(place) == [(1,)]
    assert quarantined(place) == []


def test_a_daemon_keeps_no_descriptor_of_a_process_that_has_left(place, talk):
    def descriptors() -> int:
        return len(list(Path(f"/proc/{place.daemon_pid()}/fd").iterdir()))

    talk.put(KEY, b"fine")
    talk.put(key_of("large"), LARGE)
    before = descriptors()
    waiting = [begin_to_die(place, "sys.stdin.readline()", stdin=-1) for _ in range(5)]
    assert until(lambda: talk.status()["connections"] == 6)
    # One for its connection, one for the process itself.
    assert until(lambda: descriptors() == before + 10)
    for process in waiting:
        process.communicate(b"\n", 20)
    assert until(lambda: descriptors() == before)


def test_a_process_that_lives_on_after_hanging_up_is_not_watched_for_ever(place, talk):
    """The load did not end its process, although the connection closed."""
    talk.put(KEY, b"fine")
    loading = Conversation(place)
    loading.greet()
    assert loading.get(KEY) == b"fine"
    loading.say(protocol.Loading(KEY, digest(b"fine"), False))
    loading.close()
    assert until(lambda: talk.status()["connections"] == 1)
    assert strikes(place) == []
