"""A record of requests, for ``scripts/simulate`` to replay: one line of JSON each, in a file that stays bounded."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

from xcache import protocol

logger = logging.getLogger("xcached")

# As much of a key as tells it from others.
_DIGITS = 16
_MOST_BYTES = 256 * 1024**2
_MOST_HELD = 100_000


class Trace:
    """Notes are taken by the thread that serves, and written by the one that writes; trouble ends it quietly."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def note(self, operation: str, key: str, size: int, cost: float, *, hit: bool) -> None:
        """A request: what was asked for, and its size and compile time as far as they are known (0: they are not)."""
        if self._path is None or len(self._lines) >= _MOST_HELD:
            return
        noted = {"time": round(time.time(), 3), "op": operation, "key": key[:_DIGITS], "size": size, "cost": cost}
        with self._lock:
            self._lines.append(json.dumps(noted | {"hit": hit}, separators=(",", ":")))

    def note_hit(self, key: str, found: protocol.Found) -> None:
        """A request that was answered with an entry, or one that was answered before it was made."""
        self.note("get", key, found.stored_size, found.compile_seconds, hit=True)

    def write(self) -> None:
        """Bring what was noted to the file."""
        with self._lock:
            lines, self._lines = self._lines, []
        if self._path is None or not lines:
            return
        try:
            # What is no file, such as a pipe that nobody reads, is not waited for.
            descriptor = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600
            )
            with open(descriptor, "ab", buffering=0) as file:
                content = "".join(f"{line}\n" for line in lines).encode()
                if file.seek(0, os.SEEK_END) + len(content) > _MOST_BYTES:
                    self._end(f"it would be larger than {_MOST_BYTES} bytes")
                else:
                    file.write(content)
        except OSError as error:
            self._end(error.strerror or str(error))

    def _end(self, why: str) -> None:
        logger.warning("requests are not recorded any more in %s: %s", self._path, why)
        self._path = None
