"""A small disk that is full to the last byte: the commands that make room work, whoever has filled it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.marks import further
from support.places import until
from support.stores import shelf

from xcache.wire import commands, protocol
from xcached.store.entries import EntryKey

pytestmark = pytest.mark.slow
MB = 1_000_000


@contextlib.contextmanager
def disk_of(size: int, folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while file.write(bytes(shutil.disk_usage(path.parent).free or 4096)):
            pass


def put_until_full(talk, content: int, most: int) -> list[str]:
    choose, kept = random.Random(content), []
    for number in range(most):
        answer = talk.put(key_of(str(number)), choose.randbytes(content), choose.randbytes(500))
        if answer != protocol.Stored(True):
            assert isinstance(answer, protocol.Refused) and answer.kind == "disk full", answer
            break
        kept.append(key_of(str(number)))
    return kept


@pytest.mark.parametrize(
    ("size", "content", "min_free", "restarted"),
    [
        *further((2 * MB, 1000, "5%", False)),
        (2 * MB, 20_000, "0", True),
        *further((30 * MB, 20_000, "0", False)),
        (30 * MB, 1000, "5%", True),
    ],
)
def test_the_commands_that_make_room_work_on_a_full_disk(place, size, content, min_free, restarted):
    place.env["XCACHE_MIN_FREE"] = min_free
    with disk_of(size, place.dir):
        child = place.start_daemon()
        with talking(place) as talk:
            kept = put_until_full(talk, content, 250)
            assert len(kept) > 5
        if restarted:
            child.kill()
            child.wait()
        fill(place.dir / "ballast")
        shell = Shell(place)
        assert shell.say("rm", kept[-1]).startswith("removed 1 entry")
        fill(place.dir / "ballast")
        shell.say("gc")
        fill(place.dir / "ballast")
        with talking(place) as talk:
            left = talk.status()["entries"]
            # Less would not be kept than min_free leaves; with none, all the others are there.
            assert min_free != "0" or left == len(kept) - 1
            refused = talk.put(key_of("late"), b"late" * 50_000)
            assert isinstance(refused, protocol.Refused) and refused.kind == "disk full", refused
        shell.say("clear", "--yes")
        (place.dir / "ballast").unlink()
        with talking(place) as talk:
            assert talk.status()["entries"] == 0
            assert talk.put(key_of("after"), b"after") == protocol.Stored(True)
            assert talk.ask(commands.Sync()) == protocol.Done()
        assert (place.dir / "reserve").exists()
        place.stop()


def test_entries_are_removed_even_where_the_reserve_is_gone(tmp_path):
    """Their files go before their rows, which is safe after a crash: a row without a file is a miss."""
    folder = tmp_path / "store"
    with disk_of(6 * MB, folder), shelf(folder) as made:
        for name in "abc":
            assert made.put(key_of(name), os.urandom(400_000), b"program") == protocol.Stored(True)

        def fill_and_remove(store) -> None:
            (folder / "reserve").unlink()
            store.database.reserve.size = 0
            store.database.checkpoint()
            fill(folder / "ballast")
            # The journal is used up to its end.
            with contextlib.suppress(Exception), store.transaction(frees=True):
                store.database.writing.execute("UPDATE totals SET amount = amount")
            store.let_go([EntryKey(key_of(name), 1) for name in "ab"], "removed: rm")

        made.call(fill_and_remove)
        assert made.keys() == {key_of("c")}
        (folder / "ballast").unlink()
        made.sync()
        made.check()


def test_the_reserve_grows_with_the_room_there_is(place):
    with disk_of(2 * MB, place.dir):
        place.start_daemon()
        assert until(lambda: (place.dir / "reserve").exists())
        assert (place.dir / "reserve").stat().st_size == 512 * 1024
        subprocess.run(["mount", "-o", "remount,size=60M", str(place.dir)], check=True)
        with talking(place) as talk:
            assert talk.put(key_of("a"), b"a") == protocol.Stored(True)
            assert talk.ask(commands.Sync()) == protocol.Done()
        assert (place.dir / "reserve").stat().st_size == 8 * 1024**2
        place.stop()
