"""A place of its own for each test: a private folder, the settings for it, and the daemon that serves it."""

from __future__ import annotations

import contextlib
import fcntl
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from xcache import config, framing, protocol
from xcache.private import peer_of

REPOSITORY = Path(__file__).parent.parent
# Generous: what is bounded here is a hang, not a slow machine.
PATIENCE = 20.0

settings.register_profile("xcache", derandomize=True, deadline=None, database=None)
settings.load_profile("xcache")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for campaigns of faults, which have few rounds by default."""
    group = parser.getgroup("campaigns of faults")
    group.addoption("--rounds", type=int, help="run only campaigns, with so many rounds each instead of their few")
    group.addoption("--soak", type=float, help="run only campaigns; the steady load lasts so many seconds")
    group.addoption("--crowd", type=int, help="run only campaigns; so many programs ask at once")
    group.addoption("--seed", type=int, default=0, help="what the campaigns' random choices follow from")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who says how many rounds there are to be, or how much of them, is interested in the campaigns alone."""
    if any(config.getoption(name) is not None for name in ("--rounds", "--soak", "--crowd")):
        others = [item for item in items if "campaign" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the campaigns counted."""
    if tallies := config.stash.get(_TALLIES, {}):
        terminalreporter.section("campaigns of faults")
        everything = sum(tallies.values(), Counter())
        for name, counts in [*tallies.items(), ("all", everything)]:
            kinds = [*CAMPAIGN_COUNTS, *(kind for kind in OTHER_COUNTS if counts[kind])]
            counted = ", ".join(f"{counts[kind]:,} {kind}" for kind in kinds)
            terminalreporter.line(f"{name}: {counted}, {counts['seconds']:,.0f} s")
        for note in config.stash.get(_NOTES, []):
            terminalreporter.line(note)


class Place:
    """A folder with a short path (a socket's may have 107 bytes), and whatever daemon serves it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dir = root / "store"
        self.socket = root / "s"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("XCACHE")}
        self.env = clean | {
            "XCACHE_DIR": str(self.dir),
            "XCACHE_SOCKET": str(self.socket),
            "XCACHE_IDLE_EXIT": "60",
            "XDG_CONFIG_HOME": str(root / "config"),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "daemon")]),
        }
        self._children: list[subprocess.Popen[bytes]] = []

    def config(self, **overrides: object) -> config.Config:
        """The settings of this place."""
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
        """Begin to start a daemon by hand, ``under`` a command perhaps; ``said()`` is what it says on stderr."""
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
        """Start a daemon and wait until it answers."""
        child = self.daemon(*under, **environment)
        until(lambda: self.answers() or child.poll() is not None)
        assert child.poll() is None, f"the daemon ended with {child.returncode}: {self.said()}"
        return child

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        """Stop this one, too, when the place is left."""
        self._children.append(child)

    def said(self) -> str:
        """What daemons started by hand said on stderr."""
        return self.said_file().read_text() if self.said_file().exists() else ""

    def answers(self) -> bool:
        """Whether a daemon takes connections here."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def connect(self) -> socket.socket:
        """A connection on which nothing has been said yet."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(self.socket))
        except OSError:
            connection.close()
            raise
        return connection

    def daemon_pid(self) -> int:
        """The process that listens here."""
        with contextlib.closing(self.connect()) as connection:
            return peer_of(connection).pid

    def query(self, sql: str, *arguments: object) -> list[tuple[object, ...]]:
        """Rows of the store's database, with whatever the daemon held back until now."""
        with contextlib.suppress(OSError):
            self._tell(protocol.Sync())
        with contextlib.closing(sqlite3.connect(f"file:{self.dir}/store.db?mode=ro", uri=True)) as database:
            return database.execute(sql, arguments).fetchall()

    def execute(self, sql: str, *arguments: object) -> None:
        """Change the database behind everybody's back."""
        with contextlib.closing(sqlite3.connect(self.dir / "store.db")) as database, database:
            database.execute(sql, arguments)

    def stop(self) -> None:
        """Stop whatever daemon serves this place, however it takes it, and wait until it has left."""
        # One that is just starting can be told nothing yet.
        until(lambda: self.answers() or self._has_left())
        with contextlib.suppress(OSError):
            self._tell(protocol.Stop("the test is over"))
        for number in (signal.SIGTERM, signal.SIGKILL):
            if until(self._has_left, 5.0):
                break
            for pid in self._daemons():
                os.kill(pid, number)
        for child in self._children:
            if not until(lambda child=child: child.poll() is not None, 5.0):
                child.kill()
            child.wait()
        self._children.clear()

    def _daemons(self) -> list[int]:
        """The processes of this place's daemons, whether they answer or not."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            # It may leave while it is looked at.
            with contextlib.suppress(OSError):
                named = os.fsencode(f"XCACHE_DIR={self.dir}") in (process / "environ").read_bytes().split(b"\0")
                if named and b"xcached" in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found

    def _tell(self, message: protocol.Message) -> None:
        """Say one thing to the daemon and wait until it has answered."""
        hello = protocol.Hello(protocol.VERSION, "test", os.getpid(), "test")
        with contextlib.closing(self.connect()) as connection:
            connection.settimeout(5.0)
            connection.sendall(framing.encode(1, hello) + framing.encode(2, message))
            reader, answered = framing.FrameReader(), False
            while not answered and (data := connection.recv(65536)):
                answered = any(request == 2 for request, _ in reader.feed(data))

    def _has_left(self) -> bool:
        """Whether nobody has the store: a daemon holds its lock until its very end."""
        with contextlib.suppress(OSError), open(self.dir / "daemon.lock", "rb") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def said_file(self) -> Path:
        """Where what they say goes."""
        return self.root / "stderr"


def until(condition: Callable[[], object], patience: float = PATIENCE) -> bool:
    """Wait until something is so; whether it came to be."""
    deadline = time.monotonic() + patience
    while not (so := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(so)


def digest(content: bytes) -> str:
    """The digest of some bytes, as it stands everywhere."""
    return hashlib.sha256(content).hexdigest()


def get_message(key: str, wait: float = 0.0) -> protocol.Get:
    """A Get for this key; without ``wait`` it takes no lease and waits for nobody's."""
    return protocol.Get(key, wait, "jit_f", digest(b"program"))


def put_message(key: str, payload: bytes, program: bytes, /, **changes: object) -> protocol.Put:
    """A Put for these bytes; both travel in it unless ``changes`` says None."""
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
        details={name: f"what {name} was" for name in protocol.DESCRIBED_COMPONENTS},
        payload=payload,
        program=program,
    )
    return message._replace(**changes)


@pytest.fixture
def place() -> Iterator[Place]:
    """Somewhere to keep a store; its daemon and its files are gone afterwards."""
    with new_place() as made:
        yield made


@contextlib.contextmanager
def new_place() -> Iterator[Place]:
    """A place for as long as the block lasts; its path is short, for the socket."""
    made = Place(Path(tempfile.mkdtemp(prefix="xc", dir="/tmp")))
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(made.root)


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives the number of a TCP port that nobody uses at the moment."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


class Campaign:
    """One series of faults: how long it is, what its choices follow from, and what it counted."""

    def __init__(self, rounds: int | None, seed: int, *, soak: float | None = None, crowd: int | None = None) -> None:
        self.seed = seed
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._rounds = rounds
        self._soak = soak
        self._crowd = crowd

    def rounds(self, usual: int) -> int:
        """How many rounds there are to be."""
        return usual if self._rounds is None else self._rounds

    def seconds(self, usual: float) -> float:
        """How long a steady load is to last."""
        return usual if self._soak is None else self._soak

    def programs(self, usual: int) -> int:
        """How many programs are to ask at once."""
        return usual if self._crowd is None else self._crowd

    def note(self, text: str) -> None:
        """Something measured, to be said at the end of the run."""
        self.notes.append(text)

    def fault(self) -> None:
        """One more fault was tried."""
        self.counts["faults tried"] += 1

    def checked(self, entries: int) -> None:
        """So many entries were compared with what was sent."""
        self.counts["entries checked"] += entries

    def problem(self, kind: str, text: str) -> None:
        """Something that must not be: a loss, a wrong load, a crash, or anything else."""
        assert kind in CAMPAIGN_COUNTS, kind
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")

    def judge(self) -> None:
        """Fail if anything was seen that must not be."""
        assert not self.problems, "\n".join([f"{len(self.problems)} problems", *self.problems[:20]])


CAMPAIGN_COUNTS = ("faults tried", "entries checked", "losses", "wrong loads", "crashes", "other problems")
# Counted by some campaigns only.
OTHER_COUNTS = ("requests answered", "samples")


_TALLIES = pytest.StashKey[dict[str, "Counter[str]"]]()
_NOTES = pytest.StashKey[list[str]]()


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """A series of faults; its counts are said at the end of the run."""
    option = request.config.getoption
    made = Campaign(option("--rounds"), option("--seed"), soak=option("--soak"), crowd=option("--crowd"))
    start = time.monotonic()
    yield made
    made.counts["seconds"] = time.monotonic() - start
    request.config.stash.setdefault(_TALLIES, {})[request.node.nodeid.rpartition("/")[2]] = made.counts
    request.config.stash.setdefault(_NOTES, []).extend(made.notes)
