"""Keys that nobody stored are known without asking the database; those that somebody stored are never denied."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest
from conftest import digest
from conversation import key_of, talking

from xcache import protocol
from xcached.known import KnownKeys


class Rows:
    """What a database would say."""

    def __init__(self, *keys: str) -> None:
        self.keys = sorted(keys)

    def read(self, key: str, count: int) -> list[str]:
        first = bisect_right(self.keys, key)
        return self.keys[first : first + count]

    def count(self) -> int:
        return len(self.keys)


def keys(count: int, start: int = 0) -> list[str]:
    return [key_of(str(number)) for number in range(start, start + count)]


def known_of(rows: Rows, step: int = 1000) -> KnownKeys:
    known = KnownKeys(rows.read, rows.count)
    while not known.complete:
        known.learn(step)
    return known


def test_what_is_stored_is_never_denied_and_a_stranger_hardly_ever_taken_for_it():
    known = known_of(Rows(*keys(20_000)))
    assert all(map(known.may_hold, keys(20_000)))
    mistaken = sum(map(known.may_hold, keys(20_000, start=10**6)))
    assert 0 < mistaken < 400


def test_there_may_be_anything_before_all_was_read():
    known = KnownKeys(Rows(*keys(10)).read, lambda: 10)
    known.learn(5)
    assert known.may_hold(key_of("a stranger"))
    known.learn(6)
    assert not known.may_hold(key_of("a stranger"))


def test_what_no_digest_is_the_name_of_is_passed_over():
    known = known_of(Rows("", "nonsense", "ü", *keys(3)))
    assert all(map(known.may_hold, keys(3)))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_stored_meanwhile_is_there_at_every_moment(seed):
    """Also while all of it is read again, because far more came than there was room for."""
    chance = random.Random(seed)
    rows = Rows()
    known = KnownKeys(rows.read, rows.count)
    rooms = set()
    for number in range(20_000):
        rows.keys.insert(bisect_right(rows.keys, key_of(str(number))), key_of(str(number)))
        known.note([key_of(str(number))])
        if number % 7 == 0:
            known.learn(chance.choice([1, 10, 300]))
            rooms.add(len(known._bits))
            assert all(known.may_hold(key_of(str(chance.randrange(number + 1)))) for _ in range(20))
    assert len(rooms) > 1
    assert all(map(known.may_hold, rows.keys))


def test_more_than_there_should_be_is_no_trouble():
    rows = Rows(*keys(30_000))
    known = KnownKeys(rows.read, lambda: 0)
    for _ in range(200):
        known.learn(1000)
    assert known.complete
    assert all(map(known.may_hold, rows.keys))
    assert sum(map(known.may_hold, keys(1000, start=10**6))) < 100


def test_a_daemon_knows_what_is_there_when_it_starts_and_what_comes(place):
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("a")) is None
        talk.put(key_of("a"), b"a")
        talk.ask(protocol.MarkNotCacheable(key_of("marked"), "jit_f", "a reason"))
        assert talk.get(key_of("a")) == b"a"
        assert isinstance(talk.ask(protocol.Get(key_of("marked"), 0.0, "jit_f", digest(b""))), protocol.NotCacheable)
    place.stop()
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("a")) == b"a"
        assert isinstance(talk.ask(protocol.Get(key_of("marked"), 0.0, "jit_f", digest(b""))), protocol.NotCacheable)
        assert talk.get(key_of("b")) is None
        talk.ask(protocol.Remove([key_of("a")]))
        assert talk.get(key_of("a")) is None
        talk.put(key_of("a"), b"again")
        assert talk.get(key_of("a")) == b"again"
