"""The remote tiers of a daemon: a thread with an event loop asks them, and sends what is queued."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from xcache.config.remotes import Remote
from xcache.errors import XcacheError
from xcache.wire import ledger, protocol
from xcache.wire.names import Names
from xcached.tiers.claims import ALONE, Claims, Compile
from xcached.tiers.engines import open_tier
from xcached.tiers.guarded import FOREIGN, GuardedTier
from xcached.tiers.keeping import Keeper
from xcached.tiers.room import Room
from xcached.tiers.sending import Sender

logger = logging.getLogger("xcached")

_T = TypeVar("_T")

# Seconds that an engine may take for one request.
_ENGINE_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
# Counts that people see.
_SHOWN = ("gets", "found", "rejected", "bytes_read", "puts", "bytes_written", FOREIGN)


# Keeps what a tier had here.
_Keep = Callable[..., Coroutine[Any, Any, bool]]
_Ended = Callable[[], object]


class Tiers:
    """The tiers in the order of the setting. Its methods may be called on any thread."""

    def __init__(
        self, remotes: Sequence[Remote], names: Names, keeper: Keeper, sender: Sender, longest: Callable[[], float]
    ) -> None:
        """``longest`` returns the setting for how long a program waits for the tiers."""
        self._remotes = remotes
        self._names = names
        self._keeper = keeper
        self._sender = sender
        self._longest = longest
        self.opened: list[GuardedTier] = []
        """Those that can be used; others are in ``unusable``, by address, with the reason."""
        # Questions that come earlier wait until the engines are imported.
        self._is_open = False
        self.unusable: dict[str, str] = {}
        # In the first tier that can have leases; None if there is none.
        self._claims: Claims | None = None
        self._leasing: GuardedTier | None = None
        self._room = Room()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="xcached-tiers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def may_have_some(self) -> bool:
        """Whether it is worth asking now."""
        return not self._is_open or any(tier.may_read for tier in self.opened)

    @property
    def trouble(self) -> str:
        """The trouble of the first tier that has any, as a cause of a miss."""
        told = [f"{tier.name}: {tier.trouble}" for tier in self.opened if tier.trouble]
        told += [f"{name}: {why}" for name, why in self.unusable.items()]
        return ledger.with_detail("remote trouble", told[0]) if told else ""

    def fetch(self, key: str, unwanted: str, seconds: float, ended: _Ended) -> concurrent.futures.Future[str]:
        """Look an entry up, and keep it here if a tier has it; the future gets a cause of the miss, or "".

        It is "rejected" or "remote trouble". The result comes within these seconds; a tier that answers later is
        listened to all the same, and ``ended`` is called when nothing of that goes on. An entry of the digest
        ``unwanted`` is none.
        """
        return self.begin(self._fetch(self._names.entry(key), seconds, ended, self._keeper.keep_entry, key, unwanted))

    def fetch_history(
        self, program: str, arguments: str, seconds: float, ended: _Ended
    ) -> concurrent.futures.Future[str]:
        """Look up what a program wanted elsewhere, and keep it here with its entries, as ``fetch`` does."""
        name = self._names.run(program, arguments)
        return self.begin(self._fetch(name, seconds, ended, self._keeper.keep_run, program, arguments))

    def may_lease(self, expected: float | None) -> bool:
        """Return whether it is worth asking for the lease on a key that may take so long to compile."""
        if not self._is_open:
            return any(not remote.readonly and not remote.writeonly for remote in self._remotes)
        tier = self._leasing
        return tier is not None and tier.may_lease and (expected is None or expected >= tier.remote.no_upload_below)

    def begin_lease(self, wanted: Compile) -> None:
        """Try to take the lease on a key among machines; ``end_lease`` must follow once it is taken."""
        self._loop.call_soon_threadsafe(self._begin_lease, wanted)

    def end_lease(self, key: str, how: str) -> None:
        """End a lease among machines, or the wait for it."""
        self._loop.call_soon_threadsafe(self._end_lease, key, how)

    def wake(self) -> None:
        """Have queued uploads looked at."""
        self._loop.call_soon_threadsafe(self._sender.wake)

    def describe(self) -> list[dict[str, protocol.Scalar]]:
        """Return the state of each tier for people."""
        opened = {tier.name: tier for tier in self.opened}
        shown: list[dict[str, protocol.Scalar]] = []
        for name in (remote.public_url for remote in self._remotes):
            # One that is just being opened has had no trouble.
            tier, why = opened.get(name), self.unusable.get(name, "")
            problem = why if tier is None else tier.trouble or tier.writes.problem
            state = "unusable" if why else "failing" if problem else "ok"
            told: dict[str, protocol.Scalar] = {"name": name, "state": state, "problem": problem}
            told["useless"] = self._keeper.why_useless(tier) if tier and not tier.remote.writeonly else ""
            told["last_rejected"] = tier.last_rejected[: protocol.MAX_NAME] if tier else ""
            shown.append(told | {each: tier.counts[each] if tier else 0 for each in _SHOWN})
        return shown

    def close(self) -> None:
        """End the thread; what is queued stays queued."""
        if self._thread.is_alive():
            if self._claims is not None:
                with contextlib.suppress(TimeoutError):
                    asyncio.run_coroutine_threadsafe(self._claims.close(), self._loop).result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)

    def begin(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Have something done on the tiers' thread, after they were opened."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        for remote in self._remotes:
            try:
                engine = open_tier(remote.url, _ENGINE_SECONDS)
            except XcacheError as error:
                logger.error("%s is not used: %s", remote.public_url, error)
                self.unusable[remote.public_url] = str(error)
            else:
                self.opened.append(GuardedTier(remote, engine, _ENGINE_SECONDS, self._room, self._longest))
        self._leasing = next((tier for tier in self.opened if tier.can_lease), None)
        if self._leasing is not None:
            self._claims = self._claims_in(self._leasing)
        self._is_open = True
        sending = [self._loop.create_task(self._sender.run(tier)) for tier in self.opened if not tier.remote.readonly]
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end(sending))

    async def _end(self, sending: Sequence[asyncio.Task[None]]) -> None:
        """Stop all that goes on, and close the engines; what does not end in time is left."""
        tasks = {*sending, *asyncio.all_tasks()} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(tier.close() for tier in self.opened), *tasks, return_exceptions=True)

    def _begin_lease(self, wanted: Compile) -> None:
        if self._claims is None:
            wanted.on_decided(ALONE)
        else:
            self._claims.begin(wanted)

    def _end_lease(self, key: str, how: str) -> None:
        if self._claims is not None:
            self._claims.end(key, how)

    def _claims_in(self, tier: GuardedTier) -> Claims:
        names = self._names

        async def fetch(key: str, unusable: str) -> bool:
            return await self._why_not_kept(tier, names.entry(key), self._keeper.keep_entry, key, unusable) is None

        return Claims(
            tier,
            names.lease,
            names.entry,
            fetch=fetch,
            send=lambda key: self._sender.send_now(tier, key),
            signer=lambda: self._sender.signer(tier),
            read=lambda content, name: self._keeper.lease_in(tier, content, name),
            longest=self._longest,
        )

    async def _fetch(self, name: str, seconds: float, ended: _Ended, keep: _Keep, *wanted: str) -> str:
        reading: list[asyncio.Task[str | None]] = []
        try:
            return await self._first_of(name, seconds, reading, keep, *wanted)
        finally:
            asyncio.gather(*reading, return_exceptions=True).add_done_callback(lambda _: ended())

    async def _first_of(
        self, name: str, seconds: float, all_reading: list[asyncio.Task[str | None]], keep: _Keep, *wanted: str
    ) -> str:
        until, rejected, not_asked = self._loop.time() + seconds, "", ""
        for tier in self.opened:
            left = until - self._loop.time()
            if not tier.may_read or left <= 0:
                continue
            if useless := self._keeper.why_useless(tier):
                not_asked = not_asked or ledger.with_detail("remote trouble", f"{tier.name}: {useless}")
                continue
            reading = self._loop.create_task(self._why_not_kept(tier, name, keep, *wanted))
            all_reading.append(reading)
            await asyncio.wait({reading}, timeout=left)
            if not reading.done():
                not_asked = not_asked or ledger.with_detail(
                    "remote trouble", f"{tier.name}: no answer within {seconds:g} s"
                )
            elif (failed := reading.result()) is None:
                return ""
            elif failed and not rejected:
                rejected = ledger.with_detail("rejected", f"{tier.name}: {failed}")
        return rejected or not_asked or self.trouble

    async def _why_not_kept(self, tier: GuardedTier, name: str, keep: _Keep, *wanted: str) -> str | None:
        """Return None if a tier has an object that may be used and is now kept here; else why not, if it has one."""
        async with tier.fetched(name) as content:
            if content is None:
                return ""
            try:
                return None if await keep(tier, content, *wanted) else ""
            except XcacheError as error:
                tier.note_unusable(name, error)
                return str(error)
