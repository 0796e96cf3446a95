"""Any well-formed message is answered, and the daemon stays sound."""

from __future__ import annotations

import random
import types
import typing

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import put_message

from xcache.errors import ProtocolError
from xcache.wire import commands, protocol

TEXTS = ["", "x", key_of("a"), key_of("b"), "../" * 20, "ü", "\0", "\n", "' OR 1=1; --", "x" * 5000, "hits", "errors:x"]
INTEGERS = [0, 1, -1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
FLOATS = [0.0, 1.5, -1.0, 1e308, float("inf"), float("nan")]
NO_WAITS = [0.0, -1.0, -1e308, float("-inf"), float("nan")]
# These have no answer; the answers to the rest show whether they broke anything.
NOTES = (protocol.Release, protocol.Loading, protocol.Loaded)
REQUESTS = [kind for kind in typing.get_args(protocol.Message) if kind is not commands.Stop]


class Odd:
    """Messages of every kind whose fields hold odd values of the right type."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def message(self) -> protocol.Message:
        """Return any message, and now and then a Put that is almost right."""
        if self._chance.random() < 0.3:
            good = put_message(key_of(self._chance.choice("ab")), b"a", b"p")
            field = self._chance.choice(good._fields)
            return good._replace(**{field: self._value(typing.get_type_hints(protocol.Put)[field])})
        kind = self._chance.choice(REQUESTS)
        message = kind(**{name: self._value(hint) for name, hint in typing.get_type_hints(kind).items()})
        # A Get that waits for a lease of this very connection is answered when nobody expects it any more.
        return message._replace(wait=self._chance.choice(NO_WAITS)) if isinstance(message, protocol.Get) else message

    def contents(self) -> list[bytes]:
        """Return no content, or the same one once or twice."""
        return [b"a"] * self._chance.randrange(3)

    def _value(self, hint: typing.Any) -> typing.Any:
        inside = typing.get_args(hint)
        if isinstance(hint, types.UnionType):
            return self._value(self._chance.choice(inside))
        if typing.get_origin(hint) is list:
            return [self._value(inside[0]) for _ in range(self._chance.randrange(4))]
        if typing.get_origin(hint) is dict:
            return {self._value(inside[0]): self._value(inside[1]) for _ in range(self._chance.randrange(4))}
        values = {str: TEXTS, int: INTEGERS, float: FLOATS, bool: [True, False], bytes: [b"", b"a", b"x" * 40_000]}
        return None if hint is types.NoneType else self._chance.choice(values[hint])


def say_something_odd(odd: Odd, talk: Conversation, contents: list[bytes]) -> None:
    """Send an odd message, and read its answer if it has one."""
    message = odd.message()
    try:
        request = talk.say(message, contents)
    except ProtocolError:
        # The client would not send it, either.
        return
    if not isinstance(message, NOTES):
        talk.answers([request])


@pytest.mark.parametrize("seed", range(4))
def test_odd_values_are_answered_and_nothing_breaks(place, seed):
    place.start_daemon()
    odd = Odd(seed)
    with talking(place) as talk:
        for _ in range(300):
            say_something_odd(odd, talk, odd.contents())
        assert talk.ask(commands.Sync()) == protocol.Done()
        talk.ask(commands.Clear())
        assert talk.put(key_of("after"), b"after") == protocol.Stored(True)
        assert talk.get(key_of("after")) == b"after"
        pid = talk.pid
    assert place.daemon_pid() == pid
    assert "Traceback" not in (place.dir / "daemon.log").read_text()
    assert place.query("SELECT count(*) FROM statistics WHERE amount IS NULL OR abs(amount) > 1e300") == [(0,)]
    assert place.query("SELECT name, amount FROM totals WHERE amount < 0") == []
