"""Find, start and await a daemon. The launcher runs a command; it never imports the daemon.

A lock file gives each store one daemon. A client locks it, starts the daemon and hands the lock down to it, so when a
hundred programs start at once, one of them starts the daemon and the others wait for its socket.
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
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import ParamSpec, TypeVar

from xcache.client.daemon_command import daemon_command, daemon_environment
from xcache.client.spawning import LOCK_FD, READY_FD, spawn
from xcache.clock import monotonic
from xcache.config.config import Config
from xcache.descriptors import OwnFile, identity
from xcache.errors import NoLocksError, UnavailableError, UntrustedError
from xcache.signals import reraise_if_the_programs
from xcache.wire import bounded
from xcache.wire.ownership import at_once, check_directory, prepare_directory, prepare_meeting_place
from xcache.wire.protocol import FAILED, LOCK, MOST_LOCK_BYTES, READY

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
File = TypeVar("File", bound=FileIO)
# More than a daemon writes into its lock file.
_MOST_LOCKS = 16 * 1024**2


class _WithoutForks:
    """A decorator that keeps other threads from forking while its function runs, for a second at most.

    A child forked meanwhile would inherit the descriptors made for the daemon, and hold the store's lock as long as it
    lives.
    """

    _MAX_SECONDS = 1.0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(timeout=self._MAX_SECONDS),
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
        # RuntimeError: the fork went ahead without the lock after a second.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def _begin_in_child(self) -> None:
        self._lock = threading.RLock()


_without_forks = _WithoutForks()


class Launcher:
    """Finds and starts the daemon of one store."""

    # A class attribute, so that __del__ works on a launcher that Ctrl-C left half made.
    _ready: OwnFile | None = None

    def __init__(self, config: Config) -> None:
        self._config = config
        self._report = b""
        self._failed = float("-inf"), ""
        # Only one thread at a time reads or closes the pipe on which a daemon reports its start.
        self._reading = threading.RLock()

    @_without_forks
    def start(self, since: float = float("inf")) -> bool:
        """Start a daemon unless one runs or is being started; return whether this call did. It does not wait.

        No daemon is started if one that this launcher started has failed since the moment ``since``; ``failure`` says
        why. If a service manager listens for the daemon, this connects, which makes the manager start it. Only its own
        account may start the one daemon of a machine.
        """
        if not self.may_start():
            raise UnavailableError(
                f"nobody listens on {self._config.socket}, where this machine's one daemon should (daemon_user="
                f"{self._config.daemon_user!r}, {self._config.sources['daemon_user']}); root starts it, by systemd"
                " (systemctl start xcached.socket, or xcache service install --system if there is none), with its"
                f" container, or by hand (runuser -u {self._config.daemon_user} -- xcached)"
            )
        prepare_directory(self._config.dir)
        prepare_meeting_place(self._config.socket.parent)
        # The daemon will hold the lock through its own descriptor of the same open file. These are files, not numbers,
        # because Ctrl-C may come anywhere: then they close with the last reference.
        with _above_handed_down(FileIO(self._config.dir / LOCK, "r+", opener=_open_or_create)) as lock:
            if not _lock(lock, self._config.dir):
                return False
            if self._may_be_activated():
                # The activated daemon needs the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)
                if self._activate() or not _lock(lock, self._config.dir):
                    return False
            # A daemon reports its failure before it releases the lock, so none is missed here.
            if self.failure(since):
                return False
            self._spawn(lock)
        return True

    def may_start(self) -> bool:
        """Return whether this user may start the daemon."""
        return self._config.daemon_uid() in (None, os.getuid())

    def _may_be_activated(self) -> bool:
        """Return whether a socket exists on which a service manager may listen, although no daemon has the store."""
        return self._config.socket.exists() or self.address() is not None

    def _activate(self) -> bool:
        """Connect to a service manager that listens, which makes it start the daemon; return whether one did."""
        for path in (self._config.socket, self.address()):
            with contextlib.suppress(OSError, UntrustedError), contextlib.closing(_stream()) as probe:
                if path is not None:
                    check_directory(path.parent)
                    probe.settimeout(self._config.timeout)
                    # BlockingIOError: the queue of the listening socket is full, so somebody listens.
                    with contextlib.suppress(BlockingIOError):
                        probe.connect(os.fspath(path))
                    return True
        return False

    def address(self) -> Path | None:
        """Return the socket on which the store's daemon listens, or None if its lock file does not name one."""
        written = self._written()
        return Path(os.fsdecode(written[1])) if written else None

    def process(self) -> int | None:
        """Return the process that the lock file names as the store's daemon, if it lives."""
        written = self._written()
        return written[0] if written and alive(written[0]) else None

    def held(self) -> bool:
        """Return whether a daemon has the store: one that is starting, serving or leaving."""
        # Trying the lock would tell, too, but could keep it from a daemon that starts at that moment.
        try:
            inode = (self._config.dir / LOCK).stat().st_ino
            locks = bounded.text_of("/proc/locks", _MOST_LOCKS)
        except (OSError, ValueError):
            locks, inode = "", 0
        if any(line.split()[1] == "FLOCK" and f":{inode} " in line for line in locks.splitlines()):
            return True
        # In a container the kernel does not list a lock whose taker has ended. The pid in the file may be another
        # process's by now, so only trying the lock tells.
        written = self._written()
        return written is not None and alive(written[0]) and self._is_locked()

    def _is_locked(self) -> bool:
        with contextlib.suppress(OSError), open(self._config.dir / LOCK, "rb", opener=at_once) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _written(self) -> tuple[int, bytes] | None:
        """Return the pid and socket path that the daemon wrote into its lock file; None if that file is a copy."""
        try:
            with open(self._config.dir / LOCK, "rb", opener=at_once) as lock:
                numbers, _, path = (lock.read(MOST_LOCK_BYTES) or b"").partition(b"\n")
                process, _, inode = numbers.partition(b" ")
                is_copy = inode not in (b"", b"%d" % os.fstat(lock.fileno()).st_ino)
        except OSError:
            return None
        return (int(process), path) if process.isdigit() and path and not is_copy else None

    def wait(self, seconds: float) -> None:
        """Wait until the daemon started here is ready; raise UnavailableError with the reason if it is not."""
        if reason := self._outcome(seconds):
            raise UnavailableError(f"the daemon did not start: {reason}")

    def listen(self) -> float:
        """Return the moment from which ``failure`` reports failures; earlier ones belong to earlier listeners."""
        self.failure(0.0)
        return monotonic()

    def failure(self, since: float) -> str | None:
        """Return why a daemon started by any thread here did not start, if it failed after the moment ``since``."""
        with self._reading:
            if reason := self._outcome(None):
                self._failed = monotonic(), reason
            when, reason = self._failed
        return reason if when >= since else None

    def _outcome(self, seconds: float | None) -> str | None:
        """Return why the daemon did not start, or None; without ``seconds``, do not wait for its report."""
        deadline = monotonic() + (seconds or 0.0)
        with self._reading:
            while (ready := self._ready) is not None:
                if not ready.is_ours():
                    # The program has closed the pipe, and may use its number for something else.
                    self._ready = None
                    break
                # select() cannot wait for descriptors from 1024 on.
                poll = select.poll()
                try:
                    poll.register(ready, select.POLLIN)
                    if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
                        return None if seconds is None else f"it said nothing within {seconds:g} s"
                    chunk = ready.read(65536)
                except ValueError as error:
                    reraise_if_the_programs(error)
                    chunk = None
                if chunk is None:
                    # A signal handler that compiles has read or closed the pipe meanwhile.
                    continue
                self._report += chunk
                # The daemon's stderr leads here, too, until it is ready, so only the last line counts.
                last = self._report.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
                if not chunk or (self._report.endswith(b"\n") and (last == READY or last.startswith(FAILED))):
                    self.close()
                    return None if last == READY else last.removeprefix(FAILED) or "it exited without a message"
        return None

    def close(self) -> None:
        """Stop listening to the daemon started here, which keeps running."""
        with self._reading:
            self._close()

    def _close(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()

    def __del__(self) -> None:
        # Without the lock: in a forked child, a thread that is gone may hold it.
        self._close()

    def _spawn(self, lock: FileIO) -> None:
        ends = tuple(map(OwnFile, os.pipe(), "rw"))
        reading, ready = map(_above_handed_down, ends)
        os.set_blocking(reading.fileno(), False)
        with self._reading:
            self.close()
            reading.identity = identity(reading.fileno())
            self._ready, self._report = reading, b""
        try:
            command = daemon_command()
            given = daemon_environment(os.environ, self._config.key_variable, self._config.remote)
            environment = given | self._config.as_environment()
            try:
                handed_down = ["--lock-fd", str(LOCK_FD), "--ready-fd", str(READY_FD)]
                spawn([*command, *handed_down], environment, lock.fileno(), ready.fileno())
            except OSError as error:
                reraise_if_the_programs(error)
                # A shell reports why the command cannot run, and works where spawn() does not.
                handed_down = ["--lock-fd", str(lock.fileno()), "--ready-fd", str(ready.fileno())]
                _spawn_by_shell([*command, *handed_down], environment, lock, ready, self._config.timeout)
        except (OSError, UnavailableError) as error:
            reraise_if_the_programs(error)
            with self._reading:
                self.close()
                self._failed = monotonic(), str(error)
            raise UnavailableError(f"the daemon did not start: {error}") from None
        finally:
            ready.close()


def _spawn_by_shell(
    command: list[str], environment: dict[str, str], lock: FileIO, ready: FileIO, patience: float
) -> None:
    """Start a command through a shell that ends at once, so that the daemon is not a child of this program.

    The shell is a child, and another thread's ``os.wait()`` may meet it; ``spawn`` avoids that.
    """
    with _sigchld_deferred():
        shell = subprocess.Popen(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=ready,
            pass_fds=(lock.fileno(), ready.fileno()),
            cwd="/",
            env=environment,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            shell.wait(patience)


def _lock(file: FileIO, directory: Path) -> bool:
    """Take the store's lock if it is free, and return whether it was; raise NoLocksError if its disk has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        reraise_if_the_programs(error)
        return False
    except OSError as error:
        reraise_if_the_programs(error)
        raise NoLocksError(directory, error.strerror) from None
    return True


def _stream() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o600)


def _above_handed_down(file: File) -> File:
    """Move a file above the descriptors that the daemon's own will have."""
    if file.fileno() > READY_FD:
        return file
    with file:
        return type(file)(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, READY_FD + 1), file.mode)


@contextlib.contextmanager
def _sigchld_deferred() -> Iterator[None]:
    """Call the program's SIGCHLD handler only afterwards: a handler that reaps every child must not reap ours."""
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        # A child of the program may have ended meanwhile. If none has, a handler that waits for one would hang.
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                signal.raise_signal(signal.SIGCHLD)


def alive(process: int) -> bool:
    """Return whether a process with this pid exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
