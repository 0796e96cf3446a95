"""Toolchains as a daemon sees them: links, folders in another's place, other file systems, clocks that jump."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import Environment
from places import digest, until
from stores import Shelf, shelf
from watchdog.utils import UnsupportedLibcError

from xcache import protocol
from xcached import toolchains
from xcached.caller import Caller
from xcached.installations import ELSEWHERE, GONE, HERE, Installation, marks_of
from xcached.records import Records
from xcached.toolchains import Toolchains
from xcached.watching import Depth, Watcher, folders_of

# Well before anybody would look without having been told.
TOLD = 5.0


class Eye:
    """Looks after toolchains as in a daemon."""

    def __init__(self, made: Shelf, grace: float = 1e6) -> None:
        self.made = made
        self.records = Records(made.store)
        self.toolchains = Toolchains(self.records, made.writer, lambda: grace)

    def hear(self, found: protocol.Announce, pid: int | None = None) -> None:
        """A program announces what it found."""
        self.toolchains.announce(found, Caller(pid or os.getpid(), os.getuid())).done.result(20)

    def is_stale(self, environment: Environment) -> bool:
        """Whether it becomes stale before anybody would look who was not told."""
        return until(lambda: environment.toolchain in self.toolchains.stale, TOLD)

    def states(self) -> list[str]:
        """Of all installations, as they are written down."""
        self.made.sync()
        return sorted(state for (state,) in self.made.query("SELECT state FROM installations"))


@contextlib.contextmanager
def eye(folder: Path, **how: float) -> Iterator[Eye]:
    """One with a store, for as long as the block lasts."""
    (folder / "store").mkdir(exist_ok=True)
    with shelf(folder / "store") as made:
        one = Eye(made, **how)
        try:
            yield one
        finally:
            one.toolchains.close(20)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv", "1.0")


def test_a_link_that_leads_elsewhere(tmp_path):
    """Where the current one of several environments is a link, an upgrade is one that leads to the next."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (tmp_path / "current").symlink_to("first")
    current = Environment(tmp_path / "current", "1.0")
    shutil.copytree(first, second)
    with eye(tmp_path) as watched:
        watched.hear(current.announcement())
        assert watched.states() == [HERE]
        (second / current.library.relative_to(current.root)).write_bytes(b"another")
        (tmp_path / "next").symlink_to("second")
        (tmp_path / "next").rename(tmp_path / "current")
        assert watched.is_stale(current)


def test_a_library_that_is_a_link_to_what_goes(tmp_path, environment):
    """As uv makes them with --link-mode=symlink: its cache is emptied."""
    cached = tmp_path / "cache" / "archive" / "library.so"
    cached.parent.mkdir(parents=True)
    environment.library.rename(cached)
    environment.library.symlink_to(cached)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        assert watched.states() == [HERE]
        shutil.rmtree(cached.parent)
        assert watched.is_stale(environment)


def test_a_copy_in_the_place_of_one_that_was_moved_away_is_watched(tmp_path, environment):
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        environment.root.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", environment.root)
        inode = environment.library.stat().st_ino
        watched.hear(environment.announcement())
        watched.made.sync()
        ((files,),) = watched.made.query("SELECT files FROM installations")
        assert str(inode) in files
        assert watched.toolchains.stale == frozenset()
        # Whatever that made the daemon do, it has done.
        time.sleep(0.6)
        environment.write("1.x")
        assert until(lambda: digest(b"toolchain 1.0") in watched.toolchains.stale, TOLD)


def test_going_back_is_noticed_without_a_program_too(tmp_path, environment, monkeypatch):
    """By looking now and then."""
    monkeypatch.setattr(toolchains, "_LOOK_EVERY", 0.5)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        content = environment.library.read_bytes()
        environment.library.unlink()
        assert watched.is_stale(environment)
        environment.library.write_bytes(content)
        assert until(lambda: environment.toolchain not in watched.toolchains.stale)
        assert until(lambda: watched.states() == [HERE])


@pytest.mark.parametrize("error", [OSError(24, "too many"), UnsupportedLibcError("no inotify here")])
def test_where_nothing_tells_of_changes_somebody_looks(tmp_path, environment, monkeypatch, error):
    def fail(_class):
        raise error

    monkeypatch.setattr("watchdog.observers.inotify_c.InotifyFD._create_inotify_fd", classmethod(fail))
    monkeypatch.setattr(toolchains, "_LOOK_EVERY", 0.5)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)


def test_what_changes_before_it_is_watched_is_noticed(tmp_path, environment, monkeypatch):
    class Late(Watcher):
        def watch(self, folders):
            if folders:
                environment.library.write_bytes(b"another")
            return super().watch(folders)

    monkeypatch.setattr(toolchains, "Watcher", Late)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        assert watched.is_stale(environment)


def test_what_looks_different_from_what_is_announced_is_elsewhere_and_not_read(tmp_path, environment, monkeypatch):
    """In a container perhaps; and anybody could have the daemon read large files again and again."""
    message = environment.announcement()
    found = message._replace(files=[message.files[0] | {"mtime_ns": 1}])

    def never(*_arguments):
        raise AssertionError("read")

    monkeypatch.setattr("xcached.installations.hashlib.file_digest", never)
    with eye(tmp_path) as watched:
        watched.hear(found)
        assert watched.states() == [ELSEWHERE]
        watched.hear(message)
        assert watched.states() == [HERE]


def test_what_is_known_and_served_need_not_be_looked_at_first(tmp_path, environment, monkeypatch):
    with eye(tmp_path) as watched:
        message, caller = environment.announcement(), Caller(os.getpid(), os.getuid())
        assert watched.toolchains.announce(message, caller).decides
        watched.hear(message)
        assert not watched.toolchains.announce(message, caller).decides
        environment.root.rename(tmp_path / "away")
        assert watched.is_stale(environment)
        assert watched.toolchains.announce(message, caller).decides


def test_who_announces_all_the_time_keeps_nobody_from_looking(tmp_path, environment, monkeypatch):
    """On a machine's daemon that would be somebody else."""
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        caller, found = Caller(os.getpid(), os.getuid()), environment.announcement()
        # Until it has settled that it is watched.
        time.sleep(1.0)
        monkeypatch.setattr(watched.toolchains, "_announced", lambda job: time.sleep(0.01))
        for _ in range(1000):
            watched.toolchains.announce(found, caller)
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        monkeypatch.undo()


def test_what_goes_while_a_program_announces_it_is_gone(tmp_path, environment):
    """The daemon hears of it before it has looked."""
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        found = environment.announcement()
        shutil.rmtree(environment.root)
        watched.hear(found)
        assert watched.is_stale(environment)
        assert watched.states() == [GONE]


def test_what_a_program_found_that_was_started_later_is_elsewhere(tmp_path, environment):
    """A daemon that was started in a container, by a program of its users, sees other file systems than they do."""
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        found = environment.announcement()
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        watched.hear(found)
        assert watched.is_stale(environment)
        # The kernel tells when a program was started in hundredths.
        time.sleep(0.05)
        with subprocess.Popen(["sleep", "60"]) as later:
            try:
                watched.hear(found, later.pid)
            finally:
                later.kill()
        assert watched.toolchains.stale == frozenset()
        assert watched.states() == [ELSEWHERE]


def test_nothing_is_stale_since_a_moment_that_is_still_to_come(tmp_path, environment, monkeypatch):
    """The clock was ahead when it went stale: it would stay for as many years."""
    now = time.time
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        monkeypatch.setattr(time, "time", lambda: now() + 10 * 365 * 86400)
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        watched.made.sync()
        monkeypatch.undo()
    with eye(tmp_path) as watched:
        watched.made.sync()
        ((since,),) = watched.made.query("SELECT stale_since FROM toolchains")
        assert since <= now()
        assert watched.is_stale(environment)


def test_a_jump_ahead_does_not_end_the_grace(tmp_path, environment, monkeypatch):
    now = time.time
    another = Environment(tmp_path / "another", "2.0")
    with eye(tmp_path, grace=86400.0) as watched:
        for one in (environment, another):
            watched.hear(one.announcement())
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        monkeypatch.setattr(time, "time", lambda: now() + 10 * 365 * 86400)
        shutil.rmtree(another.root)
        assert watched.is_stale(another)
        # It purges after it has looked.
        watched.hear(Environment(tmp_path / "third", "3.0").announcement())
        assert len(watched.toolchains.stale) == 2


def test_rows_that_cannot_be_are_passed_over(tmp_path, environment):
    another = Environment(tmp_path / "another", "2.0")
    with eye(tmp_path) as watched:
        for one in (environment, another):
            watched.hear(one.announcement())
        watched.made.sync()
        watched.made.change("UPDATE installations SET files = '[[1' WHERE toolchain = ?", environment.toolchain)
        watched.made.change("UPDATE toolchains SET stale_since = 'never' WHERE digest = ?", environment.toolchain)
    with eye(tmp_path) as watched:
        assert [one.toolchain for one in watched.records.installations()] == [another.toolchain]
        assert watched.toolchains.stale <= {environment.toolchain}
        shutil.rmtree(another.root)
        assert watched.is_stale(another)


def test_what_cannot_be_looked_at_is_not_gone(tmp_path, environment, monkeypatch):
    """A ticket of the network's file system has run out, for example."""
    file = environment.announcement().files[0]
    installation = Installation(environment.toolchain, 1, marks_of([file]), HERE, 0.0)
    assert installation.look() == HERE

    def refused(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refused)
    assert installation.look() == ELSEWHERE
    monkeypatch.undo()
    environment.library.unlink()
    assert installation.look() == GONE


def test_folders_to_watch(tmp_path):
    root = Path(os.path.realpath(tmp_path))
    (root / "real" / "lib").mkdir(parents=True)
    (root / "links").mkdir()
    (root / "links" / "venv").symlink_to("../real")
    (root / "loop").symlink_to("loop")
    (root / "real" / "lib" / "a.so").write_text("")
    (root / "real" / "lib" / "b.so").symlink_to("../b.so.1")
    paths = [str(root / "links" / "venv" / "lib" / name) for name in ("a.so", "b.so")]
    found = folders_of([*paths, str(root / "loop" / "c.so")])
    assert found[str(root / "real" / "lib")] == Depth.FILES
    assert found[str(root / "links")] == Depth.NAMES
    assert found[str(root / "real")] == Depth.FILES
    assert found[str(root.parent)] == Depth.STAYS
