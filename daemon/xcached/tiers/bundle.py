"""A bundle as a tier: a file that is read in place, and never written."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from xcache.errors import DamagedError
from xcache.wire.bounded import text_of
from xcache.wire.bundles import Bundle
from xcached.tiers.tier import DENIED, FAILED, READ_ONLY, TOO_LARGE, Listed, TierError
from xcached.tiers.workers import Workers

logger = logging.getLogger("xcached")

_THREADS = 4
_MOUNTS, _MOST_MOUNTS = Path("/proc/self/mountinfo"), 64 * 1024**2
# A process that reads a file of such a file system may hang with the machine that has it.
_FAR = re.compile(r"(nfs|cifs|smb|fuse|9p|virtiofs|ceph|gluster|lustre|gpfs|beegfs|afs|orangefs|pvfs)")


class BundleFile:
    """The file, opened with the first request, and again when another one has taken its place.

    A file that does not exist is an empty store, not a failure: the first run of a CI is to make the file.
    """

    can_create, can_list = False, True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Bundle | None = None
        self._was_said_to_be_absent = False
        self._workers = Workers(_THREADS)

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        return await self._workers.do(lambda: self._get(name, most))

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        return await self._workers.do(lambda: self._read(self._bundle(), name, most))

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        bundle = await self._workers.do(self._bundle)
        return bundle is not None and bundle.size(name) is not None

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
        bundle = await self._workers.do(self._bundle)
        if bundle is None:
            return
        for name, size in bundle.names(prefix):
            yield Listed(name, size, bundle.status.st_mtime)

    async def close(self) -> None:
        """End the threads; the last reader closes the file."""
        self._opened = None
        self._workers.close()

    def open(self) -> None:
        """Open the file if it can be opened."""
        with contextlib.suppress(TierError):
            self._bundle()

    def executable(self, digest: str) -> tuple[int, int] | None:
        """Return a descriptor of the file and where this executable is in it; None if it has none such, or is gone.

        Another file in its place is opened with the next request, which reads its index on another thread.
        """
        opened = self._opened
        try:
            return opened.executable(digest) if opened is not None and opened.is_still_there() else None
        except OSError:
            return None

    def _get(self, name: str, most: int) -> bytes | None:
        bundle = self._bundle()
        size = bundle.size(name) if bundle is not None else None
        if size is not None and size > most:
            raise TierError(TOO_LARGE, f"{name} has {size} bytes, more than {most}")
        return self._read(bundle, name, most)

    def _read(self, bundle: Bundle | None, name: str, most: int) -> bytes | None:
        try:
            return bundle.get(name, most) if bundle is not None else None
        except (OSError, DamagedError) as error:
            self._opened = None
            raise TierError(FAILED, str(error)) from None

    def _bundle(self) -> Bundle | None:
        """Return the file that is there now; None if there is none. Raise TierError if it cannot be read."""
        try:
            if (opened := self._opened) is not None and opened.is_still_there():
                return opened
            self._opened = opened = Bundle(self._path)
        except FileNotFoundError:
            self._opened = None
            if not self._was_said_to_be_absent:
                logger.info("%s does not exist: an empty bundle until it does", self._path)
            self._was_said_to_be_absent = True
            return None
        except PermissionError as error:
            raise TierError(DENIED, str(error)) from None
        except (OSError, DamagedError) as error:
            raise TierError(FAILED, str(error)) from None
        self._was_said_to_be_absent = False
        return opened

    def _is_read_only(self, name: str) -> TierError:
        return TierError(READ_ONLY, f"{name} cannot be changed: a bundle is only read")


@functools.cache
def bundle_at(path: Path) -> BundleFile:
    """Return the bundle at a path, which is opened once for all who read it."""
    return BundleFile(path)


class InPlace:
    """The executables that the store need not copy: those in bundles on this machine. Any thread may look."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open the bundles, before anybody asks for what the store knows to be in them."""
        self._files = [bundle_at(path) for path in paths if _is_near(path)]
        for file in self._files:
            file.open()

    def open(self, digest: str) -> tuple[int, int] | None:
        """Return a descriptor of a file and where this executable is in it; None if no bundle has it."""
        found = (file.executable(digest) for file in self._files)
        return next((each for each in found if each is not None), None)


def _is_near(path: Path) -> bool:
    """Return whether a path is on a disk of this machine, by the table of mounts: asking the file could hang."""
    found, kind = -1, ""
    try:
        lines = text_of(_MOUNTS, _MOST_MOUNTS, "surrogateescape").splitlines()
    except (OSError, ValueError):
        return True
    for line in lines:
        mount, _, behind = line.partition(" - ")
        place = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4]))
        # A later mount hides an earlier one.
        if path.is_relative_to(place) and len(place.parts) >= found:
            found, kind = len(place.parts), behind.split()[0]
    return not _FAR.match(kind)
