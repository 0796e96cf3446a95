"""The requests of administrators to the tiers: a check, a listing of objects, facts of some, and their removal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from xcache.errors import XcacheError
from xcache.wire import commands, protocol
from xcache.wire.hashing import is_digest
from xcache.wire.names import Names
from xcached.tiers import checking, describing
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.identity import Identity
from xcached.tiers.tier import UNREACHABLE, Listed, TierError, is_name
from xcached.tiers.tiers import Tiers

logger = logging.getLogger("xcached")

# Seconds that one request may ask for, and after which a page is sent that is not full.
_LONGEST_SECONDS, _PAGE_SECONDS = 60.0, 1.0
# Listings that wait for who reads them: how many, and for how long.
_MOST_LISTINGS, _IDLE_SECONDS = 8, 60.0
_AT_ONCE = 8
_T = TypeVar("_T")


class _Listing:
    """A listing in progress, between two pages."""

    def __init__(self, tier: GuardedTier, under: str, found: AsyncGenerator[Listed]) -> None:
        self.tier = tier
        self.under = under
        self.found = found
        self.since = time.monotonic()


class Manager:
    """Its methods may be called on any thread; the futures have the answers, always."""

    def __init__(self, tiers: Tiers, names: Names, namespace: str, identity: Identity) -> None:
        self._tiers = tiers
        self._names = names
        self._namespace = namespace
        self._identity = identity
        # On the loop of the tiers' thread.
        self._listings: dict[int, _Listing] = {}
        self._last_position = 0

    def check(self, message: commands.CheckRemotes) -> Future[protocol.Message]:
        """Ask tiers now, all at once."""
        return self._tiers.begin(answered(self._check(message)))

    def list(self, message: commands.AskObjects) -> Future[protocol.Message]:
        """Return some objects."""
        return self._tiers.begin(answered(self._list(message)))

    def describe(self, message: commands.DescribeEntries) -> Future[protocol.Message]:
        """Say what some entries are."""
        return self._tiers.begin(answered(self._describe(message)))

    def remove(self, message: commands.RemoveObjects) -> Future[protocol.Message]:
        """Remove objects."""
        return self._tiers.begin(answered(self._remove(message)))

    async def _check(self, message: commands.CheckRemotes) -> protocol.Message:
        seconds = _bounded(message.seconds)
        tiers = [tier for tier in self._tiers.opened if message.remote in ("", tier.name)]
        keys, *remotes = await asyncio.gather(
            self._keys(seconds), *(checking.checked(tier, self._names, seconds) for tier in tiers)
        )
        unusable = [
            checking.unusable(name, why)
            for name, why in self._tiers.unusable.items()
            if message.remote in ("", name)
        ]  # fmt: skip
        return commands.RemotesChecked([*remotes, *unusable], keys)

    async def _keys(self, seconds: float) -> checking.Facts:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.to_thread(checking.keys, self._identity, time.time())
        except TimeoutError:
            return {"signer_problem": f"the signing key cannot be used: it was not read within {seconds:g} s"}

    async def _list(self, message: commands.AskObjects) -> protocol.Message:
        seconds = _bounded(message.seconds)
        listing = self._begun(message) if not message.position else self._listings.pop(message.position, None)
        if listing is None or (listing.tier.name, listing.under) != (message.remote, message.under):
            return protocol.Refused("protocol error", "the listing is over, because it was not read for a while")
        root, objects, began = len(self._names.root), list[list[str | int | float | None]](), time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                while each := await anext(listing.found, None):
                    objects.append([each.name[root:], each.size, each.modified_at])
                    if len(objects) == protocol.MAX_LISTED or time.monotonic() - began > _PAGE_SECONDS:
                        return commands.Objects(objects, await self._kept(listing))
        except TimeoutError:
            raise TierError(UNREACHABLE, f"no answer within {seconds:g} s") from None
        return commands.Objects(objects, 0)

    def _begun(self, message: commands.AskObjects) -> _Listing:
        tier = self._named(message.remote)
        if not tier.engine.can_list:
            raise TierError("cannot list", "it cannot list what it has")
        under = self._names.root + message.under
        found = tier.engine.listed(under)
        assert isinstance(found, AsyncGenerator)  # noqa: S101 - as Bounded makes it
        return _Listing(tier, message.under, found)

    async def _kept(self, listing: _Listing) -> int:
        """Keep a listing for the next page; return its position."""
        self._last_position += 1
        position, listing.since = self._last_position, time.monotonic()
        self._listings[position] = listing
        while len(self._listings) > _MOST_LISTINGS:
            await self._listings.pop(next(iter(self._listings))).found.aclose()
        asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._forget, position)
        return position

    def _forget(self, position: int) -> None:
        if (listing := self._listings.pop(position, None)) is not None:
            self._tiers.begin(listing.found.aclose())

    async def _describe(self, message: commands.DescribeEntries) -> protocol.Message:
        tier = self._named(message.remote)
        if not all(map(is_digest, message.keys)):
            return protocol.Refused("protocol error", "that is no key")
        trusted = await asyncio.to_thread(self._identity.trusted)
        found = await _some(
            message.keys[: commands.MAX_DESCRIBED],
            message.seconds,
            lambda key: describing.described(tier, self._names, self._namespace, key, trusted),
        )
        return commands.EntriesDescribed(found)

    async def _remove(self, message: commands.RemoveObjects) -> protocol.Message:
        tier = self._named(message.remote)
        if tier.remote.readonly:
            return protocol.Refused("readonly", "the setting remote says that it is only read from")
        names = [self._names.root + name for name in message.names]
        if not all(map(is_name, names)):
            return protocol.Refused("protocol error", "that is no name of an object")
        removed = await _some(names, message.seconds, lambda name: _removed(tier, name))
        return commands.ObjectsRemoved(len(removed), sum(removed))

    def _named(self, name: str) -> GuardedTier:
        for tier in self._tiers.opened:
            if tier.name == name:
                return tier
        raise TierError("unusable", self._tiers.unusable.get(name, "the daemon has no remote store of this name"))


async def _some(names: Sequence[str], seconds: float, do: Callable[[str], Coroutine[Any, Any, _T]]) -> list[_T]:
    """Do something with each of these names from the first on, with as many as can be within so many seconds."""
    until, done = time.monotonic() + _bounded(seconds), list[_T]()
    while len(done) < len(names) and (not done or time.monotonic() < until):
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                done += await asyncio.gather(*map(do, names[len(done) : len(done) + _AT_ONCE]))
        except (TierError, TimeoutError) as error:
            if done:
                # The request for the rest is told of it.
                break
            if isinstance(error, TierError):
                raise
            raise TierError(UNREACHABLE, f"no answer within {seconds:g} s") from None
    return done


async def _removed(tier: GuardedTier, name: str) -> bool:
    """Remove an object; return whether it was there, as far as that can be known."""
    # The listing gives the name, if there is one.
    was_there = tier.engine.can_list or await tier.engine.contains(name)
    if was_there:
        await tier.engine.remove(name)
    return was_there


async def answered(work: Coroutine[Any, Any, protocol.Message]) -> protocol.Message:
    """Return the answer that some work ends in; a failure is one, too."""
    try:
        return await work
    except TierError as error:
        return protocol.Refused(error.kind, str(error))
    except XcacheError as error:
        return protocol.Refused("store error", str(error))
    except Exception:
        # A defect of an engine must not leave a person without an answer.
        logger.exception("a request about the remote stores failed")
        return protocol.Refused("store error", "the daemon's log says more")


def _bounded(seconds: float) -> float:
    return min(max(0.1, seconds), _LONGEST_SECONDS)
