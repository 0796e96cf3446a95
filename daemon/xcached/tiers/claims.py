"""Leases of machines on keys, in the first tier that can have them. Belongs to the tiers' thread.

A lease is an object that its holder creates, rewrites while it compiles and sends the entry, and removes. No clock is
trusted: a lease that has not changed for some time by the watch of who looks at it is dead, and is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from xcache.errors import XcacheError
from xcache.wire.signatures import PrivateKey
from xcached.tiers import lease_object
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.lease_object import Found, Held
from xcached.tiers.tier import TierError

_T = TypeVar("_T")

logger = logging.getLogger("xcached")

# The decision about a key: this machine has the lease; the entry is here now; it compiles without a lease.
TAKEN, ARRIVED, ALONE = "taken", "arrived", "alone"
# How a lease ends: the entry may be stored; none will come; somebody else may compile.
STORED, FAILED, RELEASED = "stored", "failed", "released"
_FREE = "free"


class Periods(NamedTuple):
    """Seconds."""

    # Between changes of a lease by its holder, and without a change until it is dead.
    beat: float = 2.0
    dead: float = 8.0
    # Between looks at another machine's lease: the first, and the longest.
    first_look: float = 0.2
    longest_look: float = 1.0
    # After a dead lease was replaced, until it shows who of several has done so.
    settling: float = 0.5
    # For which it is said that a compile is over and no entry comes of it.
    farewell: float = 4.0


PERIODS = Periods()


class Compile(NamedTuple):
    """A compile: its key, its client, and the functions to call, which run on the tiers' thread."""

    key: str
    # The digest of an entry that is of no use.
    unusable: str
    pid: int
    program: str
    expected: float
    on_held: Callable[[Held], object]
    on_decided: Callable[[str], object]


class _Claim:
    def __init__(self, compile_: Compile) -> None:
        self.compile = compile_
        self.since = time.monotonic()
        self.beats = 0
        self.signer: PrivateKey | None = None
        # The last beat of each machine that a claim waited for, and whether a dead lease was replaced.
        self.seen: dict[str, int] = {}
        self.has_replaced = False
        # Whether the lease may be there as this machine's.
        self.is_sent = False
        self.how = ""
        self.ended = asyncio.Event()
        # Nothing is to be waited for any more: neither for what is being sent, nor that others see the end.
        self.hurried = asyncio.Event()
        self.is_sending = False
        self.task: asyncio.Task[None] | None = None

    def end(self, how: str) -> None:
        if not self.ended.is_set():
            self.how = how
            self.ended.set()


class Claims:
    """The leases that this machine has or wants, one for each key."""

    def __init__(
        self,
        tier: GuardedTier,
        lease_name: Callable[[str], str],
        entry_name: Callable[[str], str],
        fetch: Callable[[str, str], Coroutine[Any, Any, bool]],
        send: Callable[[str], Coroutine[Any, Any, bool]],
        signer: Callable[[], PrivateKey | None],
        read: Callable[[bytes, str], Found | None],
        longest: Callable[[], float],
        periods: Periods | None = None,
    ) -> None:
        """``fetch`` keeps an entry of the tier here if it is of use; ``send`` returns whether one is there now.

        ``signer`` returns the key that signs here, and may take a while or raise; ``read`` returns the lease that an
        object of a name is, if it is one. ``longest`` returns the seconds after which a tier counts as failing that has
        not answered.
        """
        self._tier = tier
        self._lease_name = lease_name
        self._entry_name = entry_name
        self._fetch = fetch
        self._send = send
        self._signer = signer
        self._reading = read
        self._longest = longest
        self._periods = periods or PERIODS
        self._holder = secrets.token_hex(8)
        self._host = socket.gethostname()
        self._claims: dict[str, _Claim] = {}

    def begin(self, compile_: Compile) -> None:
        """Try to take a lease; wait for another machine that has it."""
        before = self._claims.get(compile_.key)
        claim = self._claims[compile_.key] = _Claim(compile_)
        claim.task = asyncio.get_running_loop().create_task(self._follow(claim, before))

    def end(self, key: str, how: str) -> None:
        """End a lease, or the wait for it."""
        if (claim := self._claims.get(key)) is not None:
            claim.end(how)

    async def close(self) -> None:
        """Give all leases back."""
        claims = [*self._claims.values()]
        for claim in claims:
            claim.end(RELEASED)
            # The entry that is being sent stays queued, and the next machine need not wait for it.
            claim.hurried.set()
        tasks = {claim.task for claim in claims if claim.task is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=self._longest())

    async def _follow(self, claim: _Claim, before: _Claim | None) -> None:
        decided = ALONE
        try:
            if await self._is_over(before):
                decided = await self._decide(claim)
        except (XcacheError, TimeoutError) as error:
            logger.debug("no lease is taken on %s: %s", claim.compile.key[:12], error)
        except Exception:
            # A defect here must not keep the clients that wait for a decision: they compile.
            logger.exception("the lease of another machine on %s cannot be waited for", claim.compile.key[:12])
        try:
            claim.compile.on_decided(decided)
            if claim.is_sent:
                if decided != TAKEN:
                    claim.end(RELEASED)
                await self._hold(claim)
        except TierError as error:
            logger.debug("the lease on %s is left to others: %s", claim.compile.key[:12], error)
        finally:
            if self._claims.get(claim.compile.key) is claim:
                del self._claims[claim.compile.key]

    async def _is_over(self, before: _Claim | None) -> bool:
        """Return whether an earlier lease on the key is given back by now."""
        if before is None or before.task is None:
            return True
        if before.is_sending:
            # The client that asks now has no use for that entry.
            return False
        before.hurried.set()
        await asyncio.wait({before.task}, timeout=self._longest())
        return before.task.done()

    async def _decide(self, claim: _Claim) -> str:
        """Return what is decided; ALONE if nobody wants to know any more."""
        must_settle = False
        claim.signer = await asyncio.wait_for(asyncio.to_thread(self._signer), self._longest())
        while not claim.ended.is_set():
            if not self._tier.may_lease:
                return ALONE
            try:
                created = await self._create(claim, must_settle=must_settle)
            except TierError:
                # Perhaps it is there all the same, and others wait: what is compiled here now is for them, too.
                return TAKEN
            if created:
                # Its last holder may have sent the entry and removed the lease just before.
                return await self._arrived(claim) or TAKEN
            decided, must_settle = await self._watch(claim)
            if decided != _FREE:
                return decided
        return ALONE

    async def _create(self, claim: _Claim, *, must_settle: bool) -> bool:
        """Return whether the lease is this machine's."""
        claim.is_sent, claim.beats, claim.since = True, 1, time.monotonic()
        name = self._lease_name(claim.compile.key)
        created = await self._do(self._tier.engine.create(name, self._object(claim)))
        self._tier.leases.succeed(self._tier.name)
        if created and must_settle:
            # Another one that found it dead, too, may remove this one.
            await asyncio.sleep(self._periods.settling)
        # The library's second try may have met what its first has written, or the lease may be left from before.
        is_ours = (created and not must_settle) or await self._is_ours(claim)
        claim.is_sent = is_ours
        return is_ours

    async def _watch(self, claim: _Claim) -> tuple[str, bool]:
        """Wait for another machine; return what is decided, and whether its lease was dead."""
        changed_at, awaited = time.monotonic(), ""
        pause = self._periods.first_look
        name = self._lease_name(claim.compile.key)
        while not claim.ended.is_set():
            if not self._tier.may_lease:
                return ALONE, False
            found, arrived = await asyncio.gather(self._read(claim), self._arrived(claim))
            if arrived:
                return arrived, False
            if found is None:
                return _FREE, False
            lease, now = self._reading(found, name), time.monotonic()
            if lease is not None and lease.why_not:
                # Its entry would be of no use.
                return ALONE, False
            is_over = lease is not None and (lease.held.ended or not lease.held.is_recent(time.time()))
            if lease is not None and is_over and lease.held.holder == awaited:
                return ALONE, False
            # Only what its holder has signed anew keeps anybody: another may write there, or what was signed before.
            if lease is not None and not is_over and lease.held.beats > claim.seen.get(lease.held.holder, 0):
                claim.seen[lease.held.holder], changed_at = lease.held.beats, now
                awaited = lease.held.holder
                claim.compile.on_held(lease.held)
            elif claim.has_replaced and not awaited:
                return ALONE, False
            elif is_over or now - changed_at >= self._periods.dead:
                logger.info("a lease of another machine on %s is over, or has not changed", claim.compile.key[:12])
                await self._do(self._tier.engine.remove(name))
                claim.has_replaced = True
                return _FREE, True
            await self._pause(claim, pause)
            pause = min(self._periods.longest_look, 1.5 * pause)
        return ALONE, False

    async def _hold(self, claim: _Claim) -> None:
        """Keep the lease as long as it is wanted, and remove it."""
        while not await self._pause(claim, self._periods.beat):
            if not await self._beat(claim):
                return
        is_sent = claim.how == STORED and await self._is_sent(claim)
        name = self._lease_name(claim.compile.key)
        if not await self._is_ours(claim):
            return
        if claim.how != RELEASED and not is_sent and not claim.hurried.is_set():
            await self._do(self._tier.engine.put(name, self._object(claim, ended=True)))
            await self._wait(claim.hurried, self._periods.farewell)
            if not await self._is_ours(claim):
                return
        await self._do(self._tier.engine.remove(name))

    async def _is_sent(self, claim: _Claim) -> bool:
        """Send the entry; return whether the tier has it then."""
        claim.is_sending = True
        loop = asyncio.get_running_loop()
        sending, hurried = loop.create_task(self._send(claim.compile.key)), loop.create_task(claim.hurried.wait())
        try:
            while not sending.done() and not hurried.done():
                waited = await asyncio.wait(
                    {sending, hurried}, timeout=self._periods.beat, return_when=asyncio.FIRST_COMPLETED
                )
                if not waited[0]:
                    await self._beat(claim)
            return sending.done() and sending.result()
        finally:
            claim.is_sending = False
            sending.cancel()
            hurried.cancel()

    async def _beat(self, claim: _Claim) -> bool:
        """Change the lease; return whether it is still this machine's, as far as is known."""
        name = self._lease_name(claim.compile.key)
        try:
            # Also while the tier fails, and not noted: else others take the lease of a machine that is there again.
            async with asyncio.timeout(self._longest()):
                if not self._shows_ours(await self._tier.engine.get(name, lease_object.MOST_BYTES), name):
                    return False
                claim.beats += 1
                await self._tier.engine.put(name, self._object(claim))
        except (TierError, TimeoutError):
            pass
        return True

    async def _arrived(self, claim: _Claim) -> str:
        """Return "" if there is no entry; else fetch it, and return what that decides."""
        key = claim.compile.key
        if not await self._do(self._tier.engine.contains(self._entry_name(key))):
            return ""
        fetching = asyncio.get_running_loop().create_task(self._fetch(key, claim.compile.unusable))
        # A client that has waited long for a compile waits as long for its entry, which may be large.
        await asyncio.wait({fetching}, timeout=max(self._longest(), time.monotonic() - claim.since))
        if not fetching.done():
            return ALONE
        return ARRIVED if fetching.result() else ALONE

    async def _is_ours(self, claim: _Claim) -> bool:
        return self._shows_ours(await self._read(claim), self._lease_name(claim.compile.key))

    def _shows_ours(self, content: bytes | None, name: str) -> bool:
        # A machine need not trust its own key.
        found = None if content is None else self._reading(content, name)
        return found is not None and found.held.holder == self._holder

    async def _read(self, claim: _Claim) -> bytes | None:
        name = self._lease_name(claim.compile.key)
        return await self._do(self._tier.engine.get(name, lease_object.MOST_BYTES))

    async def _do(self, work: Awaitable[_T]) -> _T:
        return await self._tier.do_for_lease(work, self._longest())

    async def _pause(self, claim: _Claim, seconds: float) -> bool:
        """Return whether the lease has ended meanwhile."""
        return await self._wait(claim.ended, seconds)

    async def _wait(self, event: asyncio.Event, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return False

    def _object(self, claim: _Claim, *, ended: bool = False) -> bytes:
        about, seconds = claim.compile, round(time.monotonic() - claim.since, 3)
        held = Held(
            self._holder, claim.beats, self._host, about.pid, about.program, seconds, about.expected, ended, time.time()
        )  # fmt: skip
        return held.encoded(self._lease_name(about.key), claim.signer)
