"""A FUSE file system, spoken without a library, with one file that opens and then never answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import threading
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, FLUSH, _INIT = 1, 2, 3, 14, 15, 18, 25, 26
_ROOT, _FILE = 1, 2
_FORCE_AND_DETACH = 1 | 2


class SilentFile:
    """Serves one file of a given size. No read and no close of it ends before the server does."""

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / "file"
        self._folder = os.fsencode(folder)
        self._size = size
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
        if self._libc.mount(b"silent", self._folder, b"fuse", 0, options):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "FUSE cannot be mounted here")
        self.asked: set[int] = set()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Unmount; pending calls get an error."""
        self._libc.umount2(self._folder, _FORCE_AND_DETACH)
        os.close(self._device)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                request = os.read(self._device, 1 << 17)
                _, kind, unique, node = struct.unpack_from("<IIQQ", request)
                self.asked.add(kind)
                answer = self._answer(kind, node)
                if answer is not None:
                    os.write(self._device, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)

    def _answer(self, kind: int, node: int) -> bytes | None:
        if kind == _INIT:
            return struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 12, 10, 1 << 16, 1, 0, 0, 0) + bytes(28)
        if kind == _LOOKUP:
            return struct.pack("<QQQQII", _FILE, 0, 60, 60, 0, 0) + self._attributes(_FILE)
        if kind == _GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self._attributes(node)
        if kind == _OPEN:
            return struct.pack("<QII", 1, 0, 0)
        return None if kind in (_READ, FLUSH, _FORGET) else b""

    def _attributes(self, node: int) -> bytes:
        mode, size = (stat.S_IFREG | 0o644, self._size) if node == _FILE else (stat.S_IFDIR | 0o755, 0)
        times = (0,) * 6
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, (size + 511) // 512, *times[:3], *times[3:], mode, 1,
                           os.getuid(), os.getgid(), 0, 4096, 0)  # fmt: skip
