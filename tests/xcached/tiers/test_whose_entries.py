"""Whose an entry of a tier is decides whether an upload replaces it; namespaces keep those apart who trust nobody."""

from __future__ import annotations

import contextlib

import pytest
from support.command_line import Shell
from support.conversation import Conversation, key_of, talking
from support.places import get_message, until
from support.sharing import CONTENT, KEY, host, put_and_upload, remote_of, trust
from support.signing import OURS, SECOND, STRANGER

from xcache.client.client import Client
from xcache.wire import protocol
from xcache.wire.names import Names


def test_an_upload_says_that_an_unknown_key_has_signed_what_is_there(folder):
    with host(f"file://{folder}", signer=STRANGER, trusts=(STRANGER.public,)) as stranger:
        put_and_upload(stranger)
    before = (folder / Names("").entry(KEY)).read_bytes()
    with host(f"file://{folder}") as here:
        # Nobody asked for it before.
        put_and_upload(here)
        assert remote_of(here)["foreign"] == 1
        assert "1 not uploaded, because others whose keys are not trusted here" in Shell(here).say("status")
    assert (folder / Names("").entry(KEY)).read_bytes() == before


def test_a_push_signs_anew_what_a_revoked_key_has_signed(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
        before = (folder / Names("").entry(KEY)).read_bytes()
        # It is there already, and stays.
        Shell(here).say("remote", "push", "--wait", "30s")
        assert (folder / Names("").entry(KEY)).read_bytes() == before
        (here.root / "config" / "xcache" / "signing-key").write_text(SECOND.line())
        trust(here, SECOND.public, f"{OURS.public} revoked=2020-01-01")
        Shell(here).say("remote", "push", "--wait", "30s")
    with host(f"file://{folder}", trusts=(SECOND.public,)) as there, talking(there) as talk:
        assert talk.ask(get_message(KEY)).payload == CONTENT


def test_a_key_that_is_made_is_used_soon(folder):
    with host(f"file://{folder}", signer=None, trusts=()) as here:
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: "xcache key new" in str(remote_of(here)["problem"]))
        Shell(here).say("key", "new", "me")
        assert until(lambda: not remote_of(here)["waiting"] and not remote_of(here)["problem"])


def test_a_host_that_trusts_no_key_does_not_ask_a_store(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}", trusts=()) as there, talking(there) as talk:
        cause = talk.ask(get_message(KEY)).cause
        assert cause.startswith(f"new; remote trouble: file://{folder}: no key in ")
        assert remote_of(there)["gets"] == 0
        assert "nothing of it is used: no key in " in Shell(there).say("status")
        trust(there, f"{OURS.public} expires=2020-01-01")
        assert talk.ask(get_message(KEY)).cause == cause
        trust(there, OURS.public)
        assert talk.ask(get_message(KEY)).payload == CONTENT
        assert not remote_of(there)["useless"]


def test_a_miss_names_the_key_that_is_not_trusted_any_more(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}", trusts=(OURS.public, SECOND.public)) as there, talking(there) as talk:
        assert talk.ask(get_message(KEY)).payload == CONTENT
        # Only the copy here is left.
        (folder / Names("").entry(KEY)).unlink()
        trust(there, f"{OURS.public} revoked=2026-01-01", SECOND.public)
        found = until_missing(talk)
        assert found.startswith(f"not trusted: the key {OURS.public.id} (ours) was revoked on 2026-01-01")


def until_missing(talk: Conversation) -> str:
    """Ask until there is no entry any more, and return the cause."""
    found: list[protocol.Missing] = []

    def is_missing() -> bool:
        answer = talk.ask(get_message(KEY))
        found.extend([answer] * isinstance(answer, protocol.Missing))
        return bool(found)

    assert until(is_missing)
    return found[0].cause


def test_status_names_each_reason_and_counts_an_entry_once(folder):
    for number, key in enumerate((STRANGER, SECOND)):
        with host(f"file://{folder}", signer=key, trusts=(key.public,)) as stranger, talking(stranger) as talk:
            assert talk.put(key_of(f"{number}"), CONTENT) == protocol.Stored(True)
            Shell(stranger).say("remote", "push", "--wait", "30s")
    with host(f"file://{folder}") as here, talking(here) as talk:
        for number in range(2):
            assert isinstance(talk.ask(get_message(key_of(f"{number}"))), protocol.Missing)
        said = remote_of(here)["last_rejected"]
        assert all(key.public.id in said for key in (STRANGER, SECOND))
        for _ in range(2):
            assert talk.put(key_of("0"), CONTENT, overwrite=True) == protocol.Stored(True)
            Shell(here).say("remote", "push", "--wait", "30s")
        assert remote_of(here)["foreign"] == 1


def test_a_daemon_of_another_namespace_is_told_and_removes_nothing(folder, caplog):
    with host(f"file://{folder}", XCACHE_NAMESPACE="team-b") as place:
        put_and_upload(place)
        here = Shell(place)
        assert "namespace    team-b" in here.say("status")
        here.env["XCACHE_NAMESPACE"] = place.env["XCACHE_NAMESPACE"] = "team-a"
        with contextlib.closing(Client(place.config(), "test")) as client:
            client.get(get_message(KEY))
        assert "with the namespace team-b, and the settings of this program name the namespace team-a" in caplog.text
        told = "the daemon was started with the namespace team-b, and the settings name the namespace team-a"
        assert told in here.run("status").stderr
        for command in (["ls"], ["gc", "--older-than", "0s"], ["rm", KEY], ["stats"], ["check"], ["push"]):
            assert told in here.say("remote", *command, code=1)
    assert (folder / Names("team-b").entry(KEY)).exists()


@pytest.mark.parametrize("spelled", ["file://{}/", "file://{}"])
def test_another_spelling_of_an_address_is_no_other_store(folder, caplog, spelled):
    with host(f"file://{folder}") as place:
        place.env["XCACHE_REMOTE"] = spelled.format(folder)
        with contextlib.closing(Client(place.config(), "test")) as client:
            client.get(get_message(KEY))
    assert not caplog.text
