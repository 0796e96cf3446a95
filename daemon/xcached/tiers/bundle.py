"""A bundle as a tier: a file that is read in place, and never written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from xcache.errors import DamagedError
from xcache.wire.bundles import Bundle
from xcached.tiers.tier import DENIED, FAILED, MISSING, READ_ONLY, TOO_LARGE, Listed, TierError


class BundleFile:
    """The file, opened with the first request, and again when another one has taken its place."""

    can_create, can_list = False, True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Bundle | None = None

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        return await asyncio.to_thread(self._get, name, most)

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        return (await asyncio.to_thread(self._bundle)).size(name) is not None

    async def put(self, name: str, content: bytes) -> None:  # noqa: ARG002 - as all engines
        """Raise TierError."""
        raise self._is_read_only(name)

    async def create(self, name: str, content: bytes) -> bool:  # noqa: ARG002 - as all engines
        """Raise TierError."""
        raise self._is_read_only(name)

    async def remove(self, name: str) -> None:
        """Raise TierError."""
        raise self._is_read_only(name)

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Yield the objects whose names begin so."""
        bundle = await asyncio.to_thread(self._bundle)
        for name, size in bundle.names(prefix):
            yield Listed(name, size, bundle.status.st_mtime)

    async def close(self) -> None:
        """Do nothing: a thread may still read, and the last reader closes the file."""
        self._opened = None

    def executable(self, digest: str) -> tuple[int, int] | None:
        """Return a descriptor of the file and where this executable is in it; None if it has none such, or is gone."""
        try:
            return self._bundle().executable(digest)
        except (TierError, OSError):
            return None

    def _get(self, name: str, most: int) -> bytes | None:
        bundle = self._bundle()
        size = bundle.size(name)
        if size is not None and size > most:
            raise TierError(TOO_LARGE, f"{name} has {size} bytes, more than {most}")
        try:
            return bundle.get(name)
        except (OSError, DamagedError) as error:
            self._opened = None
            raise TierError(FAILED, str(error)) from None

    def _bundle(self) -> Bundle:
        try:
            if (opened := self._opened) is not None and opened.is_still_there():
                return opened
            self._opened = opened = Bundle(self._path)
        except FileNotFoundError:
            raise TierError(MISSING, f"{self._path} does not exist") from None
        except PermissionError as error:
            raise TierError(DENIED, str(error)) from None
        except (OSError, DamagedError) as error:
            raise TierError(FAILED, str(error)) from None
        return opened

    def _is_read_only(self, name: str) -> TierError:
        return TierError(READ_ONLY, f"{name} cannot be changed: a bundle is only read")


class InPlace:
    """The executables in the bundles of the settings, which the store does not copy. Any thread may look."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = [BundleFile(path) for path in paths]

    def open(self, digest: str) -> tuple[int, int] | None:
        """Return a descriptor of a file and where this executable is in it; None if no bundle has it."""
        found = (file.executable(digest) for file in self._files)
        return next((each for each in found if each is not None), None)
