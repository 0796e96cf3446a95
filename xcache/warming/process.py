"""Start a worker, ask it, and end it: every answer has a bound, and a worker that misses it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from xcache._version import __version__
from xcache.errors import NoWorkerError, WorkerError
from xcache.warming.frames import read_frame, write_frame
from xcache.warming.place import Place

# For the start of a worker, which imports jax, and for all that a worker does without compiling.
_START_SECONDS = 120.0
PLAN_SECONDS = 120.0
_END_BYTES = 4000


class Worker:
    """A process that plans and compiles in one place."""

    def __init__(self, python: str, place: Place) -> None:
        """Start it; raise NoWorkerError if that fails."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._is_late = False
        command = [python, "-P", "-m", "xcache.warming.worker", *place.arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=place.variables(),
                # Ctrl-C in a terminal is for the process that waits; and the worker's children end with it.
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise NoWorkerError(f"{python} cannot be run: {error.strerror}") from None
        self.place = place
        try:
            self.versions = self._answer(_START_SECONDS, None)
        except WorkerError as error:
            self.close()
            raise NoWorkerError(str(error)) from None
        except BaseException:
            self.close()
            raise
        if self.versions.get("xcache") != __version__:
            self.close()
            raise NoWorkerError(f"{python} has xcache {self.versions.get('xcache')}, and this is xcache {__version__}")

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a message; raise WorkerError if there is none, after which the worker is of no use."""
        return self._answer(seconds, message)

    def close(self) -> None:
        """End the worker and its child, whatever they do; no other thread may be asking it."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        for file in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError, ValueError):
                if file is not None:
                    file.close()

    def kill(self) -> None:
        """End the worker; the thread that asks it gets a WorkerError, and closes it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, seconds: float, message: dict[str, Any] | None) -> dict[str, Any]:
        # A killed process ends both a write that is not read and a read that nothing comes to.
        timer = threading.Timer(seconds, self._kill_late)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101 - pipes
            if message is not None:
                write_frame(self._process.stdin, message)
            answer = read_frame(self._process.stdout)
        except (OSError, ValueError):
            pass
        finally:
            timer.cancel()
        if answer is None:
            raise WorkerError(
                f"it did not end within {seconds:.0f} s and was stopped" if self._is_late else self._end()
            )
        return answer

    def _kill_late(self) -> None:
        self._is_late = True
        self.kill()

    def _end(self) -> str:
        """Return how the worker ended, and the last line that it wrote."""
        try:
            status = self._process.wait(5.0)
            self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - _END_BYTES))
            lines = self._said.read(_END_BYTES).decode("utf-8", "replace").strip().splitlines()
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return "the process that was to do it gave no answer"
        how = f"crashed ({signal.strsignal(-status)})" if status < 0 else f"ended with status {status}"
        said = "".join(char if char.isprintable() else "?" for char in lines[-1].strip()) if lines else ""
        return f"the process that was to do it {how}{': ' if said else ''}{said}"


def this_python() -> str:
    """Return the interpreter of this process."""
    return sys.executable or str(Path(sys.prefix, "bin", "python3"))
