"""Each limit is a setting: a client beyond it is refused, or hung up on, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sqlite3
import time
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import digest, get_message, put_message, until

from xcache.client.client import Client
from xcache.errors import TurnedAwayError
from xcache.wire import commands, framing, protocol


def log(place) -> str:
    return (place.dir / "daemon.log").read_text()


def unaffected(place, talk: Conversation) -> None:
    """Check that a client from before is served, and so is one that connects now."""
    assert talk.put(key_of("bystander"), b"x", overwrite=True) == protocol.Stored(True)
    with talking(place) as newcomer:
        assert newcomer.get(key_of("bystander")) == b"x"


def test_one_connection_too_many_is_refused_with_a_reason_until_there_is_room(place):
    place.start_daemon(XCACHE_MAX_CONNECTIONS="3")
    client = Client(place.config(), "test")
    with talking(place) as one, talking(place) as two:
        # Connections that only checked for a daemon may still be about to close.
        assert until(lambda: one.status()["connections"] == 2)
        with talking(place):
            with pytest.raises(TurnedAwayError, match="there are 3 connections already"):
                client.get(get_message(key_of("a")))
            unaffected_pair = [talk.put(key_of("b"), b"x", overwrite=True) for talk in (one, two)]
            assert unaffected_pair == [protocol.Stored(True)] * 2
        assert until(lambda: one.status()["connections"] == 2)
        unaffected(place, one)
    again = Client(place.config(), "test")
    assert again.get(get_message(key_of("a"))).lease == 0
    again.close()


def test_connections_have_the_descriptors_they_need(place):
    """More than a shell usually allows."""
    child = place.start_daemon(XCACHE_MAX_CONNECTIONS="2000")
    soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(8256, hard)


def test_no_more_requests_are_in_hand_than_that_and_all_are_answered(place):
    place.start_daemon(XCACHE_MAX_REQUESTS="2")
    with talking(place) as talk, talking(place) as other:
        requests = [talk.say(put_message(key_of(str(n)), b"%d" % n, b"p")) for n in range(50)]
        assert set(talk.answers(requests).values()) == {protocol.Stored(True)}
        unaffected(place, other)


def test_a_larger_payload_than_that_is_refused_before_it_is_read(place):
    place.start_daemon(XCACHE_MAX_PAYLOAD="1M")
    with talking(place) as talk:
        assert talk.put(key_of("a"), os.urandom(2**20)) == protocol.Stored(True)
        for payload, program in ((os.urandom(2**20 + 1), b"p"), (b"x", os.urandom(2**20 + 1))):
            answer = talk.put(key_of("b"), payload, program)
            assert (type(answer), answer.kind) == (protocol.Refused, "too large")
        # The announced size counts, before a byte is copied.
        lying = put_message(key_of("b"), b"small", b"p", payload=None, stored_size=2**40)
        assert talk.ask(lying, [b"small"]).kind == "too large"
        unaffected(place, talk)


HELLO = framing.encode(1, protocol.Hello(protocol.VERSION, "test", 1, "test"))
SILENT = {
    "says nothing": b"",
    "begins and stops": HELLO[:3],
    "stops in the middle of a request": HELLO + framing.encode(2, commands.Sync())[:-1],
}


@pytest.mark.parametrize("said", SILENT.values(), ids=list(SILENT))
def test_a_silent_client_is_dropped(place, said):
    place.start_daemon(XCACHE_SILENCE="500ms")
    with talking(place) as talk:
        silent = Conversation(place)
        silent.raw(said)
        assert silent.was_hung_up_on()
        silent.close()
        assert "sent nothing for 0.5 s and was dropped" in log(place)
        unaffected(place, talk)


def test_a_client_that_takes_no_answer_is_dropped(place):
    place.start_daemon(XCACHE_SILENCE="500ms")
    with talking(place) as talk:
        talk.put(key_of("full"), b"f" * protocol.INLINE_LIMIT)
        deaf = Conversation(place)
        deaf.greet()
        deaf.socket.setblocking(False)
        asked = framing.encode(9, get_message(key_of("full")))

        def dropped() -> bool:
            try:
                deaf.socket.send(asked * 50)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        assert until(dropped)
        deaf.close()
        assert "read no answer for 0.5 s and was dropped" in log(place)
        unaffected(place, talk)


def test_a_slow_or_resting_client_is_not_dropped(place):
    """A program may compile for an hour between two requests."""
    place.start_daemon(XCACHE_SILENCE="500ms")
    with talking(place) as talk:
        talk.put(key_of("full"), b"f" * protocol.INLINE_LIMIT)
        slow = Conversation(place)
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.greet()
        requests = [slow.say(get_message(key_of("full"))) for _ in range(60)]
        for request in requests:
            time.sleep(0.02)
            assert slow.hear()[0] == request
        time.sleep(1.2)
        assert slow.get(key_of("full")) == b"f" * protocol.INLINE_LIMIT
        slow.close()


def test_a_client_that_asked_for_too_much_is_waited_for(place):
    """The daemon does not read for a while; that does not count as silence of the client."""
    place.start_daemon(XCACHE_SILENCE="500ms", XCACHE_MAX_REQUESTS="1")
    with talking(place) as holder, talking(place) as waiter:
        assert holder.ask(get_message(key_of("a"), 60.0)).lease
        first = waiter.say(get_message(key_of("a"), 60.0))
        frame = framing.encode(99, commands.Sync())
        waiter.raw(frame[:-1])
        time.sleep(1.2)
        assert holder.put(key_of("a"), b"x") == protocol.Stored(True)
        while not isinstance((heard := waiter.hear())[1], protocol.Found):
            pass
        assert heard[0] == first
        waiter.raw(frame[-1:])
        assert waiter.hear() == (99, protocol.Done())


@pytest.mark.thorough
@pytest.mark.slow
def test_words_do_not_pile_up_for_a_client_that_reads_few(place):
    """Twenty connections with 64 requests each, read just fast enough not to be dropped."""
    daemon = place.start_daemon(XCACHE_SILENCE="3")
    with talking(place) as holder, contextlib.ExitStack() as stack:
        assert holder.ask(get_message(key_of("a"), 1e6)).lease

        def memory():
            return int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * 4096 / 2**20

        slow = [stack.enter_context(talking(place)) for _ in range(20)]
        for talk in slow:
            talk.raw(b"".join(framing.encode(2 + n, get_message(key_of("a"), 1e6)) for n in range(64)))
        seen = []
        for _ in range(8):
            time.sleep(2)
            for talk in slow:
                assert talk.socket.recv(18_000), "dropped"
            seen.append(round(memory()))
        assert seen[-1] - seen[1] < 8, f"MiB of the daemon, every two seconds: {seen}"


def test_rows_and_descriptions_are_bounded_too(place):
    place.start_daemon(XCACHE_MAX_SIZE="1M")
    with talking(place) as talk:
        for n in range(400):
            details = {name: os.urandom(8000).hex() for name in protocol.DESCRIBED_COMPONENTS}
            parts = {name: digest(text.encode()) for name, text in {"program": "", **details}.items()}
            talk.put(key_of(str(n)), b"%d" % n, components=parts, details=details)
        sizes = {file: file.stat().st_size for file in place.dir.rglob("*") if file.is_file()}
        assert sizes.pop(place.dir / "reserve") == 8 * 2**20
        size = sum(sizes.values())
        # The store may take its 1 MiB, four times as much for rows and descriptions, and a journal.
        assert size < 12 * 2**20, f"{size >> 20} MiB where 1 MiB may be"


@pytest.mark.thorough
@pytest.mark.slow
def test_pages_of_entries_do_not_pile_up_for_a_client_that_reads_none(place):
    daemon = place.start_daemon()
    with contextlib.closing(sqlite3.connect(place.dir / "store.db", timeout=20)) as database, database:
        rows = ((digest(b"%d" % number), os.getuid(), "x" * 250, "p" * 50) for number in range(400))
        database.executemany("INSERT INTO entries (key, writer_uid, module_name, platform) VALUES (?, ?, ?, ?)", rows)
    with contextlib.ExitStack() as stack, talking(place) as reader:
        page = len(framing.encode(1, reader.ask(commands.AskEntries("", "", 0))))
        before = reader.status()["peak_memory"]
        # A user with too many answers unread gets no more, so all of them connect first.
        for talk in [stack.enter_context(talking(place)) for _ in range(40)]:
            talk.raw(b"".join(framing.encode(2 + n, commands.AskEntries("", "", 0)) for n in range(64)))
        time.sleep(3)
        memory = int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * 4096
        # 32 MiB of answers, eight in hand, and a page as Python objects takes several times as much.
        assert memory - before < 120 * 2**20 < 40 * 64 * page
