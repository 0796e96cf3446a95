"""Memory files (memfd): the daemon makes them, and its clients write large contents into them.

The client seals a file before the daemon reads it, so that nobody can change or shorten it meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import stat
import tempfile
import threading
from collections.abc import Iterable

from xcache.errors import RefusedError
from xcached.store.blobs import read_chunks

_HAS_MEMORY_FILES = hasattr(os, "memfd_create") and hasattr(fcntl, "F_GET_SEALS")
_BLOCK_BYTES = 512
# Closing a smaller memory file takes no noticeable time.
_QUICKLY_CLOSED_BYTES = 1024**2


def memory_file() -> int:
    """Return a descriptor of a new unnamed file for a client to write into."""
    if _HAS_MEMORY_FILES:
        return os.memfd_create("xcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def check(descriptor: int, size: int, *, shared: bool) -> None:
    """Raise RefusedError unless a memory file is sealed and holds ``size`` bytes of its writer's memory."""
    if _HAS_MEMORY_FILES:
        if not _is_sealed(descriptor):
            raise RefusedError("wrong file", "large contents must come in sealed memory files, and this is not one")
    elif shared:
        raise RefusedError("wrong file", "this system has no memory files, so other users' large contents are refused")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise RefusedError("wrong size", f"the file does not have exactly {size} bytes")
    if _HAS_MEMORY_FILES and status.st_blocks * _BLOCK_BYTES < size:
        raise RefusedError("wrong file", "the file has holes: its sender must have all of its bytes in memory")


def content_of(descriptor: int, size: int) -> memoryview:
    """Return the content of a memory file that was checked, in its writer's memory: it costs none here."""
    if not size or not _HAS_MEMORY_FILES:
        # Its writer could still shorten it, and a mapping of what is gone ends the process.
        return memoryview(b"".join(read_chunks(descriptor, size)))
    # Not shared: older kernels map no sealed file so.
    return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))


def close_files(files: Iterable[int]) -> None:
    """Close memory files; large ones on a thread of their own, since freeing their memory takes a while."""
    for file in files:
        # A file may hold more memory than its size.
        if os.fstat(file).st_blocks * _BLOCK_BYTES < _QUICKLY_CLOSED_BYTES:
            os.close(file)
        else:
            _closer.take(file)


class _Closer:
    """Closes files one after the other, on its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, file: int) -> None:
        """Queue a file to be closed."""
        self._files.put(file)
        with self._lock, contextlib.suppress(RuntimeError):
            # If no thread can be started now, the next file tries again.
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="xcached-closer", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            os.close(self._files.get())


def _is_sealed(descriptor: int) -> bool:
    needed = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & needed == needed


_closer = _Closer()
