"""Whether the tiers have what a program will want, and its entries brought here before it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future

from xcache.errors import XcacheError
from xcache.wire import commands, protocol
from xcache.wire.commands import HERE, MISSING, REMOTE, UNKNOWN
from xcache.wire.names import Names
from xcached.tiers.fair_gate import FairGate
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.keeping import Keeper
from xcached.tiers.managing import answered
from xcached.tiers.tier import TierError
from xcached.tiers.tiers import Tiers

logger = logging.getLogger("xcached")

# Questions to one tier, and entries on their way, at the same time, for all users: programs come first.
_QUESTIONS, _FETCHES = 16, 4
# Seconds that one request may ask for.
_LONGEST_SECONDS = 600.0
# The programs that want such an entry do not ask the tiers either.
_NEVER_ASKED = ("stale", "not cacheable")
_LONGEST_REASON = 500


class _Fetching:
    """An entry on its way, or waiting for its turn, and how many requests want it."""

    task: asyncio.Task[list[str]]

    def __init__(self) -> None:
        self.wanted = 0
        self.has_begun = False


class Presence:
    """Its methods may be called on any thread; the futures have the answers, always."""

    def __init__(self, tiers: Tiers, names: Names, keeper: Keeper) -> None:
        self._tiers = tiers
        self._names = names
        self._keeper = keeper
        # On the loop of the tiers' thread.
        self._questions: dict[str, FairGate] = {}
        self._gate = FairGate(_FETCHES)
        # By user and key.
        self._fetches: dict[tuple[int, str], _Fetching] = {}

    def ask(self, uid: int, keys: list[str], found: list[list[str]], seconds: float) -> Future[protocol.Message]:
        """Ask all tiers for what is missing in ``found``, which is as in ``Presence.entries``."""
        return self._tiers.begin(answered(self._ask(uid, keys, found, _bounded(seconds))))

    def fetch(self, uid: int, keys: list[str], found: list[list[str]], seconds: float) -> Future[protocol.Message]:
        """Bring here what is missing in ``found``; what is on its way when a request gives up still comes."""
        return self._tiers.begin(answered(self._fetch(uid, keys, found, _bounded(seconds))))

    async def _ask(self, uid: int, keys: list[str], found: list[list[str]], seconds: float) -> protocol.Message:
        wanted = _wanted(keys, found)
        tiers = self._readable() if wanted else []
        asked = await asyncio.gather(*(self._has(tier, uid, list(wanted), seconds) for tier in tiers))
        problems = dict(self._tiers.unusable) if wanted else {}
        problems |= {tier.name: problem for tier, (_, problem) in zip(tiers, asked, strict=True) if problem}
        for key, place in wanted.items():
            having = [(tier.name, why) for tier, (there, _) in zip(tiers, asked, strict=True)
                      if (why := there.get(key)) is not None]  # fmt: skip
            usable = next((name for name, why in having if not why), None)
            if usable is not None:
                found[place] = [REMOTE, usable, ""]
            elif having:
                name, why = having[0]
                found[place] = [MISSING, "", f"{name} has it, which is not used: {why}"[:_LONGEST_REASON]]
            elif any(key not in there for there, _ in asked) or self._tiers.unusable:
                found[place][0] = UNKNOWN
        return commands.Presence(found, problems)

    async def _has(
        self, tier: GuardedTier, uid: int, keys: list[str], seconds: float
    ) -> tuple[dict[str, str | None], str]:
        """Return for each key why the tier's entry would not be loaded (None: it has none), and why that is not all."""
        there: dict[str, str | None] = {}
        gate = self._questions.setdefault(tier.name, FairGate(_QUESTIONS))

        async def ask(key: str) -> None:
            async with gate.place(uid):
                # The first failure is enough.
                if not tier.reads.problem:
                    with contextlib.suppress(TierError):
                        there[key] = await self._keeper.why_of_no_use(tier, key)

        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*map(ask, keys))
        except TimeoutError:
            return there, tier.reads.problem or f"no answer within {seconds:g} s"
        return there, "" if len(there) == len(keys) else tier.reads.problem or "it failed"

    async def _fetch(self, uid: int, keys: list[str], found: list[list[str]], seconds: float) -> protocol.Message:
        fetching = {key: self._fetching(uid, key) for key in _wanted(keys, found)}
        for each in fetching.values():
            each.wanted += 1
        try:
            if fetching:
                await asyncio.wait([each.task for each in fetching.values()], timeout=seconds)
            late = [MISSING, "", f"it did not come within {seconds:g} s"]
            for key, place in _wanted(keys, found).items():
                found[place] = fetching[key].task.result() if fetching[key].task.done() else late
        finally:
            for key, each in fetching.items():
                each.wanted -= 1
                if not each.wanted and not each.has_begun:
                    each.task.cancel()
                    self._forget(uid, key, each)
        return commands.Presence(found, {})

    def _fetching(self, uid: int, key: str) -> _Fetching:
        found = self._fetches.get((uid, key))
        if found is None:
            found = self._fetches[uid, key] = _Fetching()
            found.task = asyncio.get_running_loop().create_task(self._fetch_one(uid, key, found))
            found.task.add_done_callback(lambda _: self._forget(uid, key, found))
        return found

    def _forget(self, uid: int, key: str, fetching: _Fetching) -> None:
        if self._fetches.get((uid, key)) is fetching:
            del self._fetches[uid, key]

    async def _fetch_one(self, uid: int, key: str, fetching: _Fetching) -> list[str]:
        """Return what became of an entry, as in ``Presence.entries``."""
        name, reason = self._names.entry(key), "no remote store has it"
        async with self._gate.place(uid):
            fetching.has_begun = True
            for tier in self._readable():
                failed = _trouble(tier) or await self._why_not_kept(tier, name, key)
                if failed is None:
                    return [HERE, tier.name, ""]
                reason = failed or reason
        return [MISSING, "", reason[:_LONGEST_REASON]]

    async def _why_not_kept(self, tier: GuardedTier, name: str, key: str) -> str | None:
        """Have an entry of a tier kept here, and return None; or return why not, if the tier has it or fails."""
        try:
            async with tier.fetched(name) as content:
                if content is None:
                    return _trouble(tier)
                if await self._keeper.keep_entry(tier, content, key, ""):
                    return None
        except XcacheError as error:
            tier.note_unusable(name, error)
            return f"{tier.name}: {error}"
        except Exception:
            # A defect with one entry must not leave the person who asked for many without an answer.
            logger.exception("%s of %s could not be kept", key[:12], tier.name)
            return "the daemon's log says more"
        return "the store here did not take it; the daemon's log says more"

    def _readable(self) -> list[GuardedTier]:
        return [tier for tier in self._tiers.opened if not tier.remote.writeonly]


def _trouble(tier: GuardedTier) -> str:
    return f"{tier.name}: {tier.reads.problem}" if tier.reads.problem else ""


def _wanted(keys: list[str], found: list[list[str]]) -> dict[str, int]:
    """Return the keys that the tiers are asked for, each with its place."""
    return {
        key: place
        for place, (key, (state, _, reason)) in enumerate(zip(keys, found, strict=True))
        if state == MISSING and reason not in _NEVER_ASKED
    }


def _bounded(seconds: float) -> float:
    # Neither comparison is true of a NaN.
    return min(seconds, _LONGEST_SECONDS) if seconds > 0 else 0.0
