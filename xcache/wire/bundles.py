"""Bundles: many objects, as tiers have them, in one file that is read in place.

    magic (8) | version (1) | place of the index (8) | objects, one after the other | index

The index is a zstd frame of a msgpack array of names, sorted, each with the size of its object, and with the digest,
offset and size of the executable in it. Each object is signed by itself (``parcel.py``, ``runs.py``), so the index
needs no signature: whoever alters it can only hide objects, or have them refused. The same objects make the same bytes.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack
import zstandard

from xcache.errors import DamagedError
from xcache.wire import bounded

_START = struct.Struct(">8sBQ")
_MAGIC, _VERSION = b"xcbundle", 1
_LEVEL = 3
# Names in one bundle, and bytes of the index when it is decompressed: half of it are digests, which do not get smaller.
_MOST_NAMES, _MOST_INDEX = 1_000_000, 256 * 1024**2
_FEW_BYTES, _TIMES = 256 * 1024, 16
_LONGEST_NAME = 1000


class Part(NamedTuple):
    """Where the executable is in an object; an object without one has no digest."""

    digest: str = ""
    offset: int = 0
    size: int = 0


_NONE = Part()


class BundleWriter:
    """Writes a bundle into a new file. Objects are added in the order of their names."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._objects: list[tuple[str, int, Part]] = []
        self._at = file.write(bytes(_START.size))

    def add(self, name: str, content: bytes, executable: Part = _NONE) -> None:
        """Add an object."""
        if self._objects and name <= self._objects[-1][0]:
            raise ValueError(f"{name} comes after {self._objects[-1][0]}")
        self._objects.append((name, len(content), executable))
        self._at += self._file.write(content)

    def finish(self) -> None:
        """Write the index; the file is a bundle now."""
        index = msgpack.packb([[name, size, *part] for name, size, part in self._objects])
        self._file.write(zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(index))
        self._file.seek(0)
        self._file.write(_START.pack(_MAGIC, _VERSION, self._at))


class Bundle:
    """An open bundle, for any thread. It is not mapped: a file that is cut meanwhile would kill the process."""

    def __init__(self, path: Path) -> None:
        """Open a file; raise OSError, or DamagedError if it is no bundle."""
        self.path = path
        self._descriptor = -1
        # Opening a pipe would wait.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.status = os.fstat(self._descriptor)
            self._executables: dict[str, tuple[int, int]] = {}
            self._places = self._read_places()
        except BaseException:
            self.close()
            raise

    def get(self, name: str, most: int | None = None) -> bytes | None:
        """Return an object, or its first ``most`` bytes; None if there is none.

        Raise OSError, or DamagedError if the file has become shorter.
        """
        place = self._places.get(name)
        if place is None:
            return None
        at, size = place
        return self._read(at, size if most is None else min(size, most))

    def executable(self, digest: str) -> tuple[int, int] | None:
        """Return a descriptor of the file, which the caller closes, and where an executable is in it; None if nowhere.

        Its bytes may have been altered, as those of any file.
        """
        place = self._executables.get(digest)
        return None if place is None else (os.dup(self._descriptor), place[0])

    def size(self, name: str) -> int | None:
        """Return the size of an object; None if there is none."""
        place = self._places.get(name)
        return None if place is None else place[1]

    def names(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the names that begin so, each with the size of its object."""
        return ((name, size) for name, (_, size) in self._places.items() if name.startswith(prefix))

    def is_still_there(self) -> bool:
        """Return whether the path still names this file, unchanged; raise OSError if it names none."""
        return _identity(self.path.stat()) == _identity(self.status)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # A thread may read while another lets go of the bundle: the last one closes the file.
    __del__ = close

    def _read_places(self) -> dict[str, tuple[int, int]]:
        """Return the offset and size of each object."""
        size = self.status.st_size
        if not stat.S_ISREG(self.status.st_mode) or size < _START.size:
            raise DamagedError(f"{self.path} is no bundle of xcache")
        magic, version, end = _START.unpack(self._read(0, _START.size))
        if magic != _MAGIC:
            raise DamagedError(f"{self.path} is no bundle of xcache")
        if version != _VERSION:
            raise DamagedError(f"{self.path} is a bundle of version {version}, and this xcache reads {_VERSION}")
        if not _START.size <= end < size or size - end > _MOST_INDEX:
            raise self._damaged("it is cut off, or was not written to its end")
        at, places = _START.size, {}
        for name, length, part in self._decoded(self._read(end, size - end)):
            places[name] = at, length
            if part.digest:
                self._executables[part.digest] = at + part.offset, part.size
            at += length
        if at != end:
            raise self._damaged(f"its objects have {end - at:+d} bytes against its index")
        return places

    def _decoded(self, index: bytes) -> list[tuple[str, int, Part]]:
        try:
            plain = bounded.decompressed(index, bounded.room(len(index), _FEW_BYTES, _TIMES, _MOST_INDEX))
            rows = bounded.rows(plain, _MOST_NAMES, 2 + len(Part._fields), _LONGEST_NAME)
            found = [_sound(*row) for row in rows]
        # A row may have too few fields.
        except (ValueError, TypeError):
            raise self._damaged("its index is malformed") from None
        names = [name for name, *_ in found]
        if names != sorted(set(names)):
            raise self._damaged("its index is malformed")
        return found

    def _read(self, at: int, size: int) -> bytes:
        found = b"".join(bounded.pieces(self._descriptor, at, size))
        if len(found) < size:
            raise self._damaged("it has become shorter")
        return found

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.path} is damaged: {why}")


def _sound(name: Any, size: Any, *place: Any) -> tuple[str, int, Part]:
    """Return a row of the index; raise ValueError or TypeError if it is none."""
    part = Part(*place)
    are_sound = type(name) is str and type(part.digest) is str
    are_sound &= all(type(number) is int and number >= 0 for number in (size, part.offset, part.size))
    if not are_sound or part.offset + part.size > size:
        raise ValueError("not a row of an index")
    return name, size, part


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
