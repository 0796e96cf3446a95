"""Compile once: who compiles what at the moment, and who waits for it. All of it belongs to the thread that serves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

from xcache import protocol
from xcached.caller import Caller, Later, Reply

logger = logging.getLogger("xcached")

# How often those who wait hear something; they take a daemon for lost that says nothing for a second.
_TELL_EVERY = 0.25
# How much longer than last time a compile may take before nobody waits for it any more.
_TIMES_EXPECTED, _SECONDS_MORE = 3.0, 5.0
# A holder that the kernel has called stopped for so long does not compile.
_STOPPED_SECONDS = 1.0
_MOST_SHOWN = 200
# There may be many leases, and names as long as a message can hold.
_LONGEST_NAME = 500
# Of one connection: more than a program compiles and has not stored yet.
_MOST_HELD = 10_000


class Waiter:
    """One who waits for somebody else's compile."""

    def __init__(self, caller: Caller, wanted: protocol.Get, answer: Later, until: float) -> None:
        self.caller = caller
        self.wanted = wanted
        self.answer = answer
        self.until = until


class Lease:
    """One compile, by the caller who was told to do it, and those who wait for it in the order they came."""

    def __init__(self, number: int, wanted: protocol.Get, holder: Caller) -> None:
        self.number = number
        self.key = wanted.key
        self.module_name = wanted.module_name[:_LONGEST_NAME]
        self.holder = holder
        self.since = time.monotonic()
        self.stopped_since: float | None = None
        self.waiters: list[Waiter] = []


class Leases:
    """Gives each key to one caller at a time, as far as the others trust that caller."""

    def __init__(
        self,
        trusts: Callable[[int, int], bool],
        look_up: Callable[[Caller, protocol.Get], Reply | None],
        expected: Callable[[Caller, protocol.Get], float | None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """``trusts(reader, writer)``; ``look_up`` finds what is stored by now; ``expected`` knows compile times."""
        self._trusts = trusts
        self._look_up = look_up
        self._expected = expected
        self._call_later = call_later
        self._by_key: dict[str, list[Lease]] = {}
        self._ticking = False
        self._last_number = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def ask(self, caller: Caller, wanted: protocol.Get) -> Reply | Later:
        """A lease for who would compile it, or the wait for who does already."""
        # NaN is no number of seconds either.
        if not wanted.wait > 0:
            return Reply(protocol.Missing(0))
        lease = self._trusted(caller, wanted.key)
        if lease is not None:
            return self._wait(lease, caller, wanted)
        if caller.leases >= _MOST_HELD:
            return Reply(protocol.Missing(0))
        return Reply(protocol.Missing(self._grant(caller, wanted).number))

    def settle(self, key: str, writer: int) -> None:
        """A user stored something, or knows that it cannot be: who waits and trusts that user gets it, or compiles."""
        for lease in self._take(key, writer):
            for waiter in lease.waiters:
                waiter.answer.give(self._found_for(waiter) or Reply(protocol.Missing(0)))
        # Who waits for another's compile may have what this one stored; if not, that compile goes on.
        for lease in list(self._by_key.get(key, ())):
            for waiter in list(lease.waiters):
                found = self._found_for(waiter) if self._trusts(waiter.caller.uid, writer) else None
                # Answering one may show that others have gone.
                if found is not None and waiter in lease.waiters:
                    lease.waiters.remove(waiter)
                    waiter.answer.give(found)

    def _found_for(self, waiter: Waiter) -> Reply | None:
        try:
            return self._look_up(waiter.caller, waiter.wanted)
        except Exception:
            # They are in no line any more: one who cannot be answered must not keep the others from it.
            logger.exception("what was waited for cannot be looked up")
            return None

    def disappoint(self, key: str, writer: int) -> None:
        """What a user compiled could not be stored, and so it would be for the next: everybody compiles."""
        for lease in self._take(key, writer):
            _send_away(lease.waiters)

    def release(self, caller: Caller, key: str, number: int) -> None:
        """A holder gives up: the next in line tries. Any connection of the holder's process may say so."""
        for lease in self._by_key.get(key, ()):
            if lease.number == number and (lease.holder.pid, lease.holder.uid) == (caller.pid, caller.uid):
                self._pass_on(lease)
                return

    def leave(self, caller: Caller) -> None:
        """A connection has ended, and with it what it held and what it waited for."""
        for lease in [lease for leases in self._by_key.values() for lease in leases]:
            lease.waiters = [waiter for waiter in lease.waiters if waiter.caller is not caller]
            if lease.holder is caller:
                self._pass_on(lease)

    def send_everybody_away(self) -> None:
        """The daemon leaves: who waits compiles."""
        for leases in self._by_key.values():
            for lease in leases:
                _send_away(lease.waiters)
        self._by_key.clear()

    def compiles(self, visible: Callable[[int], bool]) -> list[dict[str, protocol.Scalar]]:
        """What is being compiled by users that are ``visible``, the longest first."""
        now = time.monotonic()
        leases = sorted((lease for leases in self._by_key.values() for lease in leases), key=lambda lease: lease.since)
        shown: list[dict[str, protocol.Scalar]] = [
            {
                "key": lease.key,
                "module_name": lease.module_name,
                "pid": lease.holder.pid,
                "program": lease.holder.program,
                "seconds": round(now - lease.since, 3),
                "waiting": len(lease.waiters),
            }
            for lease in leases
            if visible(lease.holder.uid)
        ]
        return shown[:_MOST_SHOWN]

    def _grant(self, caller: Caller, wanted: protocol.Get) -> Lease:
        self._last_number += 1
        lease = Lease(self._last_number, wanted, caller)
        self._by_key.setdefault(wanted.key, []).append(lease)
        caller.leases += 1
        return lease

    def _wait(self, lease: Lease, caller: Caller, wanted: protocol.Get) -> Later:
        seconds = min(wanted.wait, self._worth_waiting(caller, wanted))
        waiter = Waiter(caller, wanted, Later(), time.monotonic() + seconds)
        lease.waiters.append(waiter)
        _tell(lease, waiter, time.monotonic())
        if not self._ticking:
            self._ticking = True
            self._call_later(_TELL_EVERY, self._tick)
        return waiter.answer

    def _worth_waiting(self, caller: Caller, wanted: protocol.Get) -> float:
        seconds = self._expected(caller, wanted)
        return math.inf if seconds is None else _TIMES_EXPECTED * seconds + _SECONDS_MORE

    def _take(self, key: str, holder: int) -> list[Lease]:
        """The leases of one user, which are over."""
        taken = [lease for lease in self._by_key.get(key, ()) if lease.holder.uid == holder]
        for lease in taken:
            self._end(lease)
        return taken

    def _end(self, lease: Lease) -> None:
        leases = self._by_key[lease.key]
        leases.remove(lease)
        lease.holder.leases -= 1
        if not leases:
            del self._by_key[lease.key]

    def _pass_on(self, lease: Lease) -> None:
        """The first in line compiles, and the others wait for that one if they trust it; else one of them compiles."""
        self._end(lease)
        granted = []
        for waiter in lease.waiters:
            following = self._trusted(waiter.caller, lease.key)
            if following is not None:
                following.waiters.append(waiter)
            else:
                granted.append((waiter.answer, self._grant(waiter.caller, waiter.wanted).number))
        # Afterwards: answering one may show that another has gone, and what was granted to it goes on to the next.
        for answer, number in granted:
            answer.give(Reply(protocol.Missing(number)))

    def _trusted(self, caller: Caller, key: str) -> Lease | None:
        """The compile that a caller would wait for."""
        trusted = (lease for lease in self._by_key.get(key, ()) if self._trusts(caller.uid, lease.holder.uid))
        return next(trusted, None)

    def _stands(self, lease: Lease) -> bool:
        return lease in self._by_key.get(lease.key, ())

    def _tick(self) -> None:
        now = time.monotonic()
        for lease in [lease for leases in self._by_key.values() for lease in leases if lease.waiters]:
            # Telling one may show that another has gone, and its lease with it.
            if not self._stands(lease):
                continue
            overdue = [waiter for waiter in lease.waiters if now >= waiter.until]
            lease.waiters = [waiter for waiter in lease.waiters if now < waiter.until]
            _send_away(overdue)
            if not self._stands(lease):
                continue
            if _has_stopped(lease, now):
                logger.info("process %d is stopped; the next one compiles %s", lease.holder.pid, lease.module_name)
                self._pass_on(lease)
            else:
                for waiter in lease.waiters:
                    _tell(lease, waiter, now)
        self._ticking = any(lease.waiters for leases in self._by_key.values() for lease in leases)
        if self._ticking:
            self._call_later(_TELL_EVERY, self._tick)


def _tell(lease: Lease, waiter: Waiter, now: float) -> None:
    holder = lease.holder
    waiter.answer.say(protocol.Wait(holder.pid, holder.program, now - lease.since, max(0.0, waiter.until - now)))


def _send_away(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.answer.give(Reply(protocol.Missing(0)))


def _has_stopped(lease: Lease, now: float) -> bool:
    if not _is_stopped(lease.holder.pid):
        lease.stopped_since = None
    elif lease.stopped_since is None:
        lease.stopped_since = now
    return lease.stopped_since is not None and now - lease.stopped_since >= _STOPPED_SECONDS


def _is_stopped(pid: int) -> bool:
    """Whether the kernel has a process stopped, by a signal or for a debugger. Where it cannot be seen: no."""
    try:
        # Behind the program's name, which may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
