"""A number of places that users take in turns, however many of one user wait. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class FairGate:
    """A semaphore whose next place goes to the next user."""

    def __init__(self, places: int) -> None:
        self._free = places
        # By user, in the order of their turns.
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def place(self, uid: int) -> AsyncIterator[None]:
        """Hold a place for the length of the block, once it is the user's turn."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(uid)
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self, uid: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(uid, turn)
            else:
                # It had just come.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        uid = next(iter(self._waiting))
        turns = self._waiting.pop(uid)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[uid] = turns

    def _forget(self, uid: int, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[uid]
        turns.remove(turn)
        if not turns:
            del self._waiting[uid]
