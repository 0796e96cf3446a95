"""A program's threads share few connections, however many of them wait for the daemon at once."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
from support.conversation import key_of, talking
from support.leasing import begin_to_wait, take
from support.places import get_message, until

from xcache import descriptors
from xcache.client.client import Client
from xcache.client.connection import Connection
from xcache.client.contents import Absent
from xcache.client.pool import MOST_IDLE
from xcache.errors import NotAskedError
from xcache.wire import commands, protocol

KEYS = [key_of(str(number)) for number in range(MOST_IDLE + 8)]


def sockets() -> int:
    return sum(1 for each in Path("/proc/self/fd").iterdir() if _is_socket(each))


def _is_socket(descriptor: Path) -> bool:
    try:
        return descriptor.readlink().name.startswith("socket:")
    except OSError:
        return False


class Waiting:
    """Threads of one program, each of which wants a program that somebody else is compiling."""

    def __init__(self, client: Client) -> None:
        self.answers: list[object] = []
        self._client = client
        self._threads = [threading.Thread(target=self._get, args=(key,)) for key in KEYS]
        for thread in self._threads:
            thread.start()

    def _get(self, key: str) -> None:
        try:
            self.answers.append(self._client.get(get_message(key, 60.0)))
        except NotAskedError as error:
            self.answers.append(error)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(20)
        assert len(self.answers) == len(KEYS)


@pytest.fixture
def client(place):
    place.start_daemon()
    made = Client(place.config(timeout=20), "test")
    yield made
    made.close()


def waiting(talk, count: int) -> bool:
    answer = talk.ask(protocol.AskStatus())
    assert isinstance(answer, protocol.Status)
    return sum(int(each["waiting"]) for each in answer.compiles) == count


@pytest.mark.parametrize(
    ("limit", "most"), [(20, 8), (256, 32), (1024, 128), (1_000_000, 128), (resource.RLIM_INFINITY, 128)]
)
def test_connections_may_take_a_part_of_the_programs_descriptors(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.may_take() == most


def test_threads_that_wait_leave_the_program_its_descriptors(client, place, monkeypatch):
    most = 10
    monkeypatch.setattr("xcache.client.pool.may_take", lambda: most)
    with talking(place) as holder, talking(place) as asking:
        for key in KEYS:
            take(holder, key)
        before = sockets()
        threads = Waiting(client)
        # The others compile by themselves.
        assert until(lambda: len(threads.answers) == len(KEYS) - most)
        assert all(isinstance(answer, NotAskedError) for answer in threads.answers)
        assert until(lambda: waiting(asking, most))
        assert sockets() - before == most
        holder.close()
        threads.end()


def test_connections_that_no_thread_needs_any_more_are_closed(client, place):
    with talking(place) as holder, talking(place) as asking:
        for key in KEYS:
            take(holder, key)
        before = sockets()
        threads = Waiting(client)
        assert until(lambda: waiting(asking, len(KEYS)))
        # "Not now": nobody gets the lease, since the daemon expects no executable.
        for key in KEYS:
            holder.ask(protocol.MarkNotCacheable(key, "m", protocol.SERIALIZE_FIRST))
        threads.end()
        assert sockets() - before == MOST_IDLE


def test_a_lease_outlives_the_moment_in_which_many_threads_waited(client, place):
    with talking(place) as asking:
        with talking(place) as holder:
            for key in KEYS:
                take(holder, key)
            threads = Waiting(client)
            assert until(lambda: waiting(asking, len(KEYS)))
        threads.end()
        assert all(isinstance(answer, Absent) and answer.lease for answer in threads.answers)
        for key in KEYS:
            begin_to_wait(asking, key)


def test_the_end_of_a_run_comes_through_while_a_thread_waits_on_the_only_connection(client, place):
    client.get(get_message(KEYS[1]))
    with talking(place) as holder, talking(place) as asking:
        take(holder, KEYS[0])
        thread = threading.Thread(target=client.get, args=(get_message(KEYS[0], 60.0),))
        thread.start()
        assert until(lambda: waiting(asking, 1))
        # No time is left for other questions.
        client.charge(1e6)
        client.note_at_the_end(protocol.RecordRun("0123456789abcdef", 1.0, True, {}, []))
        assert until(lambda: [run for run in asking.ask(commands.AskRuns(0)).runs if run["ended_at"]])
        holder.close()
        thread.join(20)


def test_an_interrupted_close_is_not_repeated_on_a_number_that_the_program_uses_by_then(place, monkeypatch):
    place.start_daemon()
    connection = Connection(place.socket, 20.0, "test")
    connection.demand(protocol.AskFiles(2), protocol.Files, 20.0)
    close, closed = os.close, []

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        connection.close()
    monkeypatch.undo()
    # The kernel gives out the lowest number that is free.
    with open(os.devnull, "rb") as programs:
        connection.close()
        assert closed
        os.fstat(programs.fileno())
