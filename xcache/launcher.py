"""Find, start and await a daemon: by command, never by importing it.

One lock file per store makes it one daemon: whoever starts one locks it and hands the lock down, so of a hundred
programs that start at once one starts a daemon and the others wait for its socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from xcache.clock import monotonic
from xcache.config import Config
from xcache.errors import UnavailableError, UntrustedError
from xcache.handlers import let_pass
from xcache.private import check_directory, prepare_directory, prepare_meeting_place, uid_of_account
from xcache.protocol import FAILED, LOCK, READY

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _BetweenForks:
    """Keeps other threads from forking meanwhile, for a second at most.

    Their children would have the descriptors that are handed to the daemon: its lock, for as long as they live.
    """

    _PATIENCE = 1.0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(timeout=self._PATIENCE),
                after_in_parent=self._release,
                after_in_child=self._begin_in_child,
            )

    def __call__(self, work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(work)
        def alone(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self._lock:
                return work(*args, **kwargs)

        return alone

    def _release(self) -> None:
        # RuntimeError: the second was over.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def _begin_in_child(self) -> None:
        self._lock = threading.RLock()


_between_forks = _BetweenForks()


class Launcher:
    """Starts the daemon of one store, at most one at a time."""

    # There from the beginning: what Ctrl-C leaves half made is closed as well.
    _ready: int | None = None

    def __init__(self, config: Config) -> None:
        self._config = config
        self._said = b""
        self._failed = float("-inf"), ""
        # Two threads must not read, close and read again what one of them was to read.
        self._reading = threading.RLock()

    @_between_forks
    def start(self, since: float = float("inf")) -> bool:
        """Start a daemon unless one runs or is being started; whether this call did. Does not wait for it.

        Nor where one that was started here has failed ``since`` then: ``failure`` says why.

        Where a service manager listens for the daemon, having connected is what starts it. The machine's one daemon is
        nobody's to start but its own account's.
        """
        account = self._config.daemon_user
        if account and uid_of_account(account) != os.getuid():
            raise UnavailableError(
                f"nobody listens on {self._config.socket}, where this machine's one daemon should (daemon_user="
                f"{account!r}, {self._config.sources['daemon_user']}); it is started by systemd or with its container:"
                " sudo systemctl start xcached.socket, or sudo xcache service install --system"
            )
        prepare_directory(self._config.dir)
        prepare_meeting_place(self._config.socket.parent)
        lock = _not_standard(os.open(self._config.dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            if not _lock(lock):
                return False
            if self._may_be_activated():
                # Not with the lock in hand, which the daemon that is activated wants.
                fcntl.flock(lock, fcntl.LOCK_UN)
                if self._activate() or not _lock(lock):
                    return False
            # It says so before it lets go of the lock.
            if self.failure(since):
                return False
            self._spawn(lock)
        finally:
            # The daemon holds the lock from here on, through its own descriptor of the same open file.
            os.close(lock)
        return True

    def _may_be_activated(self) -> bool:
        """Whether there is a name on which somebody may listen although no daemon has the store."""
        return self._config.socket.exists() or self.address() is not None

    def _activate(self) -> bool:
        """Whether somebody listens although no daemon has the store; then the daemon is on its way now."""
        for path in (self._config.socket, self.address()):
            with contextlib.suppress(OSError, UntrustedError), contextlib.closing(_stream()) as probe:
                if path is not None:
                    check_directory(path.parent)
                    probe.settimeout(self._config.timeout)
                    # Blocked: so many wait to be taken that the kernel keeps no more.
                    with contextlib.suppress(BlockingIOError):
                        probe.connect(os.fspath(path))
                    return True
        return False

    def address(self) -> Path | None:
        """Where the daemon that has the store listens, if it has said so."""
        written = self._written()
        return Path(os.fsdecode(written[1])) if written else None

    def held(self) -> bool:
        """Whether a daemon has the store: one that is starting, serving or leaving."""
        # Trying to lock it would show as well, and keep a daemon that starts at that moment from it.
        try:
            inode = (self._config.dir / LOCK).stat().st_ino
            locks = Path("/proc/locks").read_text()
        except OSError:
            locks, inode = "", 0
        if any(line.split()[1] == "FLOCK" and f":{inode} " in line for line in locks.splitlines()):
            return True
        # In a container the kernel does not show a lock whose taker has ended. The number in the file may be another
        # process's by now, so that only trying to lock it tells.
        written = self._written()
        return written is not None and alive(written[0]) and self._is_locked()

    def _is_locked(self) -> bool:
        with open(self._config.dir / LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _written(self) -> tuple[int, bytes] | None:
        """What the daemon wrote into its lock: its process and the path of its socket."""
        try:
            process, _, path = (self._config.dir / LOCK).read_bytes().partition(b"\n")
        except OSError:
            return None
        return (int(process), path) if process.isdigit() and path else None

    def wait(self, seconds: float) -> None:
        """Wait until the daemon that was started here is ready; UnavailableError says why it is not."""
        if reason := self._outcome(seconds):
            raise UnavailableError(f"the daemon did not start: {reason}")

    def listen(self) -> float:
        """The moment from which ``failure`` counts: what a daemon said before is news only to who listened before."""
        self.failure(0.0)
        return monotonic()

    def failure(self, since: float) -> str | None:
        """Why a daemon that was started here did not start, if it has said so since then, to whichever thread."""
        with self._reading:
            if reason := self._outcome(None):
                self._failed = monotonic(), reason
            when, reason = self._failed
        return reason if when >= since else None

    def _outcome(self, seconds: float | None) -> str | None:
        """The reason why it did not start; without ``seconds``, no news is good news."""
        deadline = monotonic() + (seconds or 0.0)
        with self._reading:
            while (ready := self._ready) is not None:
                # Not select(), which knows no descriptors above a thousand.
                poll = select.poll()
                poll.register(ready, select.POLLIN)
                if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
                    return None if seconds is None else f"it said nothing within {seconds:g} s"
                # Unless a signal handler that compiles has read it meanwhile.
                if self._ready != ready:
                    continue
                try:
                    chunk = os.read(ready, 65536)
                except BlockingIOError as error:
                    let_pass(error)
                    continue
                self._said += chunk
                # Its stderr leads here too, until it is ready: the last line is what counts.
                last = self._said.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
                if not chunk or (self._said.endswith(b"\n") and (last == READY or last.startswith(FAILED))):
                    self.close()
                    return None if last == READY else last.removeprefix(FAILED) or "it ended without a word"
        return None

    def close(self) -> None:
        """Stop listening to the daemon that was started here; it goes on."""
        if self._ready is not None:
            os.close(self._ready)
            self._ready = None

    def __del__(self) -> None:
        self.close()

    def _spawn(self, lock: int) -> None:
        reading, ready = map(_not_standard, os.pipe())
        os.set_blocking(reading, False)
        with self._reading:
            self.close()
            self._ready, self._said = reading, b""
        # -P: a file in the working directory must not pass for a module of the daemon.
        command = [sys.executable, "-P", "-m", "xcached", "--lock-fd", str(lock), "--ready-fd", str(ready)]
        try:
            # Through a shell that leaves at once: the daemon must not be a child that this program's own
            # os.wait() or SIGCHLD handler would meet later.
            with _heard_of_no_child():
                shell = subprocess.Popen(
                    ["/bin/sh", "-c", '"$@" &', "sh", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=ready,
                    pass_fds=(lock, ready),
                    cwd="/",
                    env=os.environ | self._config.as_environment(),
                    start_new_session=True,
                )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    shell.wait(self._config.timeout)
        except OSError as error:
            let_pass(error)
            with self._reading:
                self.close()
                self._failed = monotonic(), str(error)
            raise UnavailableError(f"the daemon did not start: {error}") from None
        finally:
            os.close(ready)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _stream() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _not_standard(descriptor: int) -> int:
    """The same above 2: a program without stdin opens things under its number, where a child expects its own."""
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _heard_of_no_child() -> Iterator[None]:
    """Call the program's SIGCHLD handler only afterwards: one that reaps every child must not meet one of ours."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        # A child of its own may have ended meanwhile.
        signal.raise_signal(signal.SIGCHLD)


def alive(process: int) -> bool:
    """Whether there is a process with this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
