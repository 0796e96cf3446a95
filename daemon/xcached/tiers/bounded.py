"""Bounds the time of every operation of an engine, and refuses names that not all engines can have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from xcached.tiers.tier import UNREACHABLE, Listed, Tier, TierError, is_name


class Bounded:
    """A tier whose operations end within the time-out; in a listing, the time-out is for each next object."""

    def __init__(self, engine: Tier, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self.can_create = engine.can_create
        self.can_list = engine.can_list

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        async with self._within_the_timeout():
            return await self._engine.get(_checked(name), most)

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        async with self._within_the_timeout():
            return await self._engine.begin(_checked(name), most)

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        async with self._within_the_timeout():
            return await self._engine.contains(_checked(name))

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one."""
        async with self._within_the_timeout():
            await self._engine.put(_checked(name), content)

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        async with self._within_the_timeout():
            return await self._engine.create(_checked(name), content)

    async def remove(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""
        async with self._within_the_timeout():
            await self._engine.remove(_checked(name))

    async def listed(self, prefix: str) -> AsyncGenerator[Listed]:
        """Yield the objects whose names begin so; other things that are there are left out."""
        async with contextlib.AsyncExitStack() as stack:
            found = self._engine.listed(prefix)
            if isinstance(found, AsyncGenerator):
                await stack.enter_async_context(contextlib.aclosing(found))
            while (each := await self._next(found)) is not None:
                if each.name.startswith(prefix) and is_name(each.name):
                    yield each

    async def close(self) -> None:
        """Close the connections."""
        async with self._within_the_timeout():
            await self._engine.close()

    async def _next(self, found: AsyncIterator[Listed]) -> Listed | None:
        async with self._within_the_timeout():
            return await anext(found, None)

    @contextlib.asynccontextmanager
    async def _within_the_timeout(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise TierError(UNREACHABLE, f"no answer within {self._timeout:g} s") from None


def _checked(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"not a name of an object: {name[:100]!r}")
    return name
