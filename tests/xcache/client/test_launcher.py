"""Starting a daemon: one, however many want it; nobody's child; and a reason where there is none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.places import get_message, until
from support.program_files import program_text
from support.resources import pipes
from support.starting import with_a_store

from xcache.client import connector
from xcache.client import launcher as launching
from xcache.client.client import Client
from xcache.client.connection import Connection
from xcache.client.daemon_command import daemon_command
from xcache.client.launcher import Launcher
from xcache.errors import NoLocksError, NotAskedError, StoreError, UnavailableError
from xcached.net.rendezvous import take_lock

KEY = "ab" * 32
pytestmark = pytest.mark.usefixtures("here")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_daemon_is_started_once_and_says_that_it_is_ready(place):
    launcher = Launcher(place.config())
    assert not launcher.held()
    assert launcher.start()
    assert not launcher.start()
    launcher.wait(20)
    assert launcher.held()
    assert place.answers()
    assert launcher.failure(0.0) is None
    assert not Launcher(place.config()).start()
    assert "ready" not in (place.dir / "daemon.log").read_text()


def test_the_daemon_is_nobodys_child(place):
    """A program's own os.wait() must not meet it, nor its Ctrl-C end it."""
    launcher = Launcher(place.config())
    launcher.start()
    launcher.wait(20)
    pid = place.daemon_pid()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    assert os.getsid(pid) != os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_the_daemon_keeps_nothing_of_its_starter_open(place):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    launcher = Launcher(place.config())
    launcher.start()
    ours = {link for path in Path("/proc/self/fd").iterdir() if "pipe:" in (link := _link_of(path))}
    launcher.wait(20)
    os.close(writing)
    # If the daemon had it open, a reader of the program's output through a pipe would never see its end.
    assert os.read(reading, 1) == b""
    os.close(reading)
    opened = Path(f"/proc/{place.daemon_pid()}/fd")
    # It lets go right after it has said that it is ready.
    assert until(lambda: str((opened / "2").readlink()) == os.devnull)
    assert ours.isdisjoint(_link_of(path) for path in opened.iterdir())


def _link_of(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""


WANTED = f"protocol.Get('{KEY}', 0.0, 'm', 'p')"
WANTS_ONE = f"""
from xcache.config import config
from xcache.wire import protocol
from xcache.client.client import Client
from xcache.client.connection import Connection
from xcache.client.contents import Absent
from xcache.client.daemon_command import daemon_command
from xcache.client.launcher import Launcher
import sys
settings = config.load(timeout=30)
client = Client(settings, "test", Launcher(settings))
sys.stdin.read(1)
assert client.get({WANTED}).lease == 0
client.close()
"""


@pytest.mark.parametrize("fresh", [True, False], ids=["no store yet", "a store"])
def test_one_of_many_simultaneous_programs_starts_the_daemon(place, fresh):
    if not fresh:
        with_a_store(place)
    command = [sys.executable, "-c", WANTS_ONE]
    programs = [subprocess.Popen(command, env=place.env, stdin=subprocess.PIPE) for _ in range(12)]
    for program in programs:
        program.stdin.write(b"go")
        program.stdin.flush()
    for program in programs:
        program.communicate(timeout=60)
    assert [program.returncode for program in programs] == [0] * 12
    assert (place.dir / "daemon.log").read_text().count(" serves ") == (1 if fresh else 2)


@pytest.mark.parametrize("fresh", [True, False], ids=["no store yet", "a store"])
def test_a_daemon_that_starts_is_waited_for(place, connected, fresh):
    """This holds without a store, too: one of the programs that start together is to compile for the others."""
    if not fresh:
        with_a_store(place)
    assert connected().get(get_message(KEY)).lease == 0


def test_why_a_daemon_did_not_start_is_said(place, connected):
    with_a_store(place)
    with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database:
        database.execute("PRAGMA user_version = 99")
    launcher = Launcher(place.config())
    launcher.start()
    with pytest.raises(UnavailableError, match=r"did not start: .*was written by a newer xcache"):
        launcher.wait(20)
    client = connected(timeout=3)
    with pytest.raises(UnavailableError, match=r"did not start: .*was written by a newer xcache"):
        client.get(get_message(KEY))
    with pytest.raises(NotAskedError):
        client.get(get_message(KEY))


def test_threads_that_want_one_at_the_same_time_start_one_and_all_hear_why_it_failed(place, connected, monkeypatch):
    with_a_store(place)
    place.execute("PRAGMA user_version = 99")
    starts = []

    def counting():
        starts.append("one")
        return daemon_command()

    together = threading.Barrier(4)
    listen = Launcher.listen

    def all_listening(self):
        since = listen(self)
        together.wait(20)
        return since

    monkeypatch.setattr(launching, "daemon_command", counting)
    monkeypatch.setattr(Launcher, "listen", all_listening)
    client = connected()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(client.get, get_message(KEY)) for _ in range(4)]
        failures = [each.exception(40) for each in asked]
    assert ["written by a newer xcache" in str(failure) for failure in failures] == [True] * 4
    assert len(starts) == 1


def test_a_daemons_failure_is_told_to_those_who_listened_before_it(place, monkeypatch):
    monkeypatch.setattr(launching, "daemon_command", lambda: ["/bin/true"])
    launcher = Launcher(place.config())
    before = launcher.listen()
    others = pipes()
    assert launcher.start(before)
    (ready,) = pipes() - others
    assert until(lambda: select.select([ready], [], [], 0)[0])
    after = launcher.listen()
    assert launcher.failure(after) is None
    assert launcher.failure(before) == "it exited without a message"
    assert not launcher.start(before)
    assert launcher.start(after)


def test_why_no_process_could_be_made_is_heard_by_all(place, monkeypatch):
    launcher = Launcher(place.config())
    listening = launcher.listen()
    # More than the kernel hands to a process.
    monkeypatch.setenv("LC_MUCH", "x" * 200_000)
    with pytest.raises(UnavailableError, match="Argument list too long"):
        launcher.start(listening)
    assert "Argument list too long" in launcher.failure(listening)


def test_a_daemon_that_ends_without_a_word_is_no_daemon(place, monkeypatch):
    monkeypatch.setattr(launching, "daemon_command", lambda: ["/bin/true"])
    launcher = Launcher(place.config())
    launcher.start()
    with pytest.raises(UnavailableError, match="without a message"):
        launcher.wait(20)
    monkeypatch.setattr(launching, "daemon_command", lambda: ["/no/such/python"])
    assert until(launcher.start)
    with pytest.raises(UnavailableError, match="/no/such/python"):
        launcher.wait(20)


def test_a_daemon_that_says_nothing_is_waited_for_no_longer_than_was_asked(place, monkeypatch):
    idle = place.root / "idle"
    idle.write_text("#!/bin/sh\nexec sleep 2\n")
    idle.chmod(0o700)
    monkeypatch.setattr(launching, "daemon_command", lambda: [str(idle)])
    launcher = Launcher(place.config())
    launcher.start()
    with pytest.raises(UnavailableError, match=r"nothing within 0\.05 s"):
        launcher.wait(0.05)


def test_a_directory_that_cannot_be_made(place, connected):
    (place.root / "file").touch()
    with pytest.raises(StoreError, match="cannot be made: Not a directory"):
        Launcher(place.config(dir=place.root / "file" / "store")).start()
    with pytest.raises(StoreError, match="cannot be made: Not a directory"):
        Launcher(place.config(socket=place.root / "file" / "below" / "s")).start()
    client = connected(dir=place.root / "file" / "store")
    with pytest.raises(StoreError):
        client.report({"hits": 1})
    with pytest.raises(NotAskedError):
        client.report({"hits": 1})


def test_a_librarys_line_on_stderr_is_not_taken_for_a_failure(place, monkeypatch):
    """A preloaded library, an import profile or a warning writes there before the daemon does."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    launcher = Launcher(place.config())
    launcher.start()
    launcher.wait(20)
    assert place.answers()


def test_a_librarys_unfinished_line_is_no_failure_either(place, monkeypatch):
    (place.root / "sitecustomize.py").write_text("import sys; sys.stderr.write('loading...')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place.root), place.env["PYTHONPATH"]]))
    launcher = Launcher(place.config())
    launcher.start()
    launcher.wait(20)
    assert place.answers()


MANY_FILES = f"""
import os, resource
from xcache.config import config
from xcache.wire import protocol
from xcache.client.client import Client
from xcache.client.connection import Connection
from xcache.client.contents import Absent
from xcache.client.daemon_command import daemon_command
from xcache.client.launcher import Launcher
resource.setrlimit(resource.RLIMIT_NOFILE, (1500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.dup(0) for _ in range(1100)]
settings = config.load()
client = Client(settings, "test", Launcher(settings))
client.report({{"hits": 1}})
print(client.get({WANTED}).lease)
client.close()
"""


def test_a_program_with_more_than_a_thousand_open_files_can_start_one(place):
    said = place.run(MANY_FILES)
    assert (said.stdout, said.stderr) == ("0\n", "")


def test_a_configuration_file_may_be_named_from_where_the_program_runs(place, monkeypatch):
    """The daemon runs elsewhere, and is given the settings that were read."""
    (place.root / "here.toml").write_text('log = "debug"')
    monkeypatch.chdir(place.root)
    monkeypatch.setenv("XCACHE_CONFIG", "here.toml")
    place.env["XCACHE_CONFIG"] = "here.toml"
    launcher = Launcher(place.config())
    launcher.start()
    launcher.wait(20)
    assert place.answers()


def test_a_file_in_the_working_directory_does_not_pass_for_a_module(place, monkeypatch):
    monkeypatch.chdir(place.root)
    for name in ("xcached", "xcache", "sqlite3", "asyncio"):
        (place.root / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    launcher = Launcher(place.config())
    launcher.start()
    launcher.wait(20)
    assert place.answers()


def test_a_program_that_ends_at_once_says_nothing(place):
    """The launcher is there until the very end, when Python takes its modules apart."""
    said = place.run(
        "from xcache.config import config; from xcache.client.launcher import Launcher\n"
        "launcher = Launcher(config.load())\nassert launcher.start()\nitself = [launcher]; itself.append(itself)",
        PYTHONWARNINGS="always",
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_a_launcher_that_is_dropped_leaves_nothing_open(place):
    with_a_store(place)
    gc.collect()
    before = descriptors()
    launcher = Launcher(place.config())
    launcher.start()
    assert until(place.answers)
    del launcher
    gc.collect()
    assert descriptors() == before


def test_a_client_that_reached_the_daemon_keeps_nothing_of_its_start_open(place):
    with_a_store(place)
    config = place.config(timeout=20)
    launcher = Launcher(config)
    client = Client(config, "test", launcher)
    before = descriptors()
    client.report({"hits": 1})
    client.close()
    assert descriptors() == before


def test_the_daemon_that_was_started_is_the_one_that_answers(place, connected):
    client = connected()
    client.report({"hits": 1})
    with contextlib.closing(Connection(place.socket, 20.0, "test")) as connection:
        assert connection.welcome.pid == place.daemon_pid()


@pytest.mark.parametrize("way", ["by a shell", "without one"])
def test_a_child_forked_while_a_daemon_is_started_does_not_keep_its_lock(place, way):
    """Another thread forks meanwhile, as multiprocessing does."""
    command = [sys.executable, "-W", "ignore", "-c", program_text("fork_while_a_daemon_is_started"), way]
    done = subprocess.run(command, env=place.env, stdout=subprocess.PIPE, text=True, check=True, timeout=20)
    child = int(done.stdout)
    try:
        assert until(place.answers)
        place.stop()
        assert place.has_left()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("what", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_does_not_lock_files_is_no_daemon_that_starts(place, connected, monkeypatch, what):
    """Somebody who holds the lock would be waited for."""

    def cannot(descriptor, operation):
        raise OSError(what, os.strerror(what))

    monkeypatch.setattr(fcntl, "flock", cannot)
    waits = []
    monkeypatch.setattr(connector, "pause", waits.append)
    for _ in range(2):
        with pytest.raises(NoLocksError, match=f"does not lock files .{os.strerror(what)}"):
            Launcher(place.config()).start()
    with pytest.raises(NoLocksError):
        connected().get(get_message(KEY))
    assert waits == []
    assert not Launcher(place.config()).held()
    with pytest.raises(NoLocksError):
        take_lock(place.dir, None)


@pytest.mark.parametrize("name", ["daemon.lock", "daemon.log", "store.db", "library-digests.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(place, name):
    place.dir.mkdir(mode=0o700)
    os.mkfifo(place.dir / name)
    ran = place.run("import jax; print(jax.jit(lambda x: x + 1)(1))", XCACHE="1")
    assert ran.stdout == "2\n"
    command = [sys.executable, "-m", "xcache", "ls"]
    listed = subprocess.run(command, env=place.env, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in listed.stderr
    if name == "store.db":
        assert (listed.returncode, listed.stderr) == (1, f"xcache: {place.dir / name} is not a file\n")
    (place.dir / name).unlink()
