"""A slow world: answers of the daemon come late, each message alone and all of them.

A program of many compiles is right, and loses ``XCACHE_TIMEOUT`` to its daemon once in all, whatever is late. For a
program that was a hit, a wait no longer than its compile would have been is no loss.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import typing
from collections import Counter
from collections.abc import Iterator

import pytest
from support.delaying import ADMINISTRATIVE, ANSWERS, OF_PROGRAMS, delaying
from support.places import TESTS, Place, new_place

from xcache.wire import protocol

PROGRAM = TESTS / "support" / "waiting_program.py"
ALL = "everything"
KINDS = {ALL: OF_PROGRAMS} | {name: frozenset({name}) for name in sorted(OF_PROGRAMS)}
STATES = {"warm": {}, "warm, nothing ahead": {"XCACHE_PREFETCH": "0"}, "cold": {}, "damaged": {}}
DELAYS = (0.1, 0.4, 2.0, 10.0)
# Only in this state does a program complain, and only in this one does it mark a key.
ONLY_IN = {"Complain": "damaged", "MarkNotCacheable": "cold"}
# A program sends this only when an alias is wrong.
NEVER_HERE = {"DropAlias"}
# A program asks for the status only after a failure.
BREAKS_AT = {"AskStatus": "Predict"}
# The short form has some of each: later than the timeout, and sooner.
SHORT = (
    *((0.4, "warm", ALL), (2.0, "cold", ALL), (0.4, "warm", "Get")),
    *((0.4, "damaged", "Complain"), (2.0, "cold", "AskFiles"), (0.4, "warm, nothing ahead", "AskAlias")),
)  # fmt: skip
# One call is watched to a few hundredths of a second, and a busy machine wakes a program late.
UNSEEN = 0.5
# The allowance comes back at this rate.
REFILL_RATE = 0.01


class Store:
    """A store with everything in it, and what the program computes."""

    def __init__(self, place: Place, count: int) -> None:
        self.count = count
        self.results = run(place, count, XCACHE="0")["results"]
        place.start_daemon()
        with delaying(place.root / "late", place.socket, frozenset(), 0.0) as proxy:
            cold = run(place, count, XCACHE="1", XCACHE_TIMEOUT="60s", XCACHE_SOCKET=str(place.root / "late"))
        assert (cold["results"], cold["stats"]["errors"]) == (self.results, {})
        self.seen = proxy.seen
        self.compile_seconds = dict(place.query("SELECT module_name, compile_seconds FROM entries"))
        assert len(self.compile_seconds) == count
        self.blobs = [str(blob) for (blob,) in place.query("SELECT blob FROM entries ORDER BY blob")]
        place.stop()
        self.dir = place.dir

    def copy_to(self, place: Place, *, damaged: bool) -> None:
        """Have the place begin with a copy of this store, perhaps with some entries spoiled."""
        shutil.copytree(self.dir, place.dir)
        for digest in self.blobs[:4] if damaged else ():
            blob = place.dir / "blobs" / digest[:2] / digest
            content = bytearray(blob.read_bytes())
            content[len(content) // 2] ^= 1
            blob.chmod(0o600)
            blob.write_bytes(content)

    def lost(self, ran: dict) -> float:
        """Return the seconds that a run waited, less what its hits spared it: of each wait, a compile at most."""
        spared = sum(min(waited, self.compile_seconds[name]) for name, waited in ran["hits"].items())
        return sum(ran["waits"].values()) - spared


def run(place: Place, count: int, **environment: str) -> dict:
    done = subprocess.run(
        [sys.executable, PROGRAM, str(count)],
        env=place.env | {"JAX_PLATFORMS": "cpu"} | environment,
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def store(campaign) -> Iterator[Store]:
    with new_place() as place:
        # The short form's programs compile less and may lose less.
        yield Store(place, 60 if campaign.is_long else 20)


def test_each_message_is_a_programs_or_is_left_out_for_a_reason():
    names = {kind.__name__ for kind in typing.get_args(protocol.Message)}
    assert names >= ANSWERS | ADMINISTRATIVE
    assert not ANSWERS & ADMINISTRATIVE


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_whatever_is_late_a_program_loses_its_timeout_once(campaign, store):
    timeout = 5.0 if campaign.is_long else 1.0
    cases = [
        (delay, state, kind)
        for delay, state, kind in itertools.product(DELAYS, STATES, KINDS)
        if ONLY_IN.get(kind, state) == state
    ]
    random.Random(campaign.seed).shuffle(cases)
    chosen = cases[: campaign.rounds(0)] or SHORT
    most, seen, idle = 0.0, Counter(store.seen), 0
    for delay, state, kind in chosen:
        with new_place() as place:
            if state != "cold":
                store.copy_to(place, damaged=state == "damaged")
            place.start_daemon()
            late = place.root / "late"
            with delaying(late, place.socket, KINDS[kind], delay, BREAKS_AT.get(kind, "")) as proxy:
                environment = {"XCACHE": "1", "XCACHE_TIMEOUT": f"{timeout:g}s", "XCACHE_SOCKET": str(late)}
                environment["XCACHE_LOWERING"] = "skip"
                ran = run(place, store.count, **environment | STATES[state])
        seen += proxy.seen
        if not proxy.held:
            # Nothing was late.
            idle += 1
            continue
        campaign.fault()
        stats, lost = ran["stats"], store.lost(ran)
        most = max(most, lost, stats["lost_seconds"])
        case = f"{kind} late by {delay:g} s, {state}: held {dict(proxy.held)}, waited {ran['waits']}"
        if ran["results"] != store.results:
            campaign.problem("wrong loads", case)
        if stats["requests"] != stats["hits"] + stats["misses"] + sum(stats["uncacheable"].values()):
            campaign.problem("other problems", f"{case}: {stats}")
        may_lose = timeout + REFILL_RATE * ran["seconds"] + UNSEEN
        for who, seconds in (("measured", lost), ("its own account", stats["lost_seconds"])):
            if seconds > may_lose:
                campaign.problem("other problems", f"{case}: {who}: {seconds:.2f} s of {timeout:g} s")
    if chosen in (SHORT, cases) and (never := OF_PROGRAMS - NEVER_HERE - seen.keys()):
        campaign.problem("other problems", f"no program sent {sorted(never)}, so that was never late")
    campaign.note(f"a slow world: at most {most:.2f} s lost of {timeout:g} s; in {idle} cases nothing was late")
    campaign.judge()
    assert campaign.counts["faults tried"] == len(chosen) - idle
