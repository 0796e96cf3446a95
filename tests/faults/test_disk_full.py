"""A disk that is full, or read-only, at any write: puts are refused, nothing is lost, and later all is as before."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.acknowledged import Ledger
from support.command_line import Shell
from support.conversation import Conversation, key_of, talking
from support.load import Client
from support.marks import thorough
from support.places import until
from support.verdict import check

from xcache.wire import commands, protocol

pytestmark = pytest.mark.slow


def mount(*arguments: str) -> None:
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting is not permitted here: {result.stderr.strip()}")


@contextlib.contextmanager
def small_disk(place, size: int) -> Iterator[None]:
    """Keep the store on a file system of its own, of so many bytes, within the block."""
    place.dir.mkdir(mode=0o700)
    # These faults happen only when it is full to the last page.
    place.env.setdefault("XCACHE_MIN_FREE", "0")
    mount("-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(place.dir))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place.dir)], check=True)
        place.dir.rmdir()


def fill(path: Path, leave: int) -> None:
    """Take all the room there is but ``leave`` bytes."""
    free = max(0, shutil.disk_usage(path.parent).free - leave)
    # The daemon may write meanwhile.
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        for at in range(0, free, 4096):
            file.write(bytes(min(4096, free - at)))


def test_a_disk_of_any_size_that_fills_up(place, campaign):
    """Put until nothing more fits; after room is made, puts are taken again."""
    choose = random.Random(f"sizes {campaign.seed}")
    rounds = campaign.rounds(3)
    for number in range(rounds):
        size = 200_000 + (1_800_000 * number // rounds) + choose.randrange(4) * 4096
        with small_disk(place, size):
            fill_up_and_make_room(place, campaign, choose, f"a disk of {size} bytes")
    campaign.judge()
    # Each disk was full at least once.
    assert campaign.counts["faults tried"] >= rounds


def fill_up_and_make_room(place, campaign, choose, when: str) -> None:
    ledger = Ledger()
    child = place.daemon()
    refused = 0
    if not started(place, child):
        # Not even an empty store fits, and the daemon says so.
        campaign.fault()
        assert child.returncode == 1
        assert "cannot be opened" in place.said()
        return
    with talking(place) as talk:
        client = Client(talk, ledger, "filler", choose, refused=True)
        for _ in range(60):
            client.do_something()
        for number in range(200):
            content = choose.randbytes(choose.choice((100, 20_000, 50_000)))
            key = key_of(f"more {number}")
            before = ledger.begins_to_put(key, content)
            answer = talk.put(key, content)
            ledger.has_put(key, content, answer, before, 0.0)
            if isinstance(answer, protocol.Refused):
                refused += 1
                assert answer.kind in ("disk full", "store error"), answer
                if refused > 10:
                    break
    campaign.counts["faults tried"] += refused
    check(place, ledger, campaign, f"{when}, full")
    # Acknowledged entries are on the disk, not only in the daemon's memory.
    child.kill()
    child.wait()
    child = place.daemon()
    if started(place, child):
        check(place, ledger, campaign, f"{when}, full, after a kill")
    child.kill()
    child.wait()
    mount("-o", "remount,size=8M", str(place.dir))
    place.start_daemon()
    check(place, ledger, campaign, f"{when}, with room again")
    with talking(place) as talk:
        assert talk.put(key_of("after"), b"fits" * 20_000) == protocol.Stored(True)
    place.stop()


def started(place, child) -> bool:
    until(lambda: place.answers() or child.poll() is not None)
    return child.poll() is None


RUN = """
import os, sys, numpy as np, jax
print(float(jax.jit(lambda x: x * float(os.environ["FACTOR"]))(np.float32(2))))
"""


@pytest.mark.thorough
def test_a_run_on_a_full_disk_is_as_without_and_the_commands_answer(place):
    """The rows that found room are there, and no others."""
    shell = Shell(place)
    with small_disk(place, 3_000_000):
        place.start_daemon()
        on = {"XCACHE": "1", "XCACHE_TIMEOUT": "20s"}
        assert place.run(RUN, FACTOR="2", **on).stdout == "4.0\n"
        recorded = shell.json("runs")["runs"]
        fill(place.dir / "ballast", 0)
        for factor in range(3, 9):
            done = place.run(RUN, FACTOR=str(factor), **on)
            assert (done.returncode, done.stdout) == (0, f"{2.0 * factor}\n"), done.stderr
        for command in ("runs", "run", "why"):
            done = shell.run(command)
            assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
            assert "not recorded: the store could not be written" in done.stderr
        assert recorded[0]["run"] in {run["run"] for run in shell.json("runs")["runs"]}
        (place.dir / "ballast").unlink()
        assert place.run(RUN, FACTOR="9", **on).stdout == "18.0\n"
        assert shell.json("run")["programs"][0]["stored"] == "yes"
        assert shell.run("run").stderr == ""


@pytest.mark.thorough
def test_a_disk_is_never_filled(place):
    """Put entries of all sizes: less worthy ones go, or the put is refused, and the disk never fills."""
    choose = random.Random("never filled")
    with small_disk(place, 64_000_000):
        place.start_daemon(XCACHE_MIN_FREE="25%")
        with talking(place) as talk:
            answers = []
            for number in range(900):
                size = choose.choice((500, 20_000, 50_000, 400_000))
                answers.append(talk.put(key_of(str(number)), choose.randbytes(size), choose.randbytes(100)))
                # The bound allows for the journal, which is a few megabytes whatever the disk.
                assert shutil.disk_usage(place.dir).free > 8_000_000, number
            assert answers.count(protocol.Stored(True)) > 850
            assert {answer.kind for answer in answers if isinstance(answer, protocol.Refused)} <= {"disk full"}
            assert talk.ask(commands.Sync()) == protocol.Done()
            assert talk.status()["entries"] > 10
            # Others fill the disk: entries go until there is room or none are left; then puts are refused.
            for number in range(10):
                fill(place.dir / f"ballast {number}", 500_000)
                assert until(lambda: makes_room(talk) or shutil.disk_usage(place.dir).free > 15_000_000)
                if not talk.status()["entries"]:
                    break
            assert talk.status()["entries"] == 0
            refused = talk.put(key_of("late"), b"late" * 200_000)
            assert isinstance(refused, protocol.Refused) and refused.kind == "disk full"
            (place.dir / "ballast 0").unlink()
            assert talk.put(key_of("late"), b"late" * 20_000) == protocol.Stored(True)
        place.stop()


@pytest.mark.parametrize("count", thorough([1, 30, 200, 700], usual=(30,)))
@pytest.mark.parametrize("way", thorough(["makes room", "is cleared", "is started"], usual=["makes room"]))
def test_a_disk_that_is_full_to_the_last_byte(place, way, count):
    """Making room takes room, wherever in its journal the database is just then."""
    choose = random.Random(f"to the last byte {count}")
    place.env["XCACHE_MIN_FREE"] = "25%" if way == "makes room" else "0"
    with small_disk(place, 64_000_000):
        child = place.start_daemon()
        with talking(place) as talk:
            for number in range(count):
                content = choose.randbytes(choose.choice((500, 9_000, 20_000)))
                assert talk.put(key_of(str(number)), content) == protocol.Stored(True)
        if way == "is started":
            child.kill()
            child.wait()
        fill(place.dir / "ballast", 0)
        assert shutil.disk_usage(place.dir).free < 4096
        if way == "is started":
            place.start_daemon()
        with talking(place) as talk:
            if way == "makes room":
                assert until(lambda: makes_room(talk) or shutil.disk_usage(place.dir).free > 15_000_000)
            else:
                assert isinstance(answer := talk.ask(commands.Clear()), commands.Removed), answer
                assert talk.status()["entries"] == 0
            # The daemon gave up its reserve for that, and makes it again for the next time.
            (place.dir / "ballast").unlink()
            assert talk.ask(commands.Sync()) == protocol.Done()
            assert (place.dir / "reserve").exists()
        place.stop()


def makes_room(talk: Conversation) -> bool:
    """Return whether nothing is left that could go."""
    assert talk.ask(commands.Sync()) == protocol.Done()
    return talk.status()["entries"] == 0


def test_a_disk_that_is_full_for_a_while(place, campaign):
    """The same daemon goes on while the disk is full to the last pages, and with room again."""
    ledger, choose = Ledger(), random.Random(f"a while {campaign.seed}")
    with small_disk(place, 6_000_000):
        child = place.start_daemon()
        ballast = place.dir / "ballast"
        for number in range(campaign.rounds(4)):
            left = 4096 * choose.choice((0, 1, 2, 3, 5, 8, 13, 21, 34))
            with talking(place) as talk:
                Client(talk, ledger, "worker", choose).do_everything()
                fill(ballast, left)
                Client(talk, ledger, "worker", choose, refused=True).do_everything()
                campaign.fault()
                check(place, ledger, campaign, f"round {number}, {left} bytes free")
                ballast.unlink()
                Client(talk, ledger, "worker", choose).do_everything()
            check(place, ledger, campaign, f"round {number}, with room again")
            if number % 3 == 2:
                child.kill()
                child.wait()
                child = place.start_daemon()
                check(place, ledger, campaign, f"round {number}, after a kill")
        place.stop()
    campaign.judge()


@pytest.mark.thorough
def test_a_disk_that_becomes_read_only_for_a_while(place, campaign):
    """A file system turns read-only after an error: the daemon serves its entries and refuses new ones."""
    ledger, choose = Ledger(), random.Random(f"read-only {campaign.seed}")
    with small_disk(place, 8_000_000):
        for number in range(campaign.rounds(4)):
            child = place.start_daemon()
            talk = Conversation(place)
            talk.greet()
            Client(talk, ledger, "worker", choose).do_everything()
            # Files are open for writing, so that only the mount can be made read-only, and not the file system.
            mount("--bind", str(place.dir), str(place.dir))
            mount("-o", "remount,bind,ro", str(place.dir))
            try:
                Client(talk, ledger, "worker", choose, refused=True).do_everything()
                campaign.fault()
                for key in ledger.all():
                    wrong = ledger.found(key, talk.get(key))
                    if wrong:
                        campaign.problem("losses", f"round {number}, read-only: {wrong}")
            finally:
                subprocess.run(["umount", "-l", str(place.dir)], check=True)
            Client(talk, ledger, "worker", choose).do_everything()
            talk.close()
            check(place, ledger, campaign, f"round {number}, writable again", swept=False)
            child.kill()
            child.wait()
        place.start_daemon()
        check(place, ledger, campaign, "at the end")
        place.stop()
    campaign.judge()


def test_a_disk_that_is_read_only_from_the_start(place):
    """A daemon that cannot write says so and leaves; once the disk can be written again, one serves the store."""
    place.start_daemon()
    with talking(place) as talk:
        assert talk.put(key_of("a"), b"a" * 100_000).kept
    place.stop()
    mount("--bind", str(place.dir), str(place.dir))
    try:
        mount("-o", "remount,bind,ro", str(place.dir))
        child = place.daemon()
        assert child.wait(20) == 1
        assert "cannot be written" in place.said()
    finally:
        subprocess.run(["umount", "-l", str(place.dir)], check=True)
    place.start_daemon()
    with talking(place) as talk:
        assert talk.get(key_of("a")) == b"a" * 100_000
