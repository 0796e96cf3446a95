"""What ends those who load it is set aside, and nothing else is, nor for another's word."""

from __future__ import annotations

import subprocess
import sys
import time

from conversation import Conversation, key_of, talking
from places import digest, until
from setting_aside import KEY, TESTS, complain, quarantined

from xcache import protocol


def die_while_loading(place, payload: bytes = b"poison") -> None:
    """A process that begins to load and ends."""
    talk = Conversation(place)
    talk.greet()
    assert talk.get(KEY) == payload
    talk.say(protocol.Loading({KEY: digest(payload)}))
    talk.close()


def loads(place) -> bytes | None:
    with talking(place) as talk:
        content = talk.get(KEY)
        if content is not None:
            talk.say(protocol.Loading({KEY: digest(content)}))
            talk.say(protocol.Loading({}))
        talk.ask(protocol.Sync())
        return content


def strikes(place) -> list[tuple[object, ...]]:
    return place.query("SELECT count FROM strikes")


def test_what_ends_two_processes_that_load_it_is_set_aside(place, talk):
    talk.put(KEY, b"poison")
    die_while_loading(place)
    assert until(lambda: strikes(place) == [(1,)])
    assert talk.get(KEY) == b"poison"
    die_while_loading(place)
    assert until(lambda: quarantined(place))
    ((key, blob, reason),) = quarantined(place)
    assert (key, blob) == (KEY, digest(b"poison"))
    assert reason.startswith("2 processes ended while they loaded it, the last was 'test.py")
    assert talk.get(KEY) is None


def test_of_several_that_may_have_been_loaded_only_the_guilty_one_is_set_aside(place, talk):
    """A program says ahead what its next loads are; one that ended in them is not told apart until it is alone."""
    names = {key_of(name): digest(name.encode()) for name in "abc"}
    for name in "abc":
        talk.put(key_of(name), name.encode())
    like_this = {"options": digest(b"o"), "devices": "0", "platform": "cpu", "seconds": 0.001}
    talk.ask(protocol.Remember("test.py", "", [{"key": key} | like_this for key in names], {digest(b"o"): b"o"}))
    assert talk.ask(protocol.Predict("test.py", "", None)).payloads.keys() == names.keys()

    def die_in(*groups: dict[str, str]) -> None:
        with talking(place) as dying:
            for key in names:
                dying.get(key)
            for group in groups:
                dying.say(protocol.Loading(group))
        assert until(lambda: talk.status()["connections"] == 1)
        talk.ask(protocol.Sync())

    # The second has begun after the first had ended, and knows of no strike.
    for _ in range(2):
        die_in(names)
        assert strikes(place) == [(1,), (1,), (1,)]
    # From now on each is to be asked for, and loaded by itself.
    assert talk.ask(protocol.Predict("test.py", "", None)).payloads == {}
    die_in({key_of("a"): names[key_of("a")]}, {key_of("b"): names[key_of("b")]})
    assert [key for key, _, _ in quarantined(place)] == [key_of("b")]
    assert sorted(place.query("SELECT key, count FROM strikes")) == sorted([(key_of("b"), 2), (key_of("c"), 1)])
    assert list(talk.ask(protocol.Predict("test.py", "", None)).payloads) == [key_of("a")]


def test_what_was_named_with_others_is_not_forgiven_unloaded(place, talk):
    """Somebody else may be loading it at that moment."""
    talk.put(KEY, b"poison")
    talk.put(key_of("b"), b"fine")
    with talking(place) as other:
        assert other.get(KEY) == b"poison"
        assert other.get(key_of("b")) == b"fine"
        die_while_loading(place)
        assert until(lambda: strikes(place) == [(1,)])
        other.say(protocol.Loading({KEY: digest(b"poison"), key_of("b"): digest(b"fine")}))
        other.say(protocol.Loading({}))
        other.ask(protocol.Sync())
    assert strikes(place) == [(1,)]


def test_a_process_that_loads_the_same_on_two_connections_ends_once(place, talk):
    talk.put(KEY, b"fine")
    first, second = Conversation(place), Conversation(place)
    for each in (first, second):
        each.greet()
        assert each.get(KEY) == b"fine"
    first.say(protocol.Loading({KEY: digest(b"fine")}))
    first.close()
    assert until(lambda: strikes(place) == [(1,)])
    # Heard after the first had ended, said before.
    second.say(protocol.Loading({KEY: digest(b"fine")}))
    second.close()
    assert until(lambda: talk.status()["connections"] == 1)
    talk.ask(protocol.Sync())
    assert strikes(place) == [(1,)]


def test_as_many_as_one_thread_may_name_are_heard_whatever_the_other_limits_are(place):
    place.start_daemon(XCACHE_MAX_REQUESTS="1")
    names = {key_of(str(number)): digest(b"%d" % number) for number in range(protocol.MAX_LOADING)}
    with talking(place) as talk:
        for number, key in enumerate(names):
            talk.put(key, b"%d" % number)
            talk.get(key)
        talk.say(protocol.Loading(names))
    assert until(lambda: strikes(place) == [(1,)] * protocol.MAX_LOADING)


def test_strikes_outlive_the_daemon(place, talk):
    talk.put(KEY, b"poison")
    die_while_loading(place)
    assert until(lambda: strikes(place) == [(1,)])
    place.stop()
    place.start_daemon()
    die_while_loading(place)
    assert until(lambda: quarantined(place))


def test_a_load_that_succeeds_takes_a_strike_back(place, talk):
    """It may have been the machine, or somebody's patience, that ended the first."""
    talk.put(KEY, b"poison")
    for _ in range(3):
        die_while_loading(place)
        assert until(lambda: strikes(place) == [(1,)])
        assert loads(place) == b"poison"
        assert until(lambda: strikes(place) == [])
    assert quarantined(place) == []


def test_the_very_same_bytes_are_not_taken_again(place, talk):
    talk.put(KEY, b"poison")
    for count in (1, 2):
        die_while_loading(place)
        assert until(lambda count=count: strikes(place) == [(count,)])
    assert until(lambda: quarantined(place))
    assert talk.put(KEY, b"poison") == protocol.Refused(
        "set aside", "processes that loaded exactly these bytes have ended"
    )
    assert talk.put(KEY, b"wholesome") == protocol.Stored(True)
    assert loads(place) == b"wholesome"


def test_who_ends_after_loading_or_without_it_is_no_strike(place, talk):
    talk.put(KEY, b"fine")
    assert loads(place) == b"fine"
    polite = Conversation(place)
    polite.greet()
    assert polite.get(KEY) == b"fine"
    polite.close()
    talk.ask(protocol.Sync())
    assert strikes(place) == []


def test_a_daemon_that_leaves_or_hangs_up_strikes_nobody(place, talk):
    talk.put(KEY, b"fine")
    loading = Conversation(place)
    loading.greet()
    assert loading.get(KEY) == b"fine"
    loading.say(protocol.Loading({KEY: digest(b"fine")}))
    rude = Conversation(place)
    rude.greet()
    rude.say(protocol.Loading({KEY: digest(b"fine")}))
    rude.raw(b"\xff" * 100)
    assert rude.was_hung_up_on()
    assert talk.ask(protocol.Sync()) == protocol.Done()
    place.stop()
    assert strikes(place) == []
    loading.close()
    rude.close()


def test_a_complaint_ends_a_load_without_a_strike(place, talk):
    talk.put(KEY, b"bad")
    other = Conversation(place)
    other.greet()
    assert other.get(KEY) == b"bad"
    other.say(protocol.Loading({KEY: digest(b"bad")}))
    other.ask(protocol.Complain(KEY, digest(b"bad"), "it could not be loaded"))
    other.close()
    talk.ask(protocol.Sync())
    assert strikes(place) == []
    assert quarantined(place) == [(KEY, digest(b"bad"), "it could not be loaded")]


def test_a_late_complaint_does_not_set_aside_what_was_stored_afresh(place, talk):
    """Two programs met the same damage; between their complaints the very same bytes came back."""
    source = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(TESTS), str(TESTS / "daemon")]!r}
from places import Place
from conversation import Conversation
from xcache import protocol
talk = Conversation(Place(Path({str(place.root)!r})))
talk.greet()
talk.get({KEY!r})
print("got it", flush=True)
sys.stdin.readline()
talk.ask(protocol.Complain({KEY!r}, {digest(b"whole")!r}, "its digest differs"))
"""
    talk.put(KEY, b"whole")
    place.execute("UPDATE blobs SET content = ?", b"other")
    with subprocess.Popen(
        [sys.executable, "-c", source], env=place.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as late:
        assert late.stdout.readline() == b"got it\n"
        complain(talk, b"whole")
        assert talk.put(KEY, b"whole") == protocol.Stored(True)
        late.communicate(b"\n", 20)
    assert late.returncode == 0
    assert talk.get(KEY) == b"whole"
    assert len(quarantined(place)) == 1


def test_of_what_was_not_handed_out_nothing_can_be_said(place, talk):
    """A complaint of a large entry has it read; who invents them would keep the writer busy, as with strikes."""
    talk.put(KEY, b"fine")
    talk.get(KEY)
    with talking(place) as liar:
        for number in range(100):
            liar.say(protocol.Loading({key_of(str(number)): digest(b"%d" % number)}))
        liar.say(protocol.Loading({KEY: digest(b"other")}))
        liar.status()
    assert talk.ask(protocol.Complain(KEY, digest(b"other"), "no reason")) == protocol.Done()
    talk.ask(protocol.Sync())
    assert (strikes(place), quarantined(place)) == ([], [])


def test_programs_that_are_ended_together_are_one_strike(place, talk):
    """As when a batch system ends a job of several."""
    talk.put(KEY, b"fine")
    together = [Conversation(place) for _ in range(5)]
    for each in together:
        each.greet()
        assert each.get(KEY) == b"fine"
        each.say(protocol.Loading({KEY: digest(b"fine")}))
        each.status()
    for each in together:
        each.close()
    assert until(lambda: talk.status()["connections"] == 1)
    assert strikes(place) == [(1,)]
    assert quarantined(place) == []


def test_a_strike_is_forgotten_after_a_day(place, talk):
    talk.put(KEY, b"poison")
    die_while_loading(place)
    assert until(lambda: strikes(place) == [(1,)])
    # The number of a row is when it was written.
    place.execute("UPDATE strikes SET rowid = rowid - ?", 25 * 3600 * 10**9)
    die_while_loading(place)
    assert until(lambda: place.query("SELECT count FROM strikes WHERE rowid > ?", time.time_ns() - 10**12) == [(1,)])
    assert quarantined(place) == []
