"""The ledger of this process: a row for each program it asked for, with the time of each stage.

Threads note stages as they go; the store's thread makes rows of them and sends those to the daemon.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from xcache import clock
from xcache._version import __version__
from xcache.clock import monotonic
from xcache.wire import ledger, protocol
from xcache.wire.ownership import own_uid

logger = logging.getLogger("xcache")


# Settings of jax that change what functions are lowered to.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_dtype_bits",
    "jax_numpy_dtype_promotion",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
# Rows that a socket takes at once.
_ROWS_UNANSWERED = 64
# The position of a program that has no row.
_UNKEPT = -1


class Program:
    """One program that the process asked for; its row is made when it is sent."""

    __slots__ = ("cause", "key", "module_name", "nearest", "outcome", "position", "shapes", "site", "spans", "stored")

    def __init__(self, position: int) -> None:
        self.position = position
        self.module_name = self.site = self.key = self.cause = self.stored = self.nearest = ""
        self.outcome = ledger.COMPILING
        # Makes the text, which only the store's thread needs.
        self.shapes: Callable[[], str] = str
        # Stage, start and end in monotonic time, thread.
        self.spans: list[tuple[str, float, float, str]] = []

    def described(self) -> str:
        """Return the name of the program, and where it is called."""
        return f"{self.module_name} (called at {self.site})" if self.site else self.module_name

    def row(self, origin: float) -> ledger.Row:
        """Return its row; ``origin`` is the monotonic time at which the process began."""
        spans = [
            (stage, round(start - origin, 6), round(end - start, 6), thread) for stage, start, end, thread in self.spans
        ]
        try:
            shapes = _short(self.shapes())
        except Exception:  # noqa: BLE001 - jax's types, or those of a library, may print in any way
            shapes = ""
        # The abstract values may lead to devices, which jax may discard.
        self.shapes = lambda: shapes
        return ledger.Row(
            self.position,
            _short(self.module_name),
            _short(self.site),
            shapes,
            self.key,
            self.outcome,
            _short(self.cause),
            _short(self.stored),
            self.nearest,
            _fitting(spans),
        )


class _Here(threading.local):
    """This thread's name, and the program that it is asking for."""

    def __init__(self) -> None:
        # Not current_thread(), which would make an object for a thread that Python does not know.
        known = (thread.name for thread in threading.enumerate() if thread.ident == threading.get_ident())
        self.thread = next(known, f"thread {threading.get_ident()}")
        self.program: Program | None = None


class Ledger:
    """The programs of one process. Any thread may note; the store's thread sends."""

    def __init__(
        self, mode: str, send: Callable[[protocol.RecordRun], None], parent: str = "", *, is_kept: bool = True
    ) -> None:
        """``send`` has the daemon keep rows; ``parent`` is the run of the process that this one was forked from."""
        self.run = os.urandom(8).hex()
        self._mode = mode
        self._began = monotonic()
        self._send = send
        self._parent = parent
        self._is_kept = is_kept
        self._lock = threading.RLock()
        self._here = _Here()
        self._programs: list[Program] = []
        # By position: what changed since it was sent.
        self._changed: dict[int, Program] = {}
        self._is_over = self._was_sent_over = False

    def asking(self) -> contextlib.AbstractContextManager[Program]:
        """Note the stages of a new program on this thread."""
        return self.resuming(self._begun())

    @contextlib.contextmanager
    def resuming(self, program: Program) -> Iterator[Program]:
        """Note stages of a program on this thread."""
        before = self._here.program
        try:
            self._here.program = program
            yield program
        finally:
            self._here.program = before
            self._note_change(program)

    def current(self) -> Program:
        """Return the program that this thread is asking for."""
        return self._here.program or Program(_UNKEPT)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the time of a stage of this thread's program."""
        start = monotonic()
        try:
            yield
        finally:
            self.note(name, start, monotonic())

    def note(self, name: str, start: float, end: float, thread: str = "") -> None:
        """Note a stage of this thread's program, which another thread may have done."""
        program = self._here.program
        if program is not None:
            program.spans.append((name, start, end, thread or self._here.thread))

    def note_daemon(self, start: float, end: float, seconds: float) -> None:
        """Note the daemon's part of a look-up. When it was is not known, so that it is shown in the middle."""
        if seconds > 0:
            seconds = min(seconds, end - start)
            at = start + (end - start - seconds) / 2
            self.note("daemon", at, at + seconds, ledger.DAEMON)

    def tell(self, **facts: str) -> None:
        """Set facts of this thread's program."""
        program = self._here.program
        if program is not None:
            for name, fact in facts.items():
                setattr(program, name, fact)

    def note_compiling(self) -> None:
        """Have a compile in progress sent, in case the process does not live to see its end."""
        program = self._here.program
        if program is not None:
            self._note_change(program)

    def note_unused(self, key: str, began: float, seconds: float) -> None:
        """Note an executable that was loaded ahead, and that the program did not use."""
        program = self._begun()
        program.key, program.outcome = key, ledger.UNUSED
        program.spans.append(("load", began, began + seconds, ledger.LOADING_AHEAD))
        self._note_change(program)

    def mark_over(self) -> None:
        """Note that the process is about to end."""
        self._is_over = True

    def send(self) -> None:
        """Send the rows that have changed, on the store's thread."""
        while (batch := self._take()) or (self._is_over and self._programs and not self._was_sent_over):
            try:
                origin = self._origin()
                rows: list[list[int | str]] = [[*program.row(origin)] for program in batch]
                is_over = self._is_over
                self._send(protocol.RecordRun(self.run, _wall_time(origin), is_over, self._facts(), rows))
            except BaseException as error:  # noqa: BLE001 - nobody watches this thread
                logger.debug("could not record the run: %s", error)
                with self._lock:
                    for program in batch:
                        self._changed.setdefault(program.position, program)
                return
            self._was_sent_over = is_over

    def unsaid_end(self) -> protocol.RecordRun | None:
        """Return the message that the process is over, with some rows, if it was not sent as one that is answered."""
        if self._was_sent_over or not self._programs:
            return None
        origin = self._origin()
        rows: list[list[int | str]] = [[*program.row(origin)] for program in self._take()[:_ROWS_UNANSWERED]]
        return protocol.RecordRun(self.run, _wall_time(origin), True, self._facts(), rows)

    def as_data(self) -> dict[str, Any]:
        """Return the run so far, in the shape that ``xcache run --json`` documents."""
        # Most programs never ask for this.
        from xcache import start_up

        with self._lock:
            programs = [*self._programs]
        origin = self._origin()
        rows = [program.row(origin) for program in programs]
        name = Path(sys.argv[0]).name if sys.argv else ""
        run = start_up.Run(
            self.run, own_uid(), os.getpid(), name, self._facts(), _wall_time(origin), _wall_time(monotonic()), None
        )
        return start_up.of_run(run, "running", rows) | {"programs": [start_up.of_row(row) for row in rows]}

    def _begun(self) -> Program:
        with self._lock:
            if not self._is_kept or len(self._programs) == ledger.MAX_ROWS:
                return Program(_UNKEPT)
            program = Program(len(self._programs))
            self._programs.append(program)
            return program

    def _note_change(self, program: Program) -> None:
        with self._lock:
            if program.position != _UNKEPT:
                self._changed[program.position] = program

    def _take(self) -> list[Program]:
        with self._lock:
            batch = [*self._changed.values()][: ledger.MAX_SENT_ROWS]
            for program in batch:
                del self._changed[program.position]
        return batch

    def _origin(self) -> float:
        """Return the monotonic time at which this process began; a forked one began with the fork."""
        if self._parent or clock.process_began() == float("inf"):
            return self._began
        return clock.process_began() - _wall_time(0.0)

    def _facts(self) -> dict[str, str]:
        """Return what describes this process, as it is now."""
        facts = {
            "arguments": json.dumps(sys.argv[1:], default=str),
            "script": sys.argv[0] if sys.argv else "",
            "directory": _directory(),
            "host": socket.gethostname(),
            "started": clock.own_start(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "xcache": __version__,
            "mode": self._mode,
            "parent": self._parent,
            "hook": str(round(self._began - self._origin(), 6)),
            "settings": json.dumps(_settings()),
            **{name: _version_of(name) for name in ("jax", "jaxlib")},
            **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")},
        }
        return {name: _short(text, ledger.MAX_FACT) for name, text in facts.items() if text}


def place_of(frame: FrameType) -> str:
    """Return the place in the code that a frame is at."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _wall_time(moment: float) -> float:
    """Return a monotonic time in seconds since 1970."""
    # Not time.time, which a program's tests may replace.
    return time.clock_gettime(time.CLOCK_REALTIME) - (monotonic() - moment)


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _version_of(library: str) -> str:
    """Return the version of a library that the program has imported."""
    return str(getattr(sys.modules.get(library), "__version__", ""))


def _settings() -> dict[str, str]:
    """Return the settings of jax in force for the whole process, as far as this jax has them."""
    settings = getattr(sys.modules.get("jax"), "config", None)
    return {name: str(getattr(settings, name)) for name in _SETTINGS if hasattr(settings, name)}


def _short(text: str, most: int = ledger.MAX_TEXT) -> str:
    """Return a text as a message can hold it: valid Unicode, and not too long."""
    return text.encode("utf-8", "replace").decode()[:most]


def _fitting(spans: list[tuple[str, float, float, str]]) -> str:
    """Return spans as JSON; the last ones are left out if there are too many."""
    while len(text := json.dumps(spans, separators=(",", ":"))) > ledger.MAX_TEXT:
        spans = spans[: -1 - len(spans) // 4]
    return text
