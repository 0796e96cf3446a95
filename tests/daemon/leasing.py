"""What tests of leases have in common: who compiles, and who waits for it."""

from __future__ import annotations

import pytest
from conversation import Conversation, key_of
from places import get_message

from xcache import protocol

KEY = key_of("a")
# The longest that somebody who asks in these tests would wait.
PATIENT = 60.0


@pytest.fixture
def speakers(place):
    """Makes connections that have said hello; all of them end with the test."""
    place.start_daemon()
    made: list[Conversation] = []

    def speaker() -> Conversation:
        made.append(Conversation(place))
        made[-1].greet()
        return made[-1]

    yield speaker
    for each in made:
        each.close()


def take(talk: Conversation, key: str = KEY, wait: float = PATIENT) -> int:
    """Ask for something, and be the one to compile it."""
    answer = talk.ask(get_message(key, wait))
    assert isinstance(answer, protocol.Missing), answer
    assert answer.lease
    return answer.lease


def begin_to_wait(talk: Conversation, key: str = KEY, wait: float = PATIENT) -> int:
    """Ask for something that another is compiling."""
    request = talk.say(get_message(key, wait))
    heard, word = talk.hear()
    assert heard == request
    assert isinstance(word, protocol.Wait), word
    return request


def outcome(talk: Conversation, request: int) -> protocol.Message:
    """The answer, after however many words of it."""
    while True:
        heard, answer = talk.hear()
        if heard == request and not isinstance(answer, protocol.Wait):
            return answer
