"""The daemon tells what a program would find, without a use or a lease, and fetches entries before it runs."""

from __future__ import annotations

import time

import pytest
from support.conversation import Conversation, key_of, talking
from support.dying import die_while_loading
from support.environments import Environment
from support.leasing import outcome
from support.places import Place, get_message, until
from support.setting_aside import KEY as SUSPECT
from support.sharing import BOUND, host, put_and_upload, remote_of, silent_server, trust
from support.signing import SECOND, STRANGER

from xcache.wire import commands, protocol
from xcache.wire.names import Names

SECONDS = 30.0
HERE, THERE, NOWHERE = (key_of(name) for name in ("here", "there", "nowhere"))


def asked(place: Place, *keys: str, seconds: float = SECONDS) -> list[list[str]]:
    """Return where entries are, from a daemon whose remote stores all answer."""
    with talking(place) as talk:
        answer = talk.ask(commands.AskPresence([*keys], seconds))
    assert isinstance(answer, commands.Presence)
    assert answer.problems == {}
    return answer.entries


def fetched(place: Place, *keys: str, seconds: float = SECONDS) -> list[list[str]]:
    with talking(place) as talk:
        answer = talk.ask(commands.Fetch([*keys], seconds))
    assert isinstance(answer, commands.Presence)
    return answer.entries


def put(place: Place, key: str, content: bytes = b"content") -> None:
    with talking(place) as talk:
        assert talk.put(key, content) == protocol.Stored(True)


def test_asking_changes_nothing(folder):
    tier = f"file://{folder}"
    with host(tier) as other:
        put_and_upload(other, THERE)
    with host(f"{tier}?readonly=1") as place:
        put(place, HERE)
        told = asked(place, HERE, THERE, NOWHERE)
        assert told == [["here", "", ""], ["remote", tier, ""], ["missing", "", ""]]
        assert place.query("SELECT key, hits FROM entries") == [(HERE, 0)]
        assert remote_of(place)["gets"] == 0
        with talking(place) as talk:
            # Nobody has a lease yet, and nobody is to wait for one.
            assert outcome(talk, talk.say(get_message(NOWHERE, 30.0))).lease
            assert asked(place, NOWHERE) == [["missing", "", ""]]
            assert talk.ask(commands.AskPresence([], SECONDS)) == commands.Presence([], {})


def test_without_remote_stores_only_the_store_is_looked_at(place, talk):
    talk.put(HERE, b"content")
    for message in (commands.AskPresence([HERE, NOWHERE], SECONDS), commands.Fetch([HERE, NOWHERE], SECONDS)):
        assert talk.ask(message) == commands.Presence([["here", "", ""], ["missing", "", ""]], {})


@pytest.mark.parametrize("keys", [[HERE, "no key"], [HERE] * (commands.MAX_KEYS + 1)])
def test_too_much_is_refused(place, talk, keys):
    for message in (commands.AskPresence(keys, SECONDS), commands.Fetch(keys, SECONDS)):
        answer = talk.ask(message)
        assert isinstance(answer, protocol.Refused) and answer.kind == "protocol error"
    assert isinstance(talk.ask(commands.AskPresence([HERE] * commands.MAX_KEYS, SECONDS)), commands.Presence)


def test_what_would_not_be_handed_out_is_missing_and_stays_as_it_is(place):
    environment = Environment(place.root / "venv", "1.0")
    place.start_daemon(XCACHE_STALE_GRACE="1h")
    stale, marked, lost = environment.put(place), key_of("marked"), key_of("lost")
    put(place, lost, b"l" * (protocol.INLINE_LIMIT + 1))
    put(place, SUSPECT)
    with talking(place) as talk:
        assert talk.ask(protocol.MarkNotCacheable(marked, "jit_f", "not serializable")) == protocol.Done()
        assert talk.ask(commands.Remove([HERE])) == commands.Removed(0, 0)
    assert asked(place, SUSPECT, stale) == [["here", "", ""]] * 2
    for _ in range(2):
        die_while_loading(place)
    environment.library.unlink()
    (blob,) = (path for path in (place.dir / "blobs").rglob("*") if path.is_file())
    blob.unlink()
    assert until(lambda: asked(place, stale) != [["here", "", ""]])
    told = [reason for state, _, reason in asked(place, stale, marked, lost, SUSPECT) if state == "missing"]
    assert told == ["stale", "not cacheable", "set aside", "set aside"]
    # A program that asks for it has it set aside.
    assert place.query("SELECT count(*) FROM entries WHERE key = ?", lost) == [(1,)]
    assert place.query("SELECT key FROM quarantined") == [(SUSPECT,)]


def test_what_a_key_signed_is_missing_once_nobody_trusts_it(folder):
    with host(f"file://{folder}") as other:
        put_and_upload(other, THERE)
    with host(f"file://{folder}") as place:
        assert fetched(place, THERE) == [["here", f"file://{folder}", ""]]
        trust(place, SECOND.public)
        # It is in the remote store all the same.
        ((state, _, reason),) = asked(place, THERE)
        assert state == "missing" and f"file://{folder} has it, which is not used: the key" in reason
        ((state, _, reason),) = fetched(place, THERE)
        assert state == "missing" and "is not in" in reason
        with talking(place) as talk:
            assert talk.get(THERE) is None


def test_what_is_fetched_is_checked_and_stays(folder):
    keys = damaged, foreign, moved = [key_of(name) for name in ("damaged", "foreign", "moved")]
    tier, at = f"file://{folder}", Names("").entry
    with host(tier) as other:
        for key in (HERE, THERE, damaged):
            put_and_upload(other, key, b"c" * 50_000 if key == THERE else b"content")
    with host(tier, signer=STRANGER, trusts=(STRANGER.public,)) as stranger:
        put_and_upload(stranger, foreign)
    (folder / at(damaged)).write_bytes((folder / at(damaged)).read_bytes()[:-1])
    (folder / at(moved)).parent.mkdir(parents=True, exist_ok=True)
    (folder / at(moved)).write_bytes((folder / at(THERE)).read_bytes())
    with host(tier) as place:
        # The damage is not in the header.
        told = [state for state, *_ in asked(place, HERE, THERE, *keys, NOWHERE)]
        assert told == ["remote"] * 3 + ["missing"] * 3
        put(place, HERE)
        here, there, *rest, nowhere = fetched(place, HERE, THERE, *keys, NOWHERE)
        assert (here, there) == (["here", "", ""], ["here", tier, ""])
        assert [state for state, *_ in rest] == ["missing"] * 3
        for (_, _, reason), said in zip(rest, ("bytes", "is not in", "another key"), strict=True):
            assert reason.startswith(f"{tier}: ") and said in reason
        assert nowhere == ["missing", "", "no remote store has it"]
        for path in folder.rglob("*"):
            path.unlink() if path.is_file() else None
        with talking(place) as talk:
            assert talk.get(THERE) == b"c" * 50_000


def test_a_store_that_fails_or_is_silent_is_named_and_the_others_are_believed(folder):
    with host(f"file://{folder}") as other:
        put_and_upload(other, THERE)
    away = f"file://{folder}/away"
    with silent_server() as port, host(away, f"redis://127.0.0.1:{port}", f"file://{folder}") as place:
        silent = f"redis://127.0.0.1:{port}"
        with talking(place) as talk:
            put(place, HERE)
            began = time.monotonic()
            answer = talk.ask(commands.AskPresence([HERE, THERE, NOWHERE], BOUND))
            assert time.monotonic() - began < 15
            assert answer.entries == [["here", "", ""], ["remote", f"file://{folder}", ""], ["unknown", "", ""]]
            assert answer.problems.keys() == {away, silent}
            assert answer.problems[silent] == f"no answer within {BOUND:g} s"
            # One that may come late is not here yet.
            assert talk.ask(commands.Fetch([NOWHERE], 0.2)).entries == [["missing", "", "it did not come within 0.2 s"]]
            assert talk.get(HERE) == b"content"


def test_many_keys_are_answered_in_their_order(folder):
    keys = [key_of(str(number)) for number in range(commands.MAX_KEYS)]
    with host(f"file://{folder}") as other, talking(other) as talk:
        for key in keys[1::3]:
            talk.put(key, key.encode())
        assert until(lambda: not remote_of(other)["waiting"])
    with host(f"file://{folder}") as place:
        with talking(place) as talk:
            for key in keys[::3]:
                talk.put(key, key.encode())
        wanted = [("here", "remote", "missing")[number % 3] for number in range(len(keys))]
        assert [state for state, *_ in asked(place, *keys)] == wanted


def test_no_store_that_is_only_written_to_is_asked(folder):
    with host(f"file://{folder}") as other:
        put_and_upload(other, THERE)
    with host(f"file://{folder}?writeonly=1") as place:
        assert asked(place, THERE) == [["missing", "", ""]]


def test_a_key_is_fetched_once_for_all_who_ask(folder):
    with host(f"file://{folder}") as other:
        put_and_upload(other, THERE, b"c" * 1_000_000)
    with host(f"file://{folder}") as place:
        talks = [Conversation(place) for _ in range(4)]
        for talk in talks:
            talk.greet()
        requests = [talk.say(commands.Fetch([THERE], SECONDS)) for talk in talks]
        for talk, request in zip(talks, requests, strict=True):
            assert [state for state, *_ in talk.answer(request).entries] == ["here"]
            talk.close()
        assert place.query("SELECT count(*) FROM entries") == [(1,)]
