"""Helpers for tests of leases: take one, or wait for one."""

from __future__ import annotations

from support.conversation import Conversation, key_of
from support.places import get_message
from xcache.wire import protocol

KEY = key_of("a")
# The longest wait that a client asks for in these tests.
PATIENT = 60.0


def take(talk: Conversation, key: str = KEY, wait: float = PATIENT) -> int:
    """Ask for a key and get its lease."""
    answer = talk.ask(get_message(key, wait))
    assert isinstance(answer, protocol.Missing), answer
    assert answer.lease
    return answer.lease


def begin_to_wait(talk: Conversation, key: str = KEY, wait: float = PATIENT) -> int:
    """Ask for a key that another client is compiling."""
    request = talk.say(get_message(key, wait))
    heard, word = talk.hear()
    assert heard == request
    assert isinstance(word, protocol.Wait), word
    return request


def outcome(talk: Conversation, request: int) -> protocol.Message:
    """Skip the notices and return the answer."""
    while True:
        heard, answer = talk.hear()
        if heard == request and not isinstance(answer, protocol.Wait):
            return answer
