"""A tier with a bound for every wait, a circuit breaker for reads and one for writes, and counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from xcache.config.remotes import Remote
from xcache.errors import UnknownKeyError, XcacheError
from xcached.tiers.room import FEW_BYTES, MOST_BYTES, Room
from xcached.tiers.tier import MISSING, TOO_LARGE, UNREACHABLE, UNTRUSTED, Tier, TierError

_T = TypeVar("_T")

logger = logging.getLogger("xcached")

# Seconds for which a breaker is open after the first failure; each further one doubles them, up to the longest.
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
# Kinds of failures that concern one object or one request, not the tier.
_OF_ONE_OBJECT = (TOO_LARGE,)
# Kinds that concern reads and writes alike.
_OF_THE_SERVER = (UNREACHABLE, UNTRUSTED, MISSING)
_SLOW = "slow"
# Entries that are not uploaded because the tier has them from others whose keys are not known here.
FOREIGN = "foreign"
_PROBE = "probe"
_MOST_REASONS, _MOST_REPLACEABLE = 100, 10_000
# Reasons that people see at once.
_MOST_TOLD = 3


class _TooLargeError(XcacheError):
    """There is such an object, with more bytes than were asked for."""


class Breaker:
    """Says whether a tier may be asked: not for a while after it failed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0
        self._until = 0.0
        self.problem = ""
        """The last failure in words; empty while all is well."""

    @property
    def is_open(self) -> bool:
        """Whether nothing may be asked now."""
        return time.monotonic() < self._until

    @property
    def seconds_left(self) -> float:
        """The seconds until something may be asked."""
        return max(0.0, self._until - time.monotonic())

    def fail(self, where: str, problem: str, longest: float = _LONGEST_SECONDS) -> None:
        """Note a failure, and be open for ``longest`` seconds at most; the first one since all was well is logged."""
        if not self.problem:
            logger.warning("%s: %s fail and are left out for now: %s", where, self._what, problem)
        self.problem = problem
        self._until = time.monotonic() + min(longest, _FIRST_SECONDS * 2.0**self._failures)
        self._failures += 1

    def succeed(self, where: str) -> None:
        """Note that all is well."""
        if self.problem:
            logger.info("%s: %s work again", where, self._what)
        self._failures, self._until, self.problem = 0, 0.0, ""


class GuardedTier:
    """A tier as the rest of the daemon uses it; its methods run on the loop of the tiers' thread."""

    def __init__(
        self,
        remote: Remote,
        engine: Tier,
        timeout: float,
        room: Room | None = None,
        longest: Callable[[], float] | None = None,
    ) -> None:
        """``timeout`` bounds each write; ``room`` is that for objects of all tiers.

        ``longest`` returns the seconds that a program waits at most, whatever its own compile is worth.
        """
        self._room = room or Room()
        self._longest = longest or (lambda: timeout)
        self.remote = remote
        self.engine = engine
        self.name = remote.public_url
        self.reads, self.writes = Breaker("reads"), Breaker("writes")
        # A tier may take objects, and yet let none be created or removed.
        self.leases = Breaker("leases")
        self.counts: Counter[str] = Counter()
        self._timeout = timeout
        self.replaceable: set[str] = set()
        """Names of objects that are of no use to anybody: what is made here takes their place."""
        # Reasons for which objects were not used, the last ones last.
        self._rejected: dict[str, None] = {}
        self._foreign: set[str] = set()
        # Whether it has let a program wait for so long, and has answered nothing since.
        self._is_silent = False
        self._probing: asyncio.Task[None] | None = None

    @property
    def may_read(self) -> bool:
        """Whether it is worth asking now: it does not fail, and has not kept silent for longer than a program waits."""
        return not self.remote.writeonly and not self.reads.problem and not self._is_silent

    @property
    def trouble(self) -> str:
        """Why it is not asked now; empty if it is, or never is."""
        if self.remote.writeonly or self.may_read:
            return ""
        return self.reads.problem or "it has not answered for long"

    @property
    def may_write(self) -> bool:
        """Whether it is worth sending something now."""
        return not self.remote.readonly and not self.writes.is_open and not self.reads.problem

    @property
    def can_lease(self) -> bool:
        """Whether leases of machines may be here: all of them take the first tier for which that is so."""
        return self.engine.can_create and not self.remote.readonly and not self.remote.writeonly

    @property
    def may_lease(self) -> bool:
        """Whether it is worth asking for a lease now: an entry made under it would also be sent."""
        return self.can_lease and self.may_read and not self.writes.problem and not self.leases.is_open

    @contextlib.asynccontextmanager
    async def fetched(self, name: str) -> AsyncIterator[bytes | None]:
        """Yield an object once there is room for it; None if there is none, or the tier fails."""
        try:
            async with self._room.small:
                yield await self._read(name, FEW_BYTES)
                return
        except _TooLargeError:
            pass
        async with self._room.large:
            yield await self.get(name, MOST_BYTES)

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object; None if there is none, or the tier fails. The caller sets the bound."""
        try:
            return await self._read(name, most)
        except _TooLargeError as error:
            self.counts[TOO_LARGE] += 1
            self.note_rejected(name, str(error))
            return None

    async def _read(self, name: str, most: int) -> bytes | None:
        self.counts["gets"] += 1
        # The time counts in which the tier is asked: a wait for room is others' doing.
        silence = asyncio.get_running_loop().call_later(self._longest(), self._note_silence)
        try:
            content = await self.engine.get(name, most)
        except TierError as error:
            if error.kind == TOO_LARGE:
                self._is_silent = False
                raise _TooLargeError(str(error)) from None
            self._note_failure(error)
            return None
        finally:
            silence.cancel()
        self._note_answer()
        if content is not None:
            self.counts["found"] += 1
            self.counts["bytes_read"] += len(content)
        return content

    def _note_silence(self) -> None:
        """Ask no more for a program, until it is known that one object takes so long, and not the tier."""
        self.counts[_SLOW] += 1
        self._is_silent = True
        self._begin_probing()

    def _note_answer(self) -> None:
        self._is_silent = False
        self.reads.succeed(self.name)

    async def put(self, name: str, content: bytes) -> bool:
        """Send an object; return whether it is there now."""
        try:
            async with asyncio.timeout(self._timeout):
                await self.engine.put(name, content)
        except TierError as error:
            self._note_failure(error, is_write=True)
            return False
        except TimeoutError:
            self.counts[_SLOW] += 1
            self.writes.fail(self.name, f"an upload took longer than {self._timeout:g} s")
            return False
        self.writes.succeed(self.name)
        self.replaceable.discard(name)
        self.counts["puts"] += 1
        self.counts["bytes_written"] += len(content)
        return True

    async def contains(self, name: str) -> bool | None:
        """Return whether there is such an object; None if the tier fails."""
        try:
            return await self.do_reading(self.engine.contains(name))
        except TierError:
            return None

    async def do_reading(self, work: Awaitable[_T]) -> _T:
        """Read something without a program that waits for it; raise TierError, which is noted, if that fails."""
        try:
            async with asyncio.timeout(self._timeout):
                return await work
        except TierError as error:
            self._note_failure(error)
            raise
        except TimeoutError:
            problem = f"no answer within {self._timeout:g} s"
            self._fail_reads(problem)
            raise TierError(UNREACHABLE, problem) from None

    async def do_for_lease(self, work: Awaitable[_T], seconds: float) -> _T:
        """Do something for a lease within these seconds; raise TierError, which is noted, if it fails."""
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            error = TierError(UNREACHABLE, f"no answer within {seconds:g} s")
        except TierError as failed:
            error = failed
        if error.kind in _OF_THE_SERVER:
            self._note_failure(error)
        elif error.kind not in _OF_ONE_OBJECT:
            self.counts[error.kind] += 1
            self.leases.fail(self.name, str(error))
        raise error

    def note_unusable(self, name: str, error: Exception) -> None:
        """Note why an object is not used. It may be replaced, unless others may trust the key that signed it."""
        self.note_rejected(name, str(error))
        # Its frames have the object, which may be a gigabyte, and would keep it until the collector comes.
        error.__traceback__ = None
        if not isinstance(error, UnknownKeyError) and len(self.replaceable) < _MOST_REPLACEABLE:
            self.replaceable.add(name)

    def note_rejected(self, name: str, reason: str) -> None:
        """Note that an object is not used; the first one for each reason is logged."""
        self.counts["rejected"] += 1
        is_new = reason not in self._rejected
        self._rejected.pop(reason, None)
        self._rejected[reason] = None
        if is_new and len(self._rejected) <= _MOST_REASONS:
            logger.warning("%s of %s is not used: %s", name, self.name, reason)
        if len(self._rejected) > _MOST_REASONS:
            del self._rejected[next(iter(self._rejected))]

    @property
    def last_rejected(self) -> str:
        """The last reasons for which objects were not used, the last one first."""
        return "; ".join([*reversed(self._rejected)][:_MOST_TOLD])

    def note_foreign(self, key: str) -> None:
        """Note that an entry is not uploaded, because the tier has it from others whose keys are not known here."""
        if key not in self._foreign and len(self._foreign) < _MOST_REPLACEABLE:
            self._foreign.add(key)
            self.counts[FOREIGN] += 1

    async def close(self) -> None:
        """Close the engine."""
        if self._probing is not None:
            self._probing.cancel()
        await self.engine.close()

    def _note_failure(self, error: TierError, *, is_write: bool = False) -> None:
        self.counts[error.kind] += 1
        if error.kind in _OF_ONE_OBJECT:
            return
        if is_write and error.kind not in _OF_THE_SERVER:
            self.writes.fail(self.name, str(error))
        else:
            self._fail_reads(str(error))

    def _fail_reads(self, problem: str) -> None:
        self.reads.fail(self.name, problem)
        self._begin_probing()

    def _begin_probing(self) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        """Find out, without a program that waits for it, when the tier answers again."""
        while self.reads.problem or self._is_silent:
            await asyncio.sleep(self.reads.seconds_left)
            try:
                async with asyncio.timeout(self._timeout):
                    await self.engine.contains(_PROBE)
            except TierError as error:
                self.reads.fail(self.name, str(error))
            except TimeoutError:
                self.reads.fail(self.name, f"no answer within {self._timeout:g} s")
            else:
                self._note_answer()
