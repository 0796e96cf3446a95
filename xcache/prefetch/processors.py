"""The processors of this machine: how many there are, and whether one is left for loading ahead."""

from __future__ import annotations

import fcntl
import os

from xcache.clock import monotonic, pause
from xcache.descriptors import OwnFile, identity
from xcache.threads import processors

_RUNNABLE = "/proc/loadavg"
_STDERR = 2
# Seconds before each look, because one look may meet a thread that wants a processor only for a moment.
_PAUSES = (0.0, 0.001, 0.001)
# Three looks take milliseconds, and many executables load faster.
_VALID_SECONDS = 0.05


def threads_to_spare() -> int:
    """Return the number of processors, less one for the program's own thread."""
    return processors() - 1


class Processors:
    """Knows whether other processes want the processors, where Linux says how many threads of the machine do."""

    def __init__(self) -> None:
        self._file: OwnFile | None = None
        self._valid_until, self._were_taken = 0.0, False

    def open(self) -> None:
        """Begin to look; until then no processor is taken."""
        try:
            with OwnFile(_RUNNABLE) as file:
                # The program may want the numbers of the standard streams for files of its own.
                self._file = OwnFile(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))
            self._file.identity = identity(self._file.fileno())
        except OSError:
            pass

    def are_taken(self) -> bool:
        """Return whether more threads want a processor than there are, and one more; as of a moment ago."""
        now = monotonic()
        if now >= self._valid_until:
            self._were_taken = self._look()
            self._valid_until = now + _VALID_SECONDS
        return self._were_taken

    def close(self) -> None:
        """Look no more."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _look(self) -> bool:
        looks = []
        for seconds in _PAUSES:
            pause(seconds)
            looks.append(self._wanting())
        # This process alone may have one for each processor, the program's and those that load, and the daemon has one.
        return sorted(looks)[1] > (os.cpu_count() or 1) + 1

    def _wanting(self) -> int:
        """Return how many threads of the machine want a processor; 0 if that is not known."""
        file = self._file
        if file is None or not file.is_ours():
            return 0
        try:
            return int(os.pread(file.fileno(), 100, 0).split()[3].partition(b"/")[0])
        except (OSError, ValueError, IndexError):
            return 0
