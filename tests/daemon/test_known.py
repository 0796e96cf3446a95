"""Keys that nobody stored are known without asking the database; those that somebody stored are never denied."""

from __future__ import annotations

import contextlib
import random
from bisect import bisect_right

import pytest
from conversation import key_of, talking
from places import digest

from xcache import protocol
from xcached.known import KnownKeys
from xcached.store import Store


class Rows:
    """What a database would say."""

    def __init__(self, *keys: str) -> None:
        self.keys = sorted(keys)

    def read(self, key: str, count: int) -> list[str]:
        first = bisect_right(self.keys, key)
        return self.keys[first : first + count]


def keys(count: int, start: int = 0) -> list[str]:
    return [key_of(str(number)) for number in range(start, start + count)]


def known_of(rows: Rows, step: int = 1000) -> KnownKeys:
    known = KnownKeys(rows.read)
    while not known.complete:
        known.learn(step)
    return known


def test_what_is_stored_is_never_denied_and_a_stranger_hardly_ever_taken_for_it():
    known = known_of(Rows(*keys(20_000)))
    assert all(map(known.may_hold, keys(20_000)))
    mistaken = sum(map(known.may_hold, keys(20_000, start=10**6)))
    assert 0 < mistaken < 400


def test_there_may_be_anything_before_all_was_read():
    known = KnownKeys(Rows(*keys(10)).read)
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
    known = KnownKeys(rows.read)
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


@pytest.mark.parametrize("count", [4000, 4096, 4097, 20_000, 32_768])
def test_a_store_that_is_full_is_not_learnt_again_and_again(count):
    """One goes for each that comes; and the same may come often."""
    rows = Rows(*keys(count))
    read = 0

    def counted(key: str, most: int) -> list[str]:
        nonlocal read
        found = rows.read(key, most)
        read += len(found)
        return found

    known = KnownKeys(counted)
    while not known.complete:
        known.learn(1000)
    assert read < 3 * count
    read = 0
    for number in range(count // 2):
        known.note([key_of(str(count + number)), key_of("the same")])
        known.learn(1000)
    assert read == 0
    assert known.may_hold(key_of(str(count)))


def test_rows_that_somebody_altered_are_not_learnt_for_ever(place):
    """What cannot be read as it stands sorts elsewhere than it stood."""
    place.start_daemon()
    with talking(place) as talk:
        for name in "abc":
            talk.put(key_of(name), name.encode())
    place.stop()
    place.execute("UPDATE entries SET key = CAST(x'ff' AS TEXT) WHERE key = ?", key_of("a"))
    place.execute("UPDATE entries SET key = x'00' WHERE key = ?", key_of("b"))
    with contextlib.closing(Store(place.dir, 0)) as store:
        for _ in range(20):
            store.known.learn(1)
        assert store.known.complete
        assert store.known.may_hold(key_of("c"))


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
