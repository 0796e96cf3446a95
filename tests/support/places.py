"""A place for a store and its daemon, the messages sent to it, and bounded waiting.

Programs that tests start import this too, so it imports nothing slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from xcache.config import config
from xcache.wire import commands, framing, protocol
from xcache.wire.ownership import peer_of

REPOSITORY = Path(__file__).parents[2]
# The folder from which programs that tests start import ``support``.
TESTS = REPOSITORY / "tests"
# Generous, because it bounds hangs and not slow machines.
PATIENCE = 20.0


class Place:
    """A folder with a short path (a socket's may have 107 bytes), and any daemon that serves it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dir = root / "store"
        self.socket = root / "s"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("XCACHE")}
        self.env = clean | {
            "XCACHE_DIR": str(self.dir),
            "XCACHE_SOCKET": str(self.socket),
            "XCACHE_IDLE_EXIT": "60",
            # Small programs, too, are to show whether skipping is right.
            "XCACHE_LOWERING": "skip",
            "XDG_CONFIG_HOME": str(root / "config"),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "daemon")]),
        }
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def with_support(self) -> dict[str, str]:
        """The environment of a program that imports ``support``."""
        return self.env | {"PYTHONPATH": os.pathsep.join([self.env["PYTHONPATH"], str(TESTS)])}

    def config(self, **overrides: object) -> config.Config:
        """Return the settings of this place."""
        return config.load(self.env, **overrides)

    def run(self, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program in this place."""
        return subprocess.run(
            [sys.executable, "-c", program],
            env=self.env | environment,
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def daemon(self, *under: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a daemon by hand, perhaps ``under`` a command; ``said()`` returns its stderr."""
        with self.said_file().open("ab") as said:
            child = subprocess.Popen(
                [*under, sys.executable, "-P", "-m", "xcached"],
                env=self.env | environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stderr=said,
            )
        self._children.append(child)
        return child

    def start_daemon(self, *under: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a daemon and wait until it answers; if there is no store, it finds an empty one."""
        if not under and "XCACHE_DIR" not in environment and self.env.get("XCACHE_DIR") == str(self.dir):
            begin_store(self.dir)
        child = self.daemon(*under, **environment)
        until(lambda: self.answers() or child.poll() is not None)
        assert child.poll() is None, f"the daemon ended with {child.returncode}: {self.said()}"
        return child

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        """Have this process stopped with the place."""
        self._children.append(child)

    def said(self) -> str:
        """Return the stderr of daemons started by hand."""
        return self.said_file().read_text() if self.said_file().exists() else ""

    def answers(self) -> bool:
        """Return whether a daemon accepts connections here."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def connect(self) -> socket.socket:
        """Return a connection on which nothing has been sent."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(self.socket))
        except OSError:
            connection.close()
            raise
        return connection

    def daemon_pid(self) -> int:
        """Return the process that listens here."""
        with contextlib.closing(self.connect()) as connection:
            return peer_of(connection).pid

    def query(self, sql: str, *arguments: object) -> list[tuple[object, ...]]:
        """Return rows of the database, after the daemon has written what it held back."""
        with contextlib.suppress(OSError):
            self._tell(commands.Sync())
        with contextlib.closing(sqlite3.connect(f"file:{self.dir}/store.db?mode=ro", uri=True)) as database:
            return database.execute(sql, arguments).fetchall()

    def execute(self, sql: str, *arguments: object) -> None:
        """Change the database behind the daemon's back."""
        with contextlib.closing(sqlite3.connect(self.dir / "store.db")) as database, database:
            database.execute(sql, arguments)

    def stop(self) -> None:
        """Stop any daemon that serves this place, by force if need be, and wait until it has left."""
        # A daemon that is just starting answers nothing yet.
        until(lambda: self.answers() or self.has_left())
        with contextlib.suppress(OSError):
            self._tell(commands.Stop("the test is over"))
        for number in (signal.SIGTERM, signal.SIGKILL):
            if until(self.has_left, 5.0):
                break
            for pid in self.daemons():
                os.kill(pid, number)
        for child in self._children:
            if not until(lambda child=child: child.poll() is not None, 5.0):
                child.kill()
            child.wait()
        self._children.clear()

    def daemons(self) -> list[int]:
        """Return the processes of this place's daemons, whether they answer or not."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            # The process may end meanwhile.
            with contextlib.suppress(OSError):
                named = os.fsencode(f"XCACHE_DIR={self.dir}") in (process / "environ").read_bytes().split(b"\0")
                if named and b"xcached" in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def _tell(self, message: protocol.Message) -> None:
        """Send one message to the daemon and wait for the answer."""
        hello = protocol.Hello(protocol.VERSION, "test", os.getpid(), "test")
        with contextlib.closing(self.connect()) as connection:
            connection.settimeout(5.0)
            connection.sendall(framing.encode(1, hello) + framing.encode(2, message))
            reader, answered = framing.FrameReader(), False
            while not answered and (data := connection.recv(65536)):
                answered = any(request == 2 for request, _ in reader.feed(data))

    def has_left(self) -> bool:
        """Return whether no daemon has the store, nor is one leaving whose store was removed under it."""
        with contextlib.suppress(OSError), open(self.dir / "daemon.lock", "rb") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return not self.daemons()

    def said_file(self) -> Path:
        """Return the file for the daemons' stderr."""
        return self.root / "stderr"


def begin_store(directory: Path) -> None:
    """Make an empty store where there is none, as a daemon does: its migrations take longer than most tests."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        return
    database = directory / "store.db"
    database.touch(0o600)
    database.write_bytes(_empty_store())
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("UPDATE statistics SET amount = ? WHERE name = 'since'", (time.time(),))


@functools.cache
def _empty_store() -> bytes:
    from xcached.store.database import Database

    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder))
        database.close()
        return database.path.read_bytes()


def until(condition: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Wait until a condition holds; return whether it came to hold."""
    deadline = time.monotonic() + patience
    while not (so := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(so)


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def digest(content: bytes) -> str:
    """Return the digest of some bytes."""
    return hashlib.sha256(content).hexdigest()


def get_message(key: str, wait: float = 0.0) -> protocol.Get:
    """Return a Get for this key; without ``wait`` it takes no lease and waits for none."""
    return protocol.Get(key, wait, "jit_f", digest(b"program"))


def put_message(key: str, payload: bytes, program: bytes, /, **changes: object) -> protocol.Put:
    """Return a Put that carries these bytes, unless ``changes`` says None."""
    message = protocol.Put(
        key=key,
        overwrite=False,
        module_name="jit_f",
        platform="cpu",
        device_kind="cpu",
        jaxlib_version="0.0",
        codec="none",
        raw_size=len(payload),
        compile_seconds=1.0,
        digest=digest(payload),
        stored_size=len(payload),
        program_digest=digest(b"raw " + program),
        program_raw_size=len(program),
        program_stored_digest=digest(program),
        program_stored_size=len(program),
        components={name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)},
        details={name: name for name in protocol.DESCRIBED_COMPONENTS},
        payload=payload,
        program=program,
    )
    return message._replace(**changes)


@contextlib.contextmanager
def new_place(base: str | None = None) -> Iterator[Place]:
    """Make a place for the length of the block; its path is short, for the socket."""
    made = Place(Path(tempfile.mkdtemp(prefix="xc", dir=base)))
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(made.root)
