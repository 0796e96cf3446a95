"""Write what the processes of a run want to the file that the setting ``lock`` names.

A process that ends takes over what was written to the file since its run began, and replaces what is older. So no lines
are lost of processes that run at the same time, on whatever machines, nor of those that one command starts one after
the other; and what an earlier run wanted does not stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from xcache import clock, lock_file
from xcache.errors import LockFileError
from xcache.request import Request
from xcache.threads import usual_stack

# How far off the time of a file and the beginning of a process may be. A run that begins sooner after the last one
# has ended than this counts as another one; their programs take longer to start and to end.
_INEXACT_SECONDS = 0.05
_VARIABLE = "XCACHE_LOCK"


class Wanted:
    """The programs that a process wanted. Any thread may note them."""

    def __init__(self, path: Path, note_trouble: Callable[[BaseException, str], None], began: float) -> None:
        """``began`` is when the run began, by ``clock.since_boot``."""
        self._path = path
        self._note_trouble = note_trouble
        self._began = began
        self._programs: dict[str, lock_file.Program] = {}
        self._is_written = True

    def for_child(self, note_trouble: Callable[[BaseException, str], None]) -> Wanted:
        """Return an empty one for a forked child, which belongs to the same run."""
        return Wanted(self._path, note_trouble, self._began)

    def note(self, asked: Request, seconds: float) -> None:
        """Note a program that was loaded or compiled, and the time that its compile took."""
        if asked.key.digest not in self._programs:
            made = lock_file.Made(
                asked.platform, asked.device_kind, asked.jaxlib_version, asked.key.components["toolchain"]
            )
            self._programs[asked.key.digest] = lock_file.Program(asked.module_name, seconds, made)
            self._is_written = False

    def drop(self, key: str) -> None:
        """Forget a program that cannot be stored: it would be missing everywhere."""
        self._programs.pop(key, None)

    def write(self, seconds: float) -> None:
        """Write what was noted since the last time, on a thread of its own that is waited for so long at most."""
        if self._is_written or not self._programs:
            return
        self._is_written = True
        thread = threading.Thread(target=self._write, name="xcache-lock", daemon=True)
        try:
            with usual_stack():
                thread.start()
        except RuntimeError:
            # Python 3.12.0 and 3.12.1 start no thread at the exit. There, a disk that hangs holds it up.
            self._write()
            return
        thread.join(seconds)
        if thread.is_alive():
            self._complain(f"that takes longer than {seconds:.1f} s")

    def _write(self) -> None:
        try:
            mine = {key: lock_file.tidied(program) for key, program in dict(self._programs).items()}
            update(self._path, mine, clock.since_boot() - self._began)
        except BaseException as error:  # noqa: BLE001 - nobody watches this thread
            self._complain(str(getattr(error, "strerror", None) or error or type(error).__name__))

    def _complain(self, reason: str) -> None:
        self._note_trouble(LockFileError(f"{self._path} could not be written: {reason}"), "the program is not affected")


def run_began() -> float:
    """Return when the run of this process began, by ``clock.since_boot``."""
    return clock.command_began(_VARIABLE)


def update(path: Path, mine: lock_file.Programs, seconds: float) -> None:
    """Write a file, with what was written to it in these last seconds; raise OSError or LockFileError."""
    with _locked(path) as file:
        # A link stays one. The kernel has refused one that another user has put into a folder such as /tmp.
        path = path.resolve()
        before = os.fstat(file.fileno())
        old = _programs_in(file, before.st_size)
        # Beside the file, whose folder's clock says how old it is.
        number, part = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        try:
            with open(number, "wb") as written:
                age = os.fstat(number).st_mtime - before.st_mtime
                is_same_run = age < seconds - _INEXACT_SECONDS
                text = lock_file.render(lock_file.merged(old, mine, is_same_run=is_same_run))
                written.write(text.encode("utf-8", "replace"))
            shutil.copymode(path, part)
            os.replace(part, path)  # noqa: PTH105 - as the descriptor's path is a string
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)  # noqa: PTH108


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, which is made if need be, and keep all others of its writers out."""
    while True:
        with open(path, "r+b", opener=_opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LockFileError("it is not a file")
            with contextlib.suppress(OSError):
                # Some network file systems have no locks: there, two processes that end at once may lose lines.
                fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever had it before has put another file in its place.
            if _is_at(file, path):
                try:
                    yield file
                finally:
                    with contextlib.suppress(OSError):
                        # A process that was forked meanwhile has the descriptor, too.
                        fcntl.flock(file, fcntl.LOCK_UN)
                return


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _opener(path: str, flags: int) -> int:
    # Opening a pipe must not wait for its other end.
    return os.open(path, flags | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _programs_in(file: IO[bytes], size: int) -> lock_file.Programs:
    """Return what a file has; raise LockFileError rather than let a file be replaced that is something else."""
    text = file.read(lock_file.MOST_BYTES).decode("utf-8", "replace") if size <= lock_file.MOST_BYTES else ""
    if size and not lock_file.is_lock(text):
        raise LockFileError("there is a file that is no lock file of this xcache's, and it stays as it is")
    if not size:
        return {}
    try:
        return lock_file.parse(text)
    except LockFileError:
        # A lock file that was edited, or merged by git, is made anew.
        return {}
