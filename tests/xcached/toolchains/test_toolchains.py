"""Toolchains come and go; the daemon serves their entries only while they are installed somewhere."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.conversation import Conversation, talking
from support.environments import Environment
from support.marks import thorough
from support.places import get_message, until

from xcache.wire import commands, protocol

# Seconds until a change must show: two are promised, the rest is for a slow machine.
SOON = 10.0


@pytest.fixture
def environment(place):
    return Environment(place.root / "venv", "1.0")


@pytest.fixture
def another(place):
    return Environment(place.root / "another", "2.0")


def served(place, key: str) -> bool:
    with talking(place) as talk:
        return talk.get(key) is not None


def states(place) -> dict[str, str]:
    """Return the state of each version."""
    rows = place.query("SELECT jaxlib_version, stale_since FROM toolchains")
    return {version: "live" if since is None else "stale" for version, since in rows}


GOING = {
    "an upgrade": lambda environment: environment.write("1.1"),
    "a rebuild of the same size": lambda environment: environment.write("1.x"),
    "a byte written in place": lambda environment: _alter(environment.library),
    "an uninstall": lambda environment: shutil.rmtree(environment.library.parent),
    "a deleted environment": lambda environment: shutil.rmtree(environment.root),
    "an environment moved away": lambda environment: environment.root.rename(environment.root.with_name("moved")),
    "a folder above moved away": lambda environment: environment.packages.parent.rename(environment.root / "moved"),
    "one that nobody may look into": lambda environment: _replace_by_file(environment.library.parent),
}


def _alter(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"!")


def _replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


@pytest.mark.parametrize(
    "going", thorough(GOING, usual=("an upgrade", "a byte written in place", "a deleted environment"))
)
def test_a_toolchain_goes_stale_without_any_program_running(place, environment, another, going):
    place.start_daemon()
    key, other = environment.put(place), another.put(place)
    assert served(place, key)
    GOING[going](environment)
    assert until(lambda: states(place)["1.0"] == "stale", SOON)
    assert not served(place, key)
    assert states(place)["2.0"] == "live"
    assert served(place, other)
    ((reason, entries),) = place.query("SELECT reason, entries FROM invalidations")
    assert str(environment.library) in reason
    assert entries == 1
    assert place.query("SELECT amount FROM statistics WHERE name = 'invalidated'") == [(1,)]


def test_a_touch_changes_nothing(place, environment):
    place.start_daemon()
    key = environment.put(place)
    os.utime(environment.library, (1e9, 1e9))
    (environment.library.parent / "__init__.py").write_text("")
    looked = time.time_ns()
    # Another toolchain that goes afterwards shows that the daemon has looked.
    other = Environment(place.root / "other", "3.0")
    other.put(place)
    shutil.rmtree(other.root)
    assert until(lambda: states(place)["3.0"] == "stale", SOON), looked
    assert states(place)["1.0"] == "live"
    assert served(place, key)


def test_going_back_makes_its_entries_live_again(place, environment):
    place.start_daemon()
    old = environment.put(place)
    environment.write("1.1")
    new = environment.put(place)
    assert until(lambda: states(place) == {"1.0": "stale", "1.1": "live"}, SOON)
    environment.write("1.0")
    environment.announce(place)
    # The toolchain is live at once, because the program that announced it asks next.
    assert served(place, old)
    assert until(lambda: states(place) == {"1.0": "live", "1.1": "stale"}, SOON)
    assert not served(place, new)


def test_a_toolchain_in_several_environments_lives_until_the_last_is_gone(place, environment):
    twin = Environment(place.root / "twin", "1.0")
    place.start_daemon()
    key = environment.put(place)
    twin.announce(place)
    shutil.rmtree(environment.root)
    assert until(lambda: ("gone",) in place.query("SELECT state FROM installations"), SOON)
    assert states(place) == {"1.0": "live"}
    assert served(place, key)
    shutil.rmtree(twin.root)
    assert until(lambda: states(place) == {"1.0": "stale"}, SOON)
    assert place.query("SELECT reason FROM invalidations") == [(f"{twin.library} is gone, the last of 2 places",)]
    assert not served(place, key)


def test_a_change_while_no_daemon_runs_is_noticed_by_the_next(place, environment, another):
    place.start_daemon()
    key, other = environment.put(place), another.put(place)
    place.stop()
    environment.write("1.1")
    place.start_daemon()
    assert until(lambda: states(place) == {"1.0": "stale", "2.0": "live"}, SOON)
    assert not served(place, key)
    place.stop()
    place.start_daemon()
    # The new daemon knows this from its first moment on.
    assert not served(place, key)
    assert served(place, other)


def test_an_announcement_by_a_program_older_than_the_removal_does_not_revive_a_toolchain(place, environment):
    place.start_daemon()
    key = environment.put(place)
    running_on = environment.announcement()
    environment.write("1.1")
    assert until(lambda: states(place)["1.0"] == "stale", SOON)
    with talking(place) as talk:
        assert talk.ask(running_on) == protocol.Done()
        # No client gets a lease or a wait: the compiled entry would not be served.
        assert talk.ask(get_message(key, wait=60.0)).lease == 0
        assert talk.ask(get_message(key, wait=60.0)).lease == 0
    assert states(place)["1.0"] == "stale"


def test_a_toolchain_the_daemon_cannot_see_stays_live(place, environment):
    """A path in a container leads elsewhere here, or nowhere."""
    place.start_daemon()
    message = environment.announcement()
    elsewhere = message._replace(files=[message.files[0] | {"path": "/nowhere/site-packages/jaxlib/libjax_common.so"}])
    with talking(place) as talk:
        assert talk.ask(elsewhere) == protocol.Done()
    assert until(lambda: place.query("SELECT state FROM installations") == [("elsewhere",)])
    assert states(place) == {"1.0": "live"}


@pytest.mark.parametrize("grace", ["0", "2s"])
def test_stale_entries_are_removed_after_the_grace(place, environment, another, grace):
    place.start_daemon(XCACHE_STALE_GRACE=grace)
    key = environment.put(place)
    for number in range(100):
        environment.put(place, f"{number}")
    other = another.put(place)
    shutil.rmtree(environment.root)
    assert until(lambda: states(place) == {"2.0": "live"}, 30)
    assert [found for (found,) in place.query("SELECT key FROM entries")] == [other]
    assert place.query("SELECT amount FROM statistics WHERE name = 'stale_removed'") == [(101,)]
    # A toolchain that is installed again works as before.
    restored = Environment(environment.root, "1.0")
    assert restored.put(place) == key
    assert served(place, key)


def test_stale_entries_are_evicted_first_whatever_their_compile_time(place, environment, another):
    place.start_daemon(XCACHE_MAX_SIZE="200000")
    environment.put(place, "dear", 50_000, 1000.0)
    before = [another.put(place, f"{number}", 40_000, 0.1) for number in range(2)]
    shutil.rmtree(environment.root)
    assert until(lambda: states(place) == {"1.0": "stale", "2.0": "live"}, SOON)
    after = [another.put(place, f"{number}", 40_000, 0.1) for number in range(2, 4)]
    with talking(place) as talk:
        assert talk.ask(commands.Sync()) == protocol.Done()
    assert {key for (key,) in place.query("SELECT key FROM entries")} == {*before, *after}


def test_a_pinned_stale_entry_is_kept_but_not_served(place, environment):
    place.start_daemon(XCACHE_STALE_GRACE="0")
    pinned, other = environment.put(place, "pinned"), environment.put(place, "other")
    with talking(place) as talk:
        assert isinstance(talk.ask(commands.Pin([pinned])), commands.Pinned)
    content = environment.library.read_bytes()
    environment.library.unlink()
    assert until(lambda: place.query("SELECT key FROM entries") == [(pinned,)], SOON), other
    assert not served(place, pinned)
    environment.library.write_bytes(content)
    environment.announce(place)
    assert served(place, pinned)


@pytest.mark.thorough
def test_hundreds_of_environments_cost_one_descriptor_and_few_threads(place):
    child = place.start_daemon()
    environments = [Environment(place.root / f"venv{number}", f"{number}") for number in range(300)]
    environments[0].put(place)
    before = _open_files(child.pid), _threads(child.pid)
    with talking(place) as talk:
        for environment in environments:
            assert talk.ask(environment.announcement()) == protocol.Done()
    # The connection of the put may still have been open at the first count.
    assert until(lambda: _open_files(child.pid) <= before[0] and _threads(child.pid) <= before[1])
    for environment in environments[::3]:
        shutil.rmtree(environment.root)
    assert until(lambda: sum(state == "stale" for state in states(place).values()) == 100, SOON)


@pytest.mark.thorough
def test_places_that_are_gone_make_room_for_new_ones(place, environment):
    """A CI with a fresh environment for each run announces thousands."""
    place.start_daemon()
    environment.put(place)
    message = environment.announcement()
    with talking(place) as talk:
        for number in range(1010):
            path = place.root / f"run{number}" / "jaxlib" / "libjax_common.so"
            path.parent.mkdir(parents=True)
            os.link(environment.library, path)
            file = message.files[0] | {"path": str(path)}
            assert talk.ask(message._replace(files=[file])) == protocol.Done()
            shutil.rmtree(path.parent.parent)
            if number % 300 == 0:
                assert until(lambda: place.query("SELECT count(*) FROM installations WHERE state = 'here'") == [(1,)])
    another = Environment(place.root / "another", "2.0")
    key = another.put(place)
    shutil.rmtree(another.root)
    assert until(lambda: states(place) == {"1.0": "live", "2.0": "stale"}, 20)
    assert not served(place, key)


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


SOUND = {"path": "/a/b", "size": 1, "mtime_ns": 1, "inode": 1, "digest": "0" * 64}


IMPLAUSIBLE = [
    [],
    [{}],
    [SOUND | {"path": "relative"}],
    [SOUND | {"path": "/a\0b"}],
    [SOUND | {"path": "/a" + "\1" * 4000}],
    [SOUND | {"digest": "\1" * 64}],
    [SOUND | {"size": -1}],
    [SOUND | {"size": 2**62}],
    [SOUND | {"inode": "1"}],
    [SOUND | {"mtime_ns": True}],
    [SOUND | {"digest": "short"}],
    [SOUND | {"more": 1}],
    [SOUND] * 501,
]


def test_implausible_files_are_refused(place):
    place.start_daemon()
    with talking(place) as talk:
        for files in IMPLAUSIBLE:
            answer = talk.ask(protocol.Announce("a" * 64, "cpu", "1.0", "", files))
            assert isinstance(answer, protocol.Refused), repr(files)[:200]
        assert isinstance(talk.ask(protocol.Announce("no digest", "cpu", "1.0", "", [SOUND])), protocol.Refused)
    assert place.query("SELECT * FROM installations") == []


def test_what_a_toolchain_is_said_to_be_must_be_proven(place, environment):
    """Anybody can announce anybody's toolchain, and its name is shown to all."""
    place.start_daemon()
    false = environment.announcement()._replace(platform="tpu\x1b", jaxlib_version="9.9", description="made up")
    known = "SELECT platform, jaxlib_version, description FROM toolchains"
    with talking(place) as talk:
        assert talk.ask(false) == protocol.Done()
        assert place.query(known) == [("", "", "")]
        assert talk.ask(false._replace(description=environment.description)) == protocol.Done()
        assert place.query(known) == [("", "", "")]
        assert talk.ask(environment.announcement()) == protocol.Done()
        # A known place is answered for before it is looked at.
        assert until(lambda: place.query(known) == [("cpu", "1.0", "jaxlib='1.0'")])
        assert talk.ask(false) == protocol.Done()
        assert place.query(known) == [("cpu", "1.0", "jaxlib='1.0'")]


def test_only_regular_files_are_read(place, environment):
    os.mkfifo(place.root / "fifo")
    place.start_daemon()
    message = environment.announcement()
    talk = Conversation(place)
    talk.greet()
    status = (place.root / "fifo").stat()
    file = SOUND | {"path": str(place.root / "fifo"), "size": status.st_size or 1}
    assert talk.ask(message._replace(toolchain="f" * 64, files=[file])) == protocol.Done()
    talk.close()
    # The thread that looks after toolchains is not stuck.
    environment.put(place)
    environment.write("1.1")
    assert until(lambda: states(place)["1.0"] == "stale", SOON)
