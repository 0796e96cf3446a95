"""Connections become sessions in their users' turns, and those that hung up before cost no session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from types import SimpleNamespace

import pytest

from xcache.wire import framing, protocol
from xcache.wire.ownership import Peer
from xcached.net import server
from xcached.net.turns import Account

ALICE, BOB = 1, 2


class Begun:
    """In place of a session."""

    def stop_reading(self) -> None:
        """Do nothing: nothing is read."""


class Listening:
    """A server for several users, without sessions: ``began`` has the users for whom one would have begun."""

    def __init__(self, path, monkeypatch) -> None:
        self.path = path
        self.began: list[int] = []
        self.when_one_begins = lambda: None
        # Users in the order in which they connected.
        self._users: list[int] = []
        self.clients: list[socket.socket] = []
        self._accepted: list[socket.socket] = []
        self.most = 1000
        monkeypatch.setattr(server, "Session", self._session)
        monkeypatch.setattr(server, "peer_of", lambda accepted: Peer(7, self._users.pop(0)))
        # The test is not about how long the server accepts at a time.
        monkeypatch.setattr(server, "_ACCEPT_SECONDS", 60.0)

    def connect(self, user: int, says: bytes = b"") -> socket.socket:
        """A connection of a user, which waits to be accepted."""
        client = socket.socket(socket.AF_UNIX)
        client.connect(os.fspath(self.path))
        client.sendall(says)
        self._users.append(user)
        self.clients.append(client)
        return client

    def serve(self, connect) -> dict[int, Account]:
        """Listen, have clients connect, accept them all, and return the users' accounts."""

        async def run():
            trust = SimpleNamespace(shared=True, admits=lambda uid: True, administers=lambda uid: False)
            now = SimpleNamespace(max_connections=self.most, silence=60.0)
            with contextlib.closing(server.listen(self.path, for_everybody=False)) as listener:
                serving = server.Server(listener, SimpleNamespace(), trust, SimpleNamespace(now=now))
                connect()
                for _ in range(1000):
                    await asyncio.sleep(0)
                assert not self._users
                serving.stop_listening()
                return serving._accounts

        try:
            return asyncio.run(asyncio.wait_for(run(), 60))
        finally:
            for each in (*self.clients, *self._accepted):
                each.close()

    def _session(self, accepted, caller, account, *_):
        self._accepted.append(accepted)
        self.began.append(caller.uid)
        self.when_one_begins()
        return Begun()


@pytest.fixture
def listening(tmp_path, monkeypatch):
    return Listening(tmp_path / "s", monkeypatch)


def test_a_connection_waits_only_for_its_own_users_earlier_ones(listening):
    def connect():
        for _ in range(50):
            listening.connect(BOB)
        listening.connect(ALICE)

    accounts = listening.serve(connect)
    assert listening.began.index(ALICE) <= 1
    assert sorted(listening.began) == [ALICE, *[BOB] * 50]
    assert (accounts[ALICE].connections, accounts[BOB].connections) == (1, 50)


@pytest.mark.parametrize("says", [b"", b"\0\0\0\1x", b"\0\0"])
def test_a_client_that_hung_up_gets_no_session_whatever_it_said(listening, says):
    def connect():
        for _ in range(5):
            listening.connect(BOB, says).close()

    accounts = listening.serve(connect)
    assert (listening.began, accounts) == ([], {})


def test_a_client_that_hangs_up_in_the_line_gets_no_session_either(listening):
    listening.when_one_begins = lambda: [client.close() for client in listening.clients[1:]]
    accounts = listening.serve(lambda: [listening.connect(BOB, b"\0\0") for _ in range(5)])
    assert (listening.began, accounts[BOB].connections) == ([BOB], 1)


def test_those_in_the_line_count_as_connections(listening):
    """The second would have a third of the five that are free; so much the user has in the line already."""
    listening.most = 6
    heard: list[bytes] = []
    listening.when_one_begins = lambda: heard.extend(client.recv(1000) for client in listening.clients[1:])

    def connect():
        for _ in range(5):
            listening.connect(BOB).settimeout(10)

    accounts = listening.serve(connect)
    assert (listening.began, accounts[BOB].connections) == ([BOB], 1)
    refused = protocol.Refused("too many connections", f"user {BOB} has 1 connections already")
    assert heard == [framing.encode(1, refused)] * 4
