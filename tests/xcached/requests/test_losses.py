"""Acknowledged entries survive restarts, kills and full disks; a store that was deleted is followed by a new one."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import digest, get_message, put_message, until

from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.errors import XcacheError
from xcache.wire import commands, protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def test_a_restart_keeps_everything(place):
    place.start_daemon()
    with talking(place) as talk:
        for number in range(30):
            talk.put(key_of(str(number)), os.urandom(2000 * number), b"program %d" % (number % 3))
        contents = [talk.get(key_of(str(number))) for number in range(30)]
        before = talk.status()["bytes"]
    place.stop()
    place.start_daemon()
    with talking(place) as talk:
        assert [talk.get(key_of(str(number))) for number in range(30)] == contents
        assert talk.status()["bytes"] == before


@pytest.mark.parametrize("payload", [b"small", LARGE], ids=["in a row", "in a file"])
def test_killed_right_after_an_acknowledgement_it_has_kept_the_entry(place, payload):
    for number in range(3):
        child = place.start_daemon()
        with talking(place) as talk:
            assert talk.put(key_of(str(number)), payload + b"%d" % number, LARGE + b"%d" % number).kept
            child.kill()
        child.wait()
    place.start_daemon()
    with talking(place) as talk:
        for number in range(3):
            assert talk.get(key_of(str(number))) == payload + b"%d" % number


def test_killed_in_the_middle_of_it_all_it_has_kept_what_it_acknowledged(place):
    """At different moments: nothing acknowledged is missing, nothing half written is seen, and no file is left over."""
    contents: dict[str, bytes] = {}
    for moment in (1, 7, 23, 40):
        child = place.start_daemon()
        talk = Conversation(place)
        talk.greet()
        requests = {}
        for number in range(60):
            name = f"{moment} {number}"
            payload = digest(name.encode()).encode() * (1000 if number % 4 == 0 else 10)
            message = put_message(key_of(name), payload, b"program")
            if len(payload) > protocol.INLINE_LIMIT:
                requests[talk.say(message._replace(payload=None), [payload])] = name, payload
            else:
                requests[talk.say(message)] = name, payload
        for _ in range(moment):
            request, answer = talk.any_answer()
            assert answer == protocol.Stored(True)
            name, payload = requests.pop(request)
            contents[name] = payload
        child.kill()
        child.wait()
        talk.close()
    place.start_daemon()
    with talking(place) as talk:
        for name, payload in contents.items():
            assert talk.get(key_of(name)) == payload
        talk.ask(commands.Sync())
    rows = {name for (name,) in place.query("SELECT digest FROM blobs WHERE content IS NULL")}
    assert {path.name for path in place.dir.glob("blobs/*/*")} == rows
    assert place.query("PRAGMA integrity_check") == [("ok",)]
    ((entries, total),) = place.query("SELECT (SELECT count(*) FROM entries), (SELECT sum(stored_size) FROM blobs)")
    totals = dict(place.query("SELECT name, amount FROM totals WHERE name IN ('entries', 'bytes')"))
    assert totals == {"entries": entries, "bytes": total}


def test_a_full_disk_is_a_refusal_and_no_more(place):
    """A limit on file sizes stands in for a full disk: entries stay, and later puts that fit are taken."""
    child = place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("before"), LARGE).kept
        old = resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        payload = os.urandom(2_000_000)
        answer = talk.put(key_of("large"), payload)
        assert isinstance(answer, protocol.Refused)
        for number in range(40):
            talk.put(key_of(f"row {number}"), os.urandom(30_000))
        assert talk.get(key_of("before")) == LARGE
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, old)
        assert talk.put(key_of("large"), payload) == protocol.Stored(True)
        assert talk.get(key_of("large")) == payload
    rows = {name for (name,) in place.query("SELECT digest FROM blobs WHERE content IS NULL")}
    assert {path.name for path in place.dir.glob("blobs/*/*")} == rows


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
    # By then it has made its reserve, which would appear behind the deletion.
    talk.ask(commands.Sync())
    for path in place.dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(ConnectionError):
        talk.put(key_of("after"), b"after")
        talk.ask(commands.Sync())
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
