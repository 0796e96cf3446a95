"""The leases that other machines see. Belongs to the serving thread; the tiers' thread takes and holds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from xcache.wire import protocol
from xcached.caller import Caller
from xcached.requests.patience import Patience

if TYPE_CHECKING:
    from xcached.tiers.lease_object import Held
    from xcached.tiers.tiers import Tiers

# How leases are decided and end, as xcached.tiers.claims names it, which is imported only where there are tiers.
TAKEN, ARRIVED, ALONE = "taken", "arrived", "alone"
STORED, FAILED, RELEASED = "stored", "failed", "released"
# Clients are told that this is what they wait for, until it is known who compiles.
_NAMED = "remote stores"


class Elsewhere(Caller):
    """The holder of a lease on another machine; this daemon itself, until that is known."""

    def __init__(self, uid: int) -> None:
        super().__init__(os.getpid(), uid)
        self.program = _NAMED
        self.host = ""
        # Seconds that the holder expects to compile for; 0 if unknown.
        self.expected = 0.0

    def learn(self, held: Held) -> None:
        """Note who it is."""
        self.pid, self.program, self.host, self.expected = held.pid, held.program, held.host, held.expected


class Fleet:
    """Asks for each key once, whichever client will have the lease."""

    def __init__(
        self,
        tiers: Tiers,
        may_share: Callable[[int], bool],
        patience: Patience,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """``may_share`` says whose entries leave the machine; ``call_soon`` is for calls from another thread."""
        self._tiers = tiers
        self._patience = patience
        self.may_share = may_share
        self._call_soon = call_soon
        # The number says which request a late answer is for.
        self._keys: dict[str, int] = {}
        self._last = 0

    def takes(self, caller: Caller, expected: float | None) -> bool:
        """Return whether a client's compile of so many seconds needs a lease that other machines see."""
        is_worth_it = self._tiers.may_lease(expected) and self._patience.is_left(caller.process)
        return is_worth_it and self.may_share(caller.uid)

    def note_wait(self, caller: Caller, seconds: float) -> None:
        """Note how long it took to get a lease."""
        self._patience.note(caller.process, seconds, in_vain=True)

    def begin(
        self,
        caller: Caller,
        wanted: protocol.Get,
        expected: float | None,
        on_held: Callable[[Held], None],
        on_decided: Callable[[str], None],
    ) -> None:
        """Ask for a lease; after TAKEN it is kept until ``end``. ``on_held`` is told of a machine that has it."""
        from xcached.tiers.claims import Compile

        self.end(wanted.key, RELEASED)
        self._last += 1
        number = self._keys[wanted.key] = self._last

        def say(held: Held) -> None:
            self._call_soon(lambda: on_held(held) if self._keys.get(wanted.key) == number else None)

        def decide(decided: str) -> None:
            self._call_soon(lambda: self._decide(wanted.key, number, decided, on_decided))

        self._tiers.begin_lease(
            Compile(wanted.key, wanted.unusable, caller.pid, caller.program, expected or 0.0, say, decide)
        )

    def end(self, key: str, how: str) -> None:
        """End a lease, or the wait for it, if there is one."""
        if self._keys.pop(key, None) is not None:
            self._tiers.end_lease(key, how)

    def _decide(self, key: str, number: int, decided: str, on_decided: Callable[[str], None]) -> None:
        if self._keys.get(key) != number:
            return
        if decided != TAKEN:
            del self._keys[key]
        on_decided(decided)
