"""A put and what goes for it: nothing goes for a put that is refused, nor for an entry that has to go itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.conversation import key_of
from support.places import digest
from support.small_disk import SmallDisk
from support.stores import Shelf, shelf

from xcache.wire import protocol

KB = 1000
MB = 1000 * KB
LEAST_FREE = 10 * MB


def content(name: str, size: int) -> bytes:
    return (digest(name.encode()) * (size // 64 + 1)).encode()[:size]


def fill(made: Shelf, names: Iterable[str], size: int, **changes: object) -> None:
    for name in names:
        assert made.put(key_of(name), content(name, size), b"p", **changes) == protocol.Stored(True)


def names_in(made: Shelf, names: str) -> str:
    return "".join(name for name in names if made.get(key_of(name)) is not None)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return SmallDisk(tmp_path, monkeypatch, 40 * MB)


def test_a_put_that_cannot_fit_on_the_disk_is_refused_and_nobody_goes(tmp_path, disk):
    with shelf(tmp_path, min_free=str(LEAST_FREE)) as made:
        fill(made, "abcdefghij", 2 * MB)
        answer = made.put(key_of("large"), content("large", 32 * MB), b"p")
        assert isinstance(answer, protocol.Refused) and answer.kind == "disk full", answer
        assert names_in(made, "abcdefghij") == "abcdefghij"
        made.check()


def test_for_a_put_that_fits_as_many_go_as_have_to(tmp_path, disk):
    with shelf(tmp_path, min_free=str(LEAST_FREE)) as made:
        fill(made, "abcdefghij", 2 * MB)
        fill(made, "k", 13 * MB)
        assert names_in(made, "abcdefghijk") == "cdefghijk"
        made.check()


def left_free(disk: SmallDisk, held: int) -> protocol.Message:
    """Have other programs hold so much that a put finds too little, and nobody has to go without one."""
    disk.held = held
    return protocol.Done()


@pytest.mark.parametrize("size", [13 * MB, 20 * KB], ids=["large", "small"])
def test_nobody_goes_for_a_false_digest(tmp_path, disk, size):
    with shelf(tmp_path, min_free=str(LEAST_FREE)) as made:
        fill(made, "abcdefghij", 2 * MB)
        made.call(lambda _: left_free(disk, made.evictor.shortage.available_bytes() - LEAST_FREE - size // 2))
        answer = made.put(key_of("false"), content("false", size), b"p", digest=key_of("other"))
        assert isinstance(answer, protocol.Refused) and answer.kind == "wrong digest", answer
        assert names_in(made, "abcdefghij") == "abcdefghij"
        made.check()


def test_an_entry_that_goes_takes_no_bytes_from_one_that_comes(tmp_path, disk):
    """Both have the same bytes, and another put of the same transaction needs the room."""
    with shelf(tmp_path, min_free=str(LEAST_FREE)) as made:
        fill(made, "a", 2 * MB, compile_seconds=0.001)
        fill(made, "bcdefghij", 2 * MB, compile_seconds=100.0)
        with made.busy():
            puts = [
                made.begin_put(key_of(name), content(of, size), b"p", compile_seconds=100.0)
                for name, of, size in (("same", "a", 2 * MB), ("large", "large", 11 * MB))
            ]
            # From now on both wait for the writer, and so share its transaction.
            assert made.intake.close(20)
        assert [done.result(20) for done in puts] == [protocol.Stored(True)] * 2
        made.sync()
        assert made.get(key_of("a")) is None
        assert made.get(key_of("same")) == content("a", 2 * MB)
        made.check()


def test_evicting_ends_where_it_frees_nothing(tmp_path, disk):
    """A process may hold deleted files open, or fill the disk as fast as the daemon empties it."""
    names = [f"entry {number}" for number in range(28)]
    with shelf(tmp_path, min_free=str(LEAST_FREE)) as made:
        fill(made, names, 1 * MB)
        # The disk stays full from here on, even if entries go.
        disk.size = 1
        made.limit(min_free=str(LEAST_FREE))
        made.sync()
        left = made.keys()
        # A step takes up to 10 MB, and is the last where 16 MiB have gone in vain.
        assert 2 <= len(left) < 28
        answer = made.put(key_of("new"), content("new", 1 * MB), b"p")
        assert isinstance(answer, protocol.Refused) and answer.kind == "disk full", answer
        assert made.keys() == left
        made.check()


def test_nobody_goes_for_an_entry_that_has_to_go_itself(tmp_path):
    """It is worth more than some, and less than those whose room it would need."""
    with shelf(tmp_path, max_size=100 * KB) as made:
        fill(made, "ab", 9 * KB, compile_seconds=0.01)
        fill(made, "cdefghi", 11 * KB, compile_seconds=100.0)
        fill(made, "j", 60 * KB, compile_seconds=1.0)
        made.sync()
        assert names_in(made, "abcdefghij") == "abcdefghi"
        made.check()


def test_among_many_nobody_goes_for_an_entry_that_has_to_go_itself(tmp_path):
    """This holds even if more entries are worth less than it than one step evicts."""
    cheap, dear = [f"cheap {number}" for number in range(150)], [f"dear {number}" for number in range(20)]
    with shelf(tmp_path, max_size=1000 * KB) as made:
        for name in cheap:
            fill(made, [name], 1 * KB, compile_seconds=0.01)
        for name in dear:
            fill(made, [name], 40 * KB, compile_seconds=1000.0)
        fill(made, ["new"], 400 * KB, compile_seconds=10.0)
        made.sync()
        assert made.keys() == {key_of(name) for name in (*cheap, *dear)}
        made.check()
