"""Leases on keys, so that one client compiles while the others wait for it. Belongs to the serving thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from xcache.wire import protocol
from xcached.caller import Caller, Later, Reply
from xcached.requests.compiles import Lease, Waiter
from xcached.requests.fleet import ARRIVED, FAILED, RELEASED, STORED, Elsewhere, Fleet
from xcached.requests.lease_holders import LeaseHolders

if TYPE_CHECKING:
    from xcached.tiers.lease_object import Held

logger = logging.getLogger("xcached")

# Seconds between heartbeats to waiting clients, which give the daemon up after a second of silence.
_HEARTBEAT_SECONDS = 0.25
# Seconds for answers to those who waited for a key, before the requests of others have a turn.
_SLICE_SECONDS = 0.005
# A client waits at most this many times the last compile's time, and this many seconds more.
_WAIT_FACTOR, _WAIT_EXTRA_SECONDS = 3.0, 5.0
_MOST_SHOWN = 200
# Leases and waits of one user: more than all of a user's programs need at once. Beyond it clients just compile.
_MOST_HELD, _MOST_WAITING = 10_000, 2000


class _CallerLeases:
    """The leases and waits of one connection."""

    def __init__(self) -> None:
        self.held: dict[Lease, None] = {}
        self.waits: dict[Waiter, None] = {}


class Leases:
    """Grants each key to one client at a time, among clients that trust each other."""

    def __init__(
        self,
        trusts: Callable[[int, int], bool],
        look_up: Callable[[Caller, protocol.Get], Reply | None],
        expected: Callable[[Caller, protocol.Get], float | None],
        call_later: Callable[[float, Callable[[], None]], object],
        fleet: Fleet | None = None,
    ) -> None:
        """``trusts(reader, writer)``; ``look_up`` finds a stored entry; ``expected`` returns compile times."""
        self._trusts = trusts
        self._look_up = look_up
        self._expected = expected
        self._call_later = call_later
        self._fleet = fleet
        self._by_key: dict[str, list[Lease]] = {}
        # The same leases by holder's user, oldest first.
        self._of_user: dict[int, dict[Lease, None]] = {}
        self._of_caller: dict[Caller, _CallerLeases] = {}
        # Leases that have waiters, and the number of each user's waits.
        self._waited_for: dict[Lease, None] = {}
        self._wait_counts: Counter[int] = Counter()
        self._holders = LeaseHolders()
        self._ticking = self._closed = False
        self._last_number = 0

    def __len__(self) -> int:
        # A list is one step, so that another thread may ask.
        return sum(map(len, list(self._of_user.values())))

    @property
    def waiting(self) -> int:
        """The number of clients that wait; any thread may ask."""
        return sum(list(self._wait_counts.values()))

    def ask(
        self, caller: Caller, wanted: protocol.Get, explain: Callable[[int], protocol.Missing] = protocol.Missing
    ) -> Reply | Later:
        """Grant the lease, or queue behind its holder; ``explain`` returns the answer that grants it."""
        # "not >", because NaN must not wait either.
        if not wanted.wait > 0 or self._closed:
            return Reply(explain(0))
        lease = self._lease_to_wait_for(caller, wanted.key)
        may_wait = self._wait_counts[caller.uid] < _MOST_WAITING
        if lease is not None and may_wait:
            return self._wait(lease, caller, wanted)
        if lease is not None or len(self._of_user.get(caller.uid, ())) >= _MOST_HELD:
            return Reply(explain(0))
        if self._fleet is not None and may_wait:
            expected = self._expected(caller, wanted)
            if self._fleet.takes(caller, expected):
                return self._ask_fleet(self._fleet, caller, wanted, expected, explain(0))
        return Reply(explain(self._grant(caller, wanted).number))

    def _ask_fleet(
        self,
        fleet: Fleet,
        caller: Caller,
        wanted: protocol.Get,
        expected: float | None,
        missing: protocol.Missing,
    ) -> Later:
        """Have all clients wait as for another one's compile until the fleet has decided who compiles."""
        lease = self._grant(Elsewhere(caller.uid), wanted)
        answer, since = self._wait(lease, caller, wanted, missing), time.monotonic()

        def decide(decided: str) -> None:
            if decided != ARRIVED:
                # The time went into asking, or into a compile that came to nothing.
                fleet.note_wait(caller, time.monotonic() - since)
            self._go_on(lease, decided)

        fleet.begin(caller, wanted, expected, lambda held: self._learn(lease, held), decide)
        return answer

    def _learn(self, lease: Lease, held: Held) -> None:
        """Note which machine compiles, and for how long it is worth waiting."""
        if lease.elsewhere is not None and lease.is_current:
            lease.elsewhere.learn(held)
            lease.since = time.monotonic() - held.seconds
            for waiter in lease.waiters:
                waiter.until = min(waiter.until, waiter.since + _longest_wait(held.expected or None))

    def _go_on(self, lease: Lease, decided: str) -> None:
        """Grant a lease here, or answer with the entry that another machine has made."""
        if not lease.is_current:
            return
        if decided != ARRIVED:
            self._pass_on(lease)
            return
        self._end(lease)
        self._work_off(self._settle([*self._dequeue(lease)], []))

    def settle(self, key: str, writer: int) -> None:
        """Answer the clients that waited for a user's entry, now that it is stored or known not to be cacheable."""
        waiting = [waiter for lease in self._end_all(key, writer, STORED) for waiter in self._dequeue(lease)]
        # A client waiting for another user's compile may get this entry; if not, it waits on.
        others = [
            (waiter, lease)
            for lease in self._by_key.get(key, ())
            for waiter in lease.waiters
            if self._trusts(waiter.caller.uid, writer)
        ]
        self._work_off(self._settle(waiting, others))

    def _settle(self, waiting: list[Waiter], others: list[tuple[Waiter, Lease]]) -> Iterator[None]:
        """Give the answers one after the other; yield after each."""
        for waiter in waiting:
            waiter.answer.give(self._found_for(waiter) or Reply(protocol.Missing(0)))
            yield
        for waiter, lease in others:
            # Sending an answer may reveal that other clients have gone.
            if waiter.lease is lease and (found := self._found_for(waiter)) is not None:
                self._end_wait(waiter)
                waiter.answer.give(found)
            yield

    def _work_off(self, steps: Iterator[None]) -> None:
        """Take steps for a while, and the rest after the requests of others: a thousand clients may wait for a key."""
        until = time.monotonic() + _SLICE_SECONDS
        for _ in steps:
            if time.monotonic() >= until:
                self._call_later(0.0, lambda: self._work_off(steps))
                return

    def _found_for(self, waiter: Waiter) -> Reply | None:
        try:
            # A new entry may consist of the same bytes that the client found unusable before.
            return self._look_up(waiter.caller, waiter.wanted._replace(unusable=""))
        except Exception:
            # A failure for one waiter must not keep the others from their answers.
            logger.exception("the entry of a finished compile could not be looked up")
            return None

    def fail(self, key: str, writer: int) -> None:
        """Tell all waiters to compile: a user's executable could not be stored, and theirs could not be either."""
        for lease in self._end_all(key, writer, FAILED):
            _tell_to_compile(self._dequeue(lease))

    def release(self, caller: Caller, key: str, number: int) -> None:
        """Pass the lease on, for a holder that gave up; any connection of its process may say so."""
        for lease in self._by_key.get(key, ()):
            if lease.number == number and (lease.holder.pid, lease.holder.uid) == (caller.pid, caller.uid):
                self._pass_on(lease)
                return

    def leave(self, caller: Caller) -> None:
        """End the leases and waits of a connection that has ended."""
        mine = self._of_caller.get(caller)
        if mine is None:
            return
        for waiter in list(mine.waits):
            self._end_wait(waiter)
        for lease in list(mine.held):
            self._pass_on(lease)

    def close(self) -> None:
        """Tell all waiters to compile, and grant no more, because the daemon is leaving."""
        self._closed = True
        # Sending an answer may reveal that a client has gone, and pass its leases on.
        while self._of_user:
            lease = next(lease for leases in self._of_user.values() for lease in leases)
            self._end(lease)
            self._end_fleets(lease.key, RELEASED)
            _tell_to_compile(self._dequeue(lease))

    def compiles(self, visible: Callable[[int], bool]) -> list[dict[str, protocol.Scalar]]:
        """Return the compiles in progress of the users that are ``visible``, the longest first."""
        now = time.monotonic()
        return [
            {
                "key": lease.key,
                "module_name": lease.module_name,
                "pid": lease.holder.pid,
                "program": lease.holder.program,
                "host": lease.elsewhere.host if lease.elsewhere else "",
                "seconds": round(now - lease.since, 3),
                "waiting": len(lease.waiters),
            }
            for lease in itertools.islice(self.held(visible), _MOST_SHOWN)
        ]

    def held(self, visible: Callable[[int], bool]) -> Iterator[Lease]:
        """Yield the leases of the users that are ``visible``, the oldest first."""
        seen = [leases.keys() for uid, leases in self._of_user.items() if visible(uid)]
        return heapq.merge(*seen, key=lambda lease: lease.number)

    def waits(self, visible: Callable[[int], bool]) -> Iterator[Waiter]:
        """Yield the waits of the users that are ``visible``."""
        for lease in self._waited_for:
            yield from (waiter for waiter in lease.waiters if visible(waiter.caller.uid))

    def counts(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of leases and waits of each user that has any."""
        users = {*self._of_user, *self._wait_counts}
        return {uid: (len(self._of_user.get(uid, ())), self._wait_counts[uid]) for uid in users}

    def _grant(self, caller: Caller, wanted: protocol.Get) -> Lease:
        self._last_number += 1
        lease = Lease(self._last_number, wanted, caller)
        self._by_key.setdefault(wanted.key, []).append(lease)
        self._of_user.setdefault(caller.uid, {})[lease] = None
        self._of_caller.setdefault(caller, _CallerLeases()).held[lease] = None
        return lease

    def _wait(
        self, lease: Lease, caller: Caller, wanted: protocol.Get, missing: protocol.Missing | None = None
    ) -> Later:
        elsewhere = lease.elsewhere
        longest = _longest_wait(self._expected(caller, wanted))
        if elsewhere is not None:
            longest = min(longest, _longest_wait(elsewhere.expected or None))
        waiter = Waiter(caller, wanted, time.monotonic() + min(wanted.wait, longest), missing)
        self._wait_counts[caller.uid] += 1
        self._of_caller.setdefault(caller, _CallerLeases()).waits[waiter] = None
        self._enqueue(waiter, lease)
        if elsewhere is None or elsewhere.host:
            # Until another machine is known to compile, there is mostly nothing to wait for.
            lease.tell(waiter, time.monotonic())
        if not self._ticking:
            self._ticking = True
            self._call_later(_HEARTBEAT_SECONDS, self._tick)
        return waiter.answer

    def _enqueue(self, waiter: Waiter, lease: Lease) -> None:
        waiter.lease = lease
        lease.waiters[waiter] = None
        self._waited_for[lease] = None

    def _end_wait(self, waiter: Waiter) -> None:
        """End a wait."""
        lease, waiter.lease = waiter.lease, None
        if lease is not None:
            lease.waiters.pop(waiter, None)
            if not lease.waiters:
                self._waited_for.pop(lease, None)
                if lease.elsewhere is not None and lease.is_current:
                    self._end(lease)
                    self._end_fleets(lease.key, RELEASED)
        mine = self._of_caller.get(waiter.caller)
        if mine is None or waiter not in mine.waits:
            return
        del mine.waits[waiter]
        self._wait_counts[waiter.caller.uid] -= 1
        if not self._wait_counts[waiter.caller.uid]:
            del self._wait_counts[waiter.caller.uid]
        self._forget_idle(waiter.caller, mine)

    def _forget_idle(self, caller: Caller, mine: _CallerLeases) -> None:
        if not mine.held and not mine.waits:
            del self._of_caller[caller]

    def _dequeue(self, lease: Lease) -> Iterator[Waiter]:
        """Yield the waiters of a lease that has ended, as long as each is still waiting."""
        for waiter in list(lease.waiters):
            # Answering one waiter may reveal that others have gone.
            if waiter.lease is lease:
                self._end_wait(waiter)
                yield waiter

    def _end_all(self, key: str, holder: int, how: str) -> list[Lease]:
        """End and return a user's leases on a key."""
        taken = [lease for lease in self._by_key.get(key, ()) if lease.holder.uid == holder]
        for lease in taken:
            self._end(lease)
        self._end_fleets(key, how)
        return taken

    def _end_fleets(self, key: str, how: str) -> None:
        """End the lease that other machines see, unless it is still for somebody here."""
        fleet = self._fleet
        if fleet is not None and not any(fleet.may_share(lease.holder.uid) for lease in self._by_key.get(key, ())):
            fleet.end(key, how)

    def _end(self, lease: Lease) -> None:
        lease.is_current = False
        self._waited_for.pop(lease, None)
        leases = self._by_key[lease.key]
        leases.remove(lease)
        if not leases:
            del self._by_key[lease.key]
        theirs = self._of_user[lease.holder.uid]
        del theirs[lease]
        if not theirs:
            del self._of_user[lease.holder.uid]
        mine = self._of_caller[lease.holder]
        del mine.held[lease]
        self._forget_idle(lease.holder, mine)

    def _pass_on(self, lease: Lease) -> None:
        """Grant the lease to the first waiter. A waiter that does not trust that user gets a lease of its own."""
        if not lease.is_current:
            return
        self._end(lease)
        granted = []
        for waiter in list(lease.waiters):
            following = self._lease_to_wait_for(waiter.caller, lease.key)
            if following is not None:
                self._enqueue(waiter, following)
            else:
                number = self._grant(waiter.caller, waiter.wanted).number
                missing = protocol.Missing(number)
                if waiter.missing is not None and lease.elsewhere is not None and not lease.elsewhere.host:
                    # It has waited for nobody's compile.
                    missing = waiter.missing._replace(lease=number)
                granted.append((waiter.answer, missing))
                self._end_wait(waiter)
        lease.waiters.clear()
        self._end_fleets(lease.key, RELEASED)
        # Answer last: it may reveal that a client has gone, whose new lease is then passed on in turn.
        for answer, missing in granted:
            answer.give(Reply(missing))

    def _lease_to_wait_for(self, caller: Caller, key: str) -> Lease | None:
        """Return the lease that a client would wait for."""
        trusted = (lease for lease in self._by_key.get(key, ()) if self._trusts(caller.uid, lease.holder.uid))
        return next(trusted, None)

    def _tick(self) -> None:
        now = time.monotonic()
        waited_for = list(self._waited_for)
        lost = self._holders.look({lease.holder.pid for lease in waited_for if not lease.elsewhere}, now)
        for lease in waited_for:
            for waiter in [waiter for waiter in lease.waiters if now >= waiter.until]:
                # Sending an answer may reveal that another client has gone, and end its lease.
                if waiter.lease is lease:
                    if self._fleet is not None and lease.elsewhere:
                        self._fleet.note_wait(waiter.caller, now - waiter.since)
                    self._end_wait(waiter)
                    _tell_to_compile([waiter])
            if not lease.is_current or not lease.waiters:
                continue
            if not lease.elsewhere and (why := lost.get(lease.holder.pid)):
                logger.info("process %d %s; the next one compiles %s", lease.holder.pid, why, lease.module_name)
                self._pass_on(lease)
            else:
                for waiter in list(lease.waiters):
                    lease.tell(waiter, now)
        self._ticking = bool(self._waited_for)
        if self._ticking:
            self._call_later(_HEARTBEAT_SECONDS, self._tick)


def _longest_wait(expected: float | None) -> float:
    return math.inf if expected is None else _WAIT_FACTOR * expected + _WAIT_EXTRA_SECONDS


def _tell_to_compile(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.answer.give(Reply(protocol.Missing(0)))
