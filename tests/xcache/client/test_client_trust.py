"""The client talks to no daemon of another version or user, nor to one where others could have put it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.peers import Talk, answering, fake_daemon
from support.places import get_message

from xcache.client.client import Client
from xcache.errors import ProtocolError, UntrustedError
from xcache.wire import protocol

KEY = "ab" * 32


@pytest.fixture
def client(place):
    made = Client(place.config(timeout=5), "test")
    yield made
    made.close()


def test_a_newer_daemon_is_left_alone(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome(protocol.VERSION + 1)
        talk.read()

    with fake_daemon(place.socket, behave) as daemon:
        with pytest.raises(ProtocolError, match=f"version {protocol.VERSION + 1} of the protocol"):
            client.get(get_message(KEY))
        assert [type(message) for message in daemon.heard] == [protocol.Hello]


def test_an_older_daemon_is_left_alone_by_a_client_that_may_start_none(place, client):
    def behave(talk: Talk) -> None:
        talk.welcome(protocol.VERSION - 1)
        talk.read()

    with fake_daemon(place.socket, behave) as daemon:
        with pytest.raises(ProtocolError, match=f"version {protocol.VERSION - 1} of the protocol"):
            client.get(get_message(KEY))
        assert [type(message) for message in daemon.heard] == [protocol.Hello]


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_socket_in_a_folder_that_others_can_write_is_not_even_connected_to(place, client, mode):
    place.root.chmod(mode)
    with fake_daemon(place.socket, answering(protocol.Missing(0))) as daemon:
        with pytest.raises(UntrustedError, match="can be written by other users"):
            client.get(get_message(KEY))
        assert daemon.connections == 0
    place.root.chmod(0o700)


def test_a_folder_that_belongs_to_another_user_is_not_trusted(place, client):
    if os.getuid() != 0:
        pytest.skip("needs root to give it away")
    os.chown(place.root, 54321, 54321)
    with fake_daemon(place.socket, answering(protocol.Missing(0))), pytest.raises(UntrustedError, match="another user"):
        client.get(get_message(KEY))
    os.chown(place.root, 0, 0)


def test_a_daemon_of_another_user_is_not_trusted(place, client):
    """A folder with the sticky bit is one where a stranger's socket could be."""
    if os.getuid() != 0:
        pytest.skip("needs root to become a stranger")
    place.root.chmod(0o1777)
    program = f"""
import os, socket, sys
os.setuid(54321)
listener = socket.socket(socket.AF_UNIX)
listener.bind({str(place.socket)!r})
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""
    stranger = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stranger.stdout.readline() == b"ready\n"
        with pytest.raises(UntrustedError, match=r"another user .uid 54321"):
            client.get(get_message(KEY))
    finally:
        stranger.communicate(timeout=30)
