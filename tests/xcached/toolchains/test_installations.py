"""The daemon tracks toolchains through links, replaced folders, other file systems, clocks that jump."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.environments import Environment
from support.places import digest, until
from support.stores import Shelf, shelf
from watchdog.utils import UnsupportedLibcError

from xcache.wire import commands, protocol
from xcache.wire.protocol import InstalledFile
from xcached.caller import Caller
from xcached.host.watching import Depth, Watcher, folders_of
from xcached.toolchains import toolchains
from xcached.toolchains.installations import ELSEWHERE, GONE, HERE, Installation, marks_of
from xcached.toolchains.rows import ToolchainRows
from xcached.toolchains.toolchains import Toolchains

# Well before anybody would look without having been told.
TOLD = 5.0


class Eye:
    """Tracks toolchains as a daemon does."""

    def __init__(self, made: Shelf, grace: float = 1e6, **how: Any) -> None:
        self.made = made
        self.records = ToolchainRows(made.store)
        self.toolchains = Toolchains(self.records, made.writer, lambda: grace, **how)

    def hear(self, found: protocol.Announce, pid: int | None = None, uid: int | None = None) -> None:
        """Announce a toolchain as a program does."""
        caller = Caller(pid or os.getpid(), os.getuid() if uid is None else uid)
        self.toolchains.announce(found, caller).done.result(20)

    def is_stale(self, environment: Environment) -> bool:
        """Return whether the toolchain goes stale sooner than a regular check would find it."""
        return until(lambda: self.toolchains.is_stale(environment.toolchain, os.getuid()), TOLD)

    def states(self) -> list[str]:
        """Return the states of all installations, as stored."""
        self.made.sync()
        return sorted(state for (state,) in self.made.query("SELECT state FROM installations"))


@contextlib.contextmanager
def eye(folder: Path, **how: Any) -> Iterator[Eye]:
    """Yield one with a store."""
    (folder / "store").mkdir(exist_ok=True)
    with shelf(folder / "store") as made:
        one = Eye(made, **how)
        try:
            yield one
        finally:
            one.toolchains.close(20)


@pytest.fixture(autouse=True)
def _may_be_seen_by_all(tmp_path):
    """The daemon looks only at what the user who names it could look at."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o011)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv", "1.0")


def test_a_link_moved_to_another_environment_makes_the_old_toolchain_stale(tmp_path):
    """Some users upgrade by moving the link ``current`` to the next environment."""
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


def test_a_library_linked_to_a_removed_file_goes_stale(tmp_path, environment):
    """uv makes such links with --link-mode=symlink, and its cache may be emptied."""
    cached = tmp_path / "cache" / "archive" / "library.so"
    cached.parent.mkdir(parents=True)
    environment.library.rename(cached)
    environment.library.symlink_to(cached)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        assert watched.states() == [HERE]
        shutil.rmtree(cached.parent)
        assert watched.is_stale(environment)


def test_a_copy_in_place_of_a_moved_environment_is_watched(tmp_path, environment):
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
        # The daemon has done everything that this made it do.
        time.sleep(0.6)
        toolchain = environment.toolchain
        environment.write("1.x")
        assert until(lambda: toolchain in watched.toolchains.stale, TOLD)


def test_a_reinstalled_toolchain_is_noticed_without_a_program(tmp_path, environment, monkeypatch):
    """A regular check finds it."""
    monkeypatch.setattr(toolchains, "_CHECK_SECONDS", 0.5)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        content = environment.library.read_bytes()
        environment.library.unlink()
        assert watched.is_stale(environment)
        environment.library.write_bytes(content)
        assert until(lambda: environment.toolchain not in watched.toolchains.stale)
        assert until(lambda: watched.states() == [HERE])


@pytest.mark.parametrize("error", [OSError(24, "too many"), UnsupportedLibcError("no inotify here")])
def test_changes_are_found_by_regular_checks_where_no_events_come(tmp_path, environment, monkeypatch, error):
    def fail(_class):
        raise error

    monkeypatch.setattr("watchdog.observers.inotify_c.InotifyFD._create_inotify_fd", classmethod(fail))
    monkeypatch.setattr(toolchains, "_CHECK_SECONDS", 0.5)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)


def test_a_change_before_the_watch_begins_is_noticed(tmp_path, environment, monkeypatch):
    class Late(Watcher):
        def watch(self, folders):
            if folders:
                environment.library.write_bytes(b"another")
            return super().watch(folders)

    monkeypatch.setattr(toolchains, "Watcher", Late)
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        assert watched.is_stale(environment)


def test_files_that_differ_from_the_announcement_count_as_elsewhere_and_are_not_read(
    tmp_path, environment, monkeypatch
):
    """They may be in a container; and a user could make the daemon read large files again and again."""
    message = environment.announcement()
    found = message._replace(files=[message.files[0] | {"mtime_ns": 1}])

    def never(*_arguments):
        raise AssertionError("read")

    monkeypatch.setattr("xcached.toolchains.installations.file_digest", never)
    with eye(tmp_path) as watched:
        watched.hear(found)
        assert watched.states() == [ELSEWHERE]
        watched.hear(message)
        assert watched.states() == [HERE]


def test_a_known_toolchain_that_is_served_needs_no_check_first(tmp_path, environment, monkeypatch):
    with eye(tmp_path) as watched:
        message, caller = environment.announcement(), Caller(os.getpid(), os.getuid())
        assert watched.toolchains.announce(message, caller).decides
        watched.hear(message)
        assert not watched.toolchains.announce(message, caller).decides
        environment.root.rename(tmp_path / "away")
        assert watched.is_stale(environment)
        assert watched.toolchains.announce(message, caller).decides


def test_constant_announcements_do_not_stop_the_checks(tmp_path, environment, monkeypatch):
    """Another user of the machine's daemon could send them."""
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        caller, found = Caller(os.getpid(), os.getuid()), environment.announcement()
        # Until it has settled that it is watched.
        time.sleep(1.0)
        monkeypatch.setattr(watched.toolchains, "_handle_announcement", lambda job: time.sleep(0.01))
        for _ in range(1000):
            watched.toolchains.announce(found, caller)
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        monkeypatch.undo()


def test_a_library_removed_during_its_announcement_is_gone(tmp_path, environment):
    """The announcement arrives before the daemon's own check."""
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        found = environment.announcement()
        shutil.rmtree(environment.root)
        watched.hear(found)
        assert watched.is_stale(environment)
        assert watched.states() == [GONE]


def test_a_library_announced_by_a_program_started_after_it_went_is_elsewhere(tmp_path, environment):
    """A daemon started in a container sees other file systems than its users' programs."""
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


def test_a_stale_time_in_the_future_counts_as_now(tmp_path, environment, monkeypatch):
    """The clock was ten years ahead when it went stale; it must not stay for ten years more."""
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


def test_invalid_rows_are_skipped(tmp_path, environment):
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


def test_files_that_cannot_be_checked_are_not_gone(tmp_path, environment, monkeypatch):
    """A ticket for a network file system may have expired."""
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


ALICE, BOB = 60002, 60003


def alone(reader: int, writer: int) -> bool:
    """Trust nobody else."""
    return reader == writer


def test_a_removed_place_makes_nothing_stale_for_users_who_do_not_trust_its_announcer(tmp_path, environment):
    """Bob announces Alice's toolchain in a folder of his own, and removes that."""
    copy = Environment(tmp_path / "bobs", "1.0")
    with eye(tmp_path, reads=alone) as watched:
        watched.hear(environment.announcement(), uid=ALICE)
        watched.hear(copy.announcement(), uid=BOB)
        shutil.rmtree(copy.root)
        assert until(lambda: watched.toolchains.is_stale(copy.toolchain, BOB), TOLD)
        assert not watched.toolchains.is_stale(environment.toolchain, ALICE)
        # It is not stale for a user who has announced nothing either.
        assert not watched.toolchains.is_stale(environment.toolchain, 60004)
        assert watched.toolchains.useless() == {(copy.toolchain, BOB)}
        watched.made.sync()
        assert watched.made.query("SELECT stale_since FROM toolchains") == [(None,)]
        # Bob's announcement does not keep Alice's toolchain alive after she removed it.
        watched.hear(Environment(tmp_path / "again", "1.0").announcement(), uid=BOB)
        shutil.rmtree(environment.root)
        assert until(lambda: watched.toolchains.is_stale(environment.toolchain, ALICE), TOLD)
        assert not watched.toolchains.is_stale(environment.toolchain, BOB)


def test_a_place_of_a_trusted_user_keeps_a_toolchain_live(tmp_path, environment):
    with eye(tmp_path, reads=lambda reader, writer: writer in (reader, 0)) as watched:
        watched.hear(environment.announcement(), uid=0)
        shutil.rmtree(environment.root)
        assert until(lambda: watched.toolchains.is_stale(environment.toolchain, ALICE), TOLD)
        watched.hear(Environment(tmp_path / "own", "1.0").announcement(), uid=ALICE)
        assert not watched.toolchains.is_stale(environment.toolchain, ALICE)
        assert watched.toolchains.is_stale(environment.toolchain, BOB)


@pytest.mark.parametrize("when", ["announced", "looked at"])
def test_a_hanging_file_system_stops_the_checks_of_its_user_only(tmp_path, environment, monkeypatch, when):
    bobs = Environment(tmp_path / "bobs", "2.0")
    hangs, over = threading.Event(), threading.Event()
    look = Installation.look

    def hanging(self, *, reads=True):
        if self.uid == BOB and hangs.is_set():
            over.wait(60)
        return look(self, reads=reads)

    monkeypatch.setattr(Installation, "look", hanging)
    with eye(tmp_path, reads=alone) as watched:
        watched.hear(environment.announcement(), uid=ALICE)
        if when == "looked at":
            watched.hear(bobs.announcement(), uid=BOB)
        hangs.set()
        try:
            for number in range(3):
                watched.hear(bobs.announcement()._replace(toolchain=digest(b"%d" % number)), uid=BOB)
            shutil.rmtree(environment.root)
            assert until(lambda: watched.toolchains.is_stale(environment.toolchain, ALICE), TOLD)
            again = Environment(tmp_path / "again", "1.0")
            watched.hear(again.announcement(), uid=ALICE)
            assert not watched.toolchains.is_stale(environment.toolchain, ALICE)
            shutil.rmtree(bobs.root)
        finally:
            hangs.clear()
            over.set()
        if when == "looked at":
            assert until(lambda: watched.toolchains.is_stale(bobs.toolchain, BOB), 20)


def test_a_file_replaced_by_a_fifo_does_not_block_the_check(tmp_path, monkeypatch):
    """It is replaced between the stat and the read."""
    library, fifo = tmp_path / "library", tmp_path / "fifo"
    library.write_bytes(b"content")
    os.mkfifo(fifo)
    # The times have changed, so the content is read.
    marks = [InstalledFile(str(path), len(b"content"), 1, 1, digest(b"content")) for path in (library, fifo)]
    of_library, of_fifo = (Installation("t", os.getuid(), (mark,), HERE, 0.0) for mark in marks)
    assert of_library.look() == HERE
    before = library.stat()
    monkeypatch.setattr(Path, "stat", lambda path: before)
    assert of_fifo.look() == ELSEWHERE
    assert of_fifo.reason == f"{fifo}: is being replaced"


def test_one_users_announcements_are_bounded_in_bytes(tmp_path):
    """Two hundred announcements of 500 long paths each took 183 MB."""
    with eye(tmp_path, reads=alone) as watched:
        for number in range(40):
            marks = [
                {"path": f"/{number}/{'x' * 3000}/{n}", "size": 1, "mtime_ns": 1, "inode": 1, "digest": digest(b"")}
                for n in range(100)
            ]
            watched.hear(protocol.Announce(digest(b"%d" % number), "cpu", "1", "", marks), uid=BOB)
        watched.made.sync()
        ((size,),) = watched.made.query("SELECT sum(length(files)) FROM installations")
        assert 2_000_000 < size < 5_000_000
        watched.hear(Environment(tmp_path / "own", "1.0").announcement(), uid=ALICE)
        assert HERE in watched.states()


def test_an_invalidation_without_losses_pushes_none_out_of_the_list(tmp_path, environment):
    with eye(tmp_path) as watched:
        watched.hear(environment.announcement())
        shutil.rmtree(environment.root)
        assert watched.is_stale(environment)
        watched.made.call(lambda _: watched.records.invalidated("nothing", commands.Removed(0, 0)))
        watched.made.sync()
        assert watched.made.query("SELECT * FROM invalidations") == []


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


@pytest.mark.parametrize("character", ["a", '"', "\\", "\N{SNOWMAN}", "\N{GRINNING FACE}"])
def test_an_announcement_weighs_about_as_much_as_its_row(tmp_path, environment, character):
    message = environment.announcement()
    file = message.files[0] | {"path": "/" + character * 4000, "mtime_ns": 2**62, "inode": 2**62}
    with eye(tmp_path) as watched:
        watched.hear(message._replace(files=[file] * 20))
        watched.made.sync()
        ((written,),) = watched.made.query("SELECT length(CAST(files AS BLOB)) FROM installations")
    known = Installation(message.toolchain, 0, marks_of([file] * 20), HERE, 0.0)
    assert written <= known.weight <= 1.2 * written
