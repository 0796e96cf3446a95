"""A command on a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping

from support.places import PATIENCE

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal that remembers what was written; ``screen`` is what was drawn last."""

    def __init__(self, command: list[str], env: Mapping[str, str], columns: int, rows: int) -> None:
        self._own, self._its = os.openpty()
        self.resize(columns, rows, tell=False)
        self.before = termios.tcgetattr(self._its)
        self.text = ""
        # The first terminal that a session's leader opens is the session's own. A preexec_fn would be Python in a fork,
        # of which jax warns.
        opening = f'exec "$@" <> {os.ttyname(self._its)} >&0 2>&0'
        self._process = subprocess.Popen(["sh", "-c", opening, "sh", *command], env=env, start_new_session=True)

    def resize(self, columns: int, rows: int, *, tell: bool = True) -> None:
        """Change the size, as a window manager does."""
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if tell:
            self.send_signal(signal.SIGWINCH)

    def send_signal(self, number: int) -> None:
        """Send a signal to the command."""
        self._process.send_signal(number)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._own, keys)

    @property
    def screen(self) -> list[str]:
        """The lines that were drawn last, without colours."""
        drawn = self.text.rpartition("\x1b[H")[2]
        return [line.rstrip() for line in _ESCAPES.sub("", drawn).replace("\r", "").split("\n")]

    @property
    def is_restored(self) -> bool:
        """Whether keys are read as before, the cursor is seen, and what was there before is shown again."""
        cursor = self.text.rfind("\x1b[?25h") >= self.text.rfind("\x1b[?25l")
        picture = self.text.rfind("\x1b[?1049l") >= self.text.rfind("\x1b[?1049h")
        return cursor and picture and termios.tcgetattr(self._its) == self.before

    def shows(self, condition: Callable[[list[str]], object]) -> bool:
        """Wait until a condition of the screen holds; return whether it came to hold."""
        return self._read_until(lambda: condition(self.screen))

    def wait(self) -> int:
        """Wait until the command has ended; return its status."""
        self._read_until(lambda: self._process.poll() is not None)
        self._read()
        return self._process.wait(PATIENCE)

    def is_stopped(self) -> bool:
        """Wait until the command is stopped, as by Ctrl-Z."""
        return self._read_until(lambda: _state_of(self._process.pid) == "T")

    def hang_up(self) -> None:
        """Close the terminal's window."""
        os.close(self._own)
        self._own = -1

    def close(self) -> None:
        """End the command, and close both ends."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for end in (self._own, self._its):
            with contextlib.suppress(OSError):
                os.close(end)

    def _read_until(self, condition: Callable[[], object]) -> bool:
        deadline = time.monotonic() + PATIENCE
        while not (so := condition()) and time.monotonic() < deadline:
            self._read()
        return bool(so)

    def _read(self) -> None:
        while select.select([self._own], [], [], 0.02)[0]:
            self.text += os.read(self._own, 65536).decode("utf-8", "replace")


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def on_terminal(
    env: Mapping[str, str], *arguments: str, columns: int = 80, rows: int = 24, **environment: str
) -> Iterator[Terminal]:
    """Run a command of xcache on a terminal for the length of the block."""
    command = [sys.executable, "-m", "xcache", *arguments]
    terminal = Terminal(command, {**env, "TERM": "xterm-256color", **environment}, columns, rows)
    try:
        yield terminal
    finally:
        terminal.close()
