"""Puts of every kind against stores with every kind of limit: nothing that was acknowledged goes in vain.

Each round is a store of its own, with random limits, users, pins and a disk that others fill. After each put, or some
puts at once: a refused put removed nothing; each evicted entry made room for one that was kept; no pinned entry went;
no user with at most a fair share lost an entry to another user; totals, tables and files agree.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import traceback
from collections import Counter
from concurrent.futures import Future
from typing import NamedTuple

import pytest
from support.campaigns import Campaign
from support.conversation import key_of
from support.places import digest, put_message
from support.small_disk import SmallDisk
from support.stores import WRITER, Shelf, quick_folder, source_of

from xcache.errors import RefusedError
from xcache.wire import protocol
from xcached.store import memory_files
from xcached.store.entries import EntryKey, Source
from xcached.store.jobs import PutJob
from xcached.store.pins import Share
from xcached.store.writer import refusal

KB = 1000
STEPS = 25
SIZES = (0, 5, 500, 5 * KB, 30 * KB, 40 * KB, 100 * KB, 300 * KB, 900 * KB)
SECONDS = (0.0, 0.01, 1.0, 100.0, 1e6, 9e15)
WAYS = {"honest": 12, "digest": 2, "larger": 1, "smaller": 1, "sparse": 1, "unsealed": 1}


class Kept(NamedTuple):
    """An entry in the store, as its row has it."""

    footprint: int
    pinned: bool
    created_at: float


class Round:
    """One store, and what is done to it."""

    def __init__(self, campaign: Campaign, choose: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.campaign = campaign
        self.choose = choose
        self.directory = quick_folder()
        self.shared = choose.random() < 0.6
        self.users = range(1, choose.choice((2, 3, 5)) + 1) if self.shared else [WRITER.uid]
        self.disk = SmallDisk(self.directory, monkeypatch, choose.choice((2000, 5000, 10**6)) * KB)
        self.limits = {
            "max_size": choose.choice((0, 300 * KB, 1000 * KB, 3000 * KB)),
            "user_quota": choose.choice((0, 0, 400 * KB)) if self.shared else 0,
            "max_entries": choose.choice((0, 0, 5, 20)),
            "min_free": choose.choice(("0", str(300 * KB), "10%")),
        }
        self.made = Shelf(self.directory, shared=self.shared, **self.limits)
        self.contents: dict[tuple[str, int], bytes] = {}
        self.done: list[str] = []

    def close(self) -> None:
        self.made.close()
        shutil.rmtree(self.directory)

    def standing(self) -> dict[tuple[str, int], Kept]:
        rows = self.made.query("SELECT key, writer_uid, footprint, pinned, created_at FROM entries")
        return {(key, uid): Kept(footprint, bool(pinned), at) for key, uid, footprint, pinned, at in rows}

    def problem(self, text: str) -> None:
        self.campaign.problem("losses", f"{text}; {self.limits}, shared: {self.shared}, after {self.done[-3:]}")

    def settle(self) -> None:
        """Have the store write everything, and evict all that exceeds its limits, newcomers too."""
        for _ in range(3):
            self.made.sync()

    def step(self) -> None:
        """Pin or fill the disk now and then, put something, and judge the store."""
        before = self.standing()
        if before and self.choose.random() < 0.1:
            self.pin(before)
        if self.choose.random() < 0.1:
            self.disk.held = self.choose.choice((0, self.disk.size // 4, self.disk.size // 2))
            # The daemon looks once a second; here it looks now.
            self.made.limit()
        self.settle()
        before = self.standing()
        count = self.choose.choice((1, 1, 1, 4))
        if count == 1:
            puts = [self.put()]
        else:
            with self.made.busy():
                puts = [self.put() for _ in range(count)]
        self.campaign.counts["faults tried"] += count
        taken = {entry for entry, done in puts if done.result(30) == protocol.Stored(True)}
        self.settle()
        self.judge(before, taken)

    def pin(self, standing: dict[tuple[str, int], Kept]) -> None:
        entries = [EntryKey(*self.choose.choice(list(standing)))]
        share = Share(5, 500 * KB) if self.shared else Share()
        self.made.call(lambda store: self.made.evictor.pins.pin(entries, share) and None)

    def put(self) -> tuple[tuple[str, int], Future[protocol.Message]]:
        """Begin to put something as a connection does: large contents pass the checks and the intake."""
        uid = self.choose.choice(self.users)
        key = key_of(f"key {self.choose.randrange(40)}")
        size, way = self.choose.choice(SIZES), self.choose.choices(list(WAYS), list(WAYS.values()))[0]
        content = self.choose.randbytes(1) * size
        program = self.choose.choice((b"p", b"q" * 20 * KB, b"r" * 60 * KB))
        changes = {
            "overwrite": self.choose.random() < 0.3,
            "compile_seconds": self.choose.choice(SECONDS),
            "module_name": self.choose.choice(("m", "m" * 400, "\N{SNOWMAN}" * 5000)),
        }
        if way == "digest":
            changes["digest"] = key_of("something else")
        elif way in ("larger", "smaller"):
            changes["stored_size"] = max(0, size + (1 if way == "larger" else -1))
        message = put_message(key, content, program, **changes)
        done: Future[protocol.Message] = Future()
        self.done.append(f"{way} {size} by {uid}")
        sources = [
            self.source(message.digest, message.stored_size, content, way),
            source_of(message.program_stored_digest, len(program), program),
        ]
        job = PutJob(message, *sources, WRITER._replace(uid=uid), done)
        large = [source for source in sources if source.descriptor is not None]
        try:
            for source in large:
                memory_files.check(source.descriptor, source.size, shared=self.shared)
        except RefusedError as error:
            memory_files.close_files(source.descriptor for source in large)
            done.set_result(refusal(error))
        else:
            if large:
                self.made.intake.submit(job, uid, 10**9)
            else:
                self.made.writer.submit(job, uid)
        done.add_done_callback(lambda done: self.keep((key, uid), content, way, done.result()))
        return (key, uid), done

    def source(self, named: str, announced: int, content: bytes, way: str) -> Source:
        if way not in ("sparse", "unsealed") and len(content) <= protocol.INLINE_LIMIT:
            return Source(named, announced, content, None)
        descriptor = os.memfd_create("campaign", os.MFD_ALLOW_SEALING)
        if way == "sparse":
            os.ftruncate(descriptor, len(content) or 1)
        else:
            os.write(descriptor, content)
        if way != "unsealed":
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return Source(named, announced, None, descriptor)

    def keep(self, entry: tuple[str, int], content: bytes, way: str, answer: protocol.Message) -> None:
        if answer != protocol.Stored(True):
            return
        self.contents[entry] = content
        # Empty contents have no hole, and none is smaller, so these puts are honest.
        if way != "honest" and (content or way not in ("sparse", "smaller")):
            self.campaign.problem("wrong loads", f"a {way} put of {len(content)} bytes was taken")

    def judge(self, before: dict[tuple[str, int], Kept], taken: set[tuple[str, int]]) -> None:
        after = self.standing()
        gone = {entry: there for entry, there in before.items() if entry not in after}
        came = {entry for entry in taken if entry in after}
        if gone and not taken:
            self.problem(f"{len(gone)} entries went for what was refused")
        # A replaced entry had gone before its successor did.
        elif set(gone) - taken and not came:
            self.problem(f"{len(gone)} entries went for what was not kept")
        if any(there.pinned and entry not in taken for entry, there in gone.items()):
            self.problem("what was pinned went")
        if self.shared and not self.limits["user_quota"]:
            self.judge_shares(before, gone, taken)
        for entry in self.choose.sample(sorted(after), min(3, len(after))):
            self.campaign.checked(1)
            hits = [hit for hit in self.made.store.reader.find(entry[0]) if hit.writer_uid == entry[1]]
            if not hits or hits[0].digest != digest(self.contents[entry]):
                self.campaign.problem("wrong loads", f"{entry} is not what was put last")
        try:
            self.made.check()
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1].line
            self.campaign.problem("other problems", f"not {where}; {self.limits}, after {self.done[-3:]}")

    def judge_shares(
        self,
        before: dict[tuple[str, int], Kept],
        gone: dict[tuple[str, int], Kept],
        taken: set[tuple[str, int]],
    ) -> None:
        """Fail unless each user who lost an entry to another had at least a fair share, by bytes or by number."""
        putters = {uid for _, uid in taken}
        theirs: Counter[int] = Counter()
        number = Counter(uid for _, uid in before)
        for (_, uid), there in before.items():
            theirs[uid] += there.footprint
        for _, uid in gone:
            everybody = set(theirs) | putters
            enough = theirs[uid] * len(everybody) >= sum(theirs.values())
            if uid not in putters and not enough and number[uid] * len(everybody) < len(before):
                self.problem(f"user {uid} lost an entry of no more than a fair share")


# Rounds in which entries went in vain before evictions were rehearsed.
SEEN = (14, 18, 43, 59, 71, 88, 122)


@pytest.mark.slow
@pytest.mark.timeout(36_000)
def test_no_put_costs_what_was_kept(campaign, monkeypatch):
    rounds = min(campaign.rounds(1), 20_000)
    seen = SEEN if campaign.is_long else SEEN[:3]
    for number in sorted({*range(rounds), *seen}):
        with monkeypatch.context() as patch:
            one = Round(campaign, random.Random(f"{campaign.seed} {number}"), patch)
            try:
                for _ in range(STEPS):
                    one.step()
            finally:
                one.close()
    campaign.judge()
    # Each step tries a put at least, and each round compares what it stored.
    assert campaign.counts["faults tried"] >= rounds * STEPS // 2
    assert campaign.counts["entries checked"] >= rounds
