"""The terminal of ``xcache monitor``: draws, reads keys, and leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console, Group
from rich.live import Live

from xcache.cli.following import Told, follow
from xcache.cli.monitor_view import View
from xcache.cli.output import drawable
from xcache.config.config import Config

# Seconds between two looks at what was told, and at most between two drawings, because times go on.
_LOOK_SECONDS, _DRAW_SECONDS = 0.2, 1.0
_LEAVING = frozenset(b"qQ")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


class _Signals:
    """The signal that asks to leave or to stop. A second one acts as it would without us."""

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = number
        signal.signal(number, signal.SIG_DFL)


def show(settings: Config) -> int:
    """Show the live view until the user leaves; return the exit status."""
    told: queue.SimpleQueue[Told | Exception] = queue.SimpleQueue()

    def follow_on() -> None:
        try:
            follow(settings, told.put)
        except Exception as error:  # noqa: BLE001 - the main thread raises it, once the terminal is restored
            told.put(error)

    # The thread may have to wait for a daemon, and the user may leave meanwhile.
    threading.Thread(target=follow_on, daemon=True).start()
    view = View(ascii_only=not (sys.stdout.encoding or "").lower().startswith("utf"))
    while True:
        with _Signals() as signals:
            failure = _show_once(told, view, signals)
        if failure is not None:
            raise failure
        if signals.asked != signal.SIGTSTP:
            return 128 + signals.asked if signals.asked not in (0, signal.SIGINT) else 0
        # Ctrl-Z: the terminal is as it was before, until the shell lets this process go on.
        os.kill(os.getpid(), signal.SIGSTOP)


def _show_once(told: queue.SimpleQueue[Told | Exception], view: View, signals: _Signals) -> Exception | None:
    """Show the view until the user leaves or a signal comes, or an exception is told, and return that."""
    # A name may have characters that the terminal's encoding lacks.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    console = Console(file=sys.stdout, highlight=False)
    # The terminal may be gone when this ends; then nothing can be drawn or restored.
    with contextlib.suppress(OSError), _keys() as is_leaving, _screen(console) as live:
        drawn_at, drawn_size = 0.0, (0, 0)
        while not signals.asked and not is_leaving(_LOOK_SECONDS):
            changed = False
            with contextlib.suppress(queue.Empty):
                while True:
                    news = told.get_nowait()
                    if isinstance(news, Exception):
                        return news
                    view.take(news)
                    changed = True
            now, there = time.monotonic(), _size()
            if changed or there != drawn_size or now >= drawn_at + _DRAW_SECONDS:
                drawn_at = now
                drawn_size = console.size = there
                live.update(Group(*map(drawable, view.lines(*there))), refresh=True)
    return None


def _size() -> tuple[int, int]:
    """Return the terminal's size as it is now; rich would believe COLUMNS, which a shell may have set long ago."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, lines or 24


@contextlib.contextmanager
def _screen(console: Console) -> Iterator[Live]:
    # Drawn by this thread only; Live's own would draw while the terminal is being restored.
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield live


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Have keys come one by one and unseen; yield a function that waits for one, and returns whether it says leave."""
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def is_leaving(seconds: float) -> bool:
        if descriptor is None:
            time.sleep(seconds)
            return False
        if not select.select([descriptor], [], [], seconds)[0]:
            return False
        typed = os.read(descriptor, 1024)
        # Nothing: the terminal has gone.
        return not typed or not _LEAVING.isdisjoint(typed)

    if descriptor is None:
        yield is_leaving
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield is_leaving
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
