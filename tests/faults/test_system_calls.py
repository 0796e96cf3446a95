"""A fault at every single system call of working, starting and leaving: a kill, or a failure of the usual kinds."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess

import pytest
from support.acknowledged import Ledger
from support.conversation import Conversation, talking
from support.injection import (
    CALLS,
    KILL,
    attached,
    calls_made,
    end,
    fault,
    from_the_start,
    points,
    settled,
    skip_without_strace,
)
from support.load import Client
from support.marks import thorough
from support.places import until
from support.verdict import check

pytestmark = pytest.mark.slow

LIMIT = {"XCACHE_MAX_SIZE": "700000"}
# The failures that each call can really meet.
ERRORS = {
    "pwrite64": ("ENOSPC", "EIO"),
    "write": ("ENOSPC", "EIO"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "rename": ("ENOSPC", "EIO", "EROFS"),
    "unlink": ("EIO", "EROFS"),
    "openat": ("EMFILE", "ENOSPC", "EIO", "EROFS"),
    "mkdir": ("ENOSPC", "EROFS"),
    "ftruncate": ("EIO",),
}
WATCH = ["-e", f"trace={','.join(CALLS)}"]


@pytest.fixture(autouse=True)
def with_strace():
    skip_without_strace()


def work(place, ledger, choose, *, refused: bool = False) -> None:
    """Every kind of operation once, as far as there is a daemon that does them."""
    with contextlib.suppress(ConnectionError):
        talk = Conversation(place)
        try:
            talk.greet()
            Client(talk, ledger, "worker", choose, evicting=True, refused=refused).do_everything()
        except TimeoutError:
            ledger.wrong.append("no answer came")
        finally:
            talk.close()


def chosen(found, usual: int, campaign, choose) -> list:
    """Return a random choice of the points, one for each round, in order."""
    return sorted(choose.sample(found, min(campaign.rounds(usual), len(found))))


def count_calls_of_work(place, ledger, choose):
    """Return the calls that ``work`` makes a daemon with a store do."""
    log = place.root / "calls"
    child = place.start_daemon(**LIMIT)
    work(place, ledger, choose)
    with attached(child.pid, *WATCH, log=log):
        work(place, ledger, choose)
    return child, calls_made(log)


def ended(place, child: subprocess.Popen[bytes]) -> None:
    end(child)
    until(place.has_left)


def test_killed_at_any_call_while_working(place, campaign):
    ledger, choose = Ledger(), random.Random(f"work {campaign.seed}")
    child, calls = count_calls_of_work(place, ledger, choose)
    for call, number in chosen(points(calls, CALLS), 4, campaign, choose):
        with contextlib.suppress(ConnectionError), attached(child.pid, *fault(call, number, KILL)):
            work(place, ledger, choose)
        campaign.fault()
        ended(place, child)
        child = place.start_daemon(**LIMIT)
        check(place, ledger, campaign, f"{call} {number}", evicting=True)
    campaign.judge()


def test_a_failure_of_any_call_while_working(place, campaign):
    """Once, or from then on until the trouble is over; the same daemon goes on, and so does the one after it."""
    ledger, choose = Ledger(), random.Random(f"errors {campaign.seed}")
    child, calls = count_calls_of_work(place, ledger, choose)
    found = [
        (call, number, f"error={error}", often)
        for call, number in points(calls, CALLS)
        for error in ERRORS[call]
        for often in ("", "+")
    ]
    for call, number, error, often in chosen(found, 4, campaign, choose):
        when = f"{call} {number}{often} {error}"
        with attached(child.pid, *fault(call, f"{number}{often}", error)):
            work(place, ledger, choose, refused=True)
        campaign.fault()
        if child.poll() is not None:
            campaign.problem("crashes", f"{when}: the daemon left with {child.returncode}")
            child = place.start_daemon(**LIMIT)
        check(place, ledger, campaign, f"{when}, afterwards", evicting=True, swept=False)
        work(place, ledger, choose)
        ended(place, child)
        child = place.start_daemon(**LIMIT)
        check(place, ledger, campaign, f"{when}, after a restart", evicting=True)
    campaign.judge()


def _faults(calls) -> dict[str, list[tuple[str, int, str]]]:
    """Return the faults for each of the calls that were made."""
    found = points(calls, CALLS)
    return {
        "kill": [(call, number, KILL) for call, number in found],
        "failure": [(call, number, f"error={error}") for call, number in found for error in ERRORS[call]],
    }


@pytest.mark.parametrize("before", thorough(["nothing", "a store"], usual=["a store"]))
@pytest.mark.parametrize("what", thorough(["kill", "failure"], usual=["kill"]))
def test_a_fault_at_any_call_while_starting(place, campaign, before, what):
    choose = random.Random(f"start {before} {what} {campaign.seed}")

    def prepare() -> Ledger:
        """Remove the store, or make one whose daemon was killed at work, so that there is much to recover."""
        if place.dir.exists():
            shutil.rmtree(place.dir)
        ledger = Ledger()
        if before == "a store":
            child = place.start_daemon(**LIMIT)
            work(place, ledger, choose)
            ended(place, child)
            (place.dir / "blobs" / "unfinished" / ("0" * 64)).write_bytes(b"half of it")
        return ledger

    ledger = prepare()
    log = place.root / "calls"
    child = place.start_daemon(*from_the_start(place.dir, log, *WATCH), **LIMIT)
    check(place, ledger, campaign, "at first", evicting=True)
    settled(log)
    calls = calls_made(log)
    ended(place, child)
    faults = _faults(calls)
    for call, number, how in chosen(faults[what], 3, campaign, choose):
        ledger = prepare()
        when = f"{call} {number} {how}"
        log.unlink(missing_ok=True)
        child = place.daemon(*from_the_start(place.dir, log, *fault(call, number, how)), **LIMIT)
        if not until(lambda child=child: child.poll() is not None or place.answers()):
            campaign.problem("other problems", f"{when}: it neither starts nor leaves")
        campaign.fault()
        if what == "failure" and child.poll() not in (None, 1):
            campaign.problem("crashes", f"{when}: the daemon left with {child.returncode}")
        ended(place, child)
        try:
            child = place.start_daemon(**LIMIT)
        except AssertionError:
            said = place.said().rpartition("xcached: ")[2].strip()
            campaign.problem("other problems", f"{when}: the next daemon does not start: {said}")
            continue
        check(place, ledger, campaign, when, evicting=True)
        work(place, ledger, choose)
        check(place, ledger, campaign, f"{when}, afterwards", evicting=True)
        ended(place, child)
    campaign.judge()


@pytest.mark.parametrize("what", thorough(["kill", "failure"], usual=["kill"]))
def test_a_fault_at_any_call_while_leaving(place, campaign, what):
    """A daemon that leaves brings its journal into the database, page by page."""
    ledger, choose = Ledger(), random.Random(f"leave {what} {campaign.seed}")

    def leave(*options: str) -> int:
        child = place.start_daemon(**LIMIT)
        work(place, ledger, choose)
        with talking(place), contextlib.suppress(ConnectionError), attached(child.pid, *options, log=log):
            child.send_signal(signal.SIGTERM)
            if not until(lambda: child.poll() is not None):
                campaign.problem("other problems", f"{options[-1]}: it does not leave")
        status = child.poll()
        end(child)
        return status

    log = place.root / "calls"
    assert leave(*WATCH) == 0
    settled(log)
    calls = calls_made(log)
    # The first is by which Python tells itself of the signal: one that is not told does not leave.
    del calls["write"]
    faults = _faults(calls)
    for call, number, how in chosen(faults[what], 4, campaign, choose):
        when = f"{call} {number} {how}"
        status = leave(*fault(call, number, how))
        campaign.fault()
        if what == "failure" and status not in (0, 1):
            campaign.problem("crashes", f"{when}: the daemon left with {status}")
        until(place.has_left)
        child = place.start_daemon(**LIMIT)
        check(place, ledger, campaign, when, evicting=True)
        ended(place, child)
    campaign.judge()
