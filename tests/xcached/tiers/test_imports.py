"""An import stores all of a bundle or nothing, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import Shell
from support.conversation import Conversation, key_of, talking
from support.places import Place, until
from support.sharing import host

from xcache.errors import RefusedError
from xcache.wire import commands, protocol, runs
from xcache.wire.bundles import Bundle
from xcached.store.intake import MOST_IN_FLIGHT_BYTES
from xcached.tiers.staging import Staged, require_room

CONTENTS = {key_of(name): name.encode() * 20_000 for name in ("one", "two", "three")} | {key_of("four"): b"small"}


def fill(place: Place, contents: dict[str, bytes]) -> None:
    with talking(place) as talk:
        for key, content in contents.items():
            assert talk.put(key, content, key.encode()) == protocol.Stored(True)


@pytest.fixture
def bundle(tmp_path) -> Path:
    """A bundle of four entries."""
    path = tmp_path / "cache.xcb"
    with host() as here:
        fill(here, CONTENTS)
        assert "wrote 4 entries" in Shell(here).say("export", "-o", str(path))
    return path


def send(talk: Conversation, bundle: Path) -> list[protocol.Message]:
    """Send all entries of a bundle, and do not end the import."""
    answers = []
    with contextlib.closing(Bundle(bundle)) as opened:
        for name, size in opened.names():
            key, content = name.rpartition("/")[2], opened.get(name) or b""
            if size <= protocol.INLINE_LIMIT:
                answers.append(talk.ask(commands.ImportEntry(key, False, content, size)))
            else:
                answers.append(talk.ask(commands.ImportEntry(key, False, None, size), [content]))
    return answers


def entries_in(place: Place) -> set[str]:
    return {key for (key,) in place.query("SELECT key FROM entries")}


def unfinished_in(place: Place) -> int:
    return len([*(place.dir / "blobs" / "unfinished").iterdir()])


@contextlib.contextmanager
def half_way(place: Place, bundle: Path) -> Iterator[Conversation]:
    """Give a connection that has sent everything and not ended its import."""
    with talking(place) as talk:
        assert send(talk, bundle) == [protocol.Done()] * len(CONTENTS)
        assert entries_in(place) == set()
        assert unfinished_in(place) == 3
        yield talk


def test_all_entries_come_at_the_end(bundle):
    with host() as there, half_way(there, bundle) as talk:
        stored = talk.ask(commands.EndImport())
        assert (stored.entries, stored.programs) == (4, 0)
        assert stored.bytes == sum(map(len, CONTENTS.values()))
        assert {key: talk.get(key) for key in CONTENTS} == CONTENTS
        assert unfinished_in(there) == 0
        # There is nothing more.
        assert talk.ask(commands.EndImport()) == commands.Imported(0, 0, 0)
        assert send(talk, bundle) == [protocol.Stored(kept=False)] * len(CONTENTS)


def test_a_client_that_goes_in_the_middle_leaves_nothing(bundle):
    with host() as there:
        with half_way(there, bundle):
            pass
        assert until(lambda: unfinished_in(there) == 0)
        assert entries_in(there) == set()
        assert "stored 4 entries" in Shell(there).say("import", "--all", str(bundle))


def test_a_daemon_that_is_killed_in_the_middle_leaves_nothing(bundle):
    with host() as there:
        with half_way(there, bundle) as talk:
            os.kill(talk.pid, signal.SIGKILL)
            assert until(there.has_left)
        there.start_daemon()
        assert until(lambda: unfinished_in(there) == 0)
        assert entries_in(there) == set()


@pytest.mark.thorough
def test_a_daemon_that_leaves_answers_an_import_that_has_just_ended(tmp_path):
    """It would keep the lock of the store for ever, and no other daemon could start."""
    path = tmp_path / "large.xcb"
    with host() as here:
        fill(here, {key_of(name): os.urandom(40_000_000) for name in ("first", "second")})
        Shell(here).say("export", "-o", str(path))
    with host() as there:
        with talking(there) as talk:
            with contextlib.closing(Bundle(path)) as opened:
                for name, size in opened.names():
                    content = opened.get(name) or b""
                    talk.say(commands.ImportEntry(name.rpartition("/")[2], False, None, size), [content])
            # It waits its turn behind the entries, which take a while to check and to copy.
            talk.say(commands.EndImport())
            os.kill(talk.pid, signal.SIGTERM)
            assert until(there.has_left)
        assert unfinished_in(there) == 0
        there.start_daemon()


def test_one_entry_that_cannot_be_stored_keeps_the_others_out(bundle, tmp_path):
    with host(XCACHE_MAX_SIZE="1M") as there:
        large = tmp_path / "large.xcb"
        with host() as here:
            fill(here, CONTENTS | {key_of("large"): bytes(range(256)) * 8000})
            Shell(here).say("export", "-o", str(large))
        said = Shell(there).say("import", "--all", str(large), code=1)
        assert "nothing is taken over: " in said
        assert "more than the store may hold" in said
        assert entries_in(there) == set()
        assert unfinished_in(there) == 0
        assert [path for path in (there.dir / "blobs").rglob("*") if path.is_file()] == []
        assert "stored 4 entries" in Shell(there).say("import", "--all", str(bundle))


def test_a_user_may_have_so_much_waiting():
    def staged(uid: int, **amounts: int) -> Staged:
        found = Staged(uid)
        vars(found).update(amounts)
        return found

    mine = staged(1)
    require_room(mine, [mine, staged(2, objects=5000, in_memory=2**40, on_disk=2**40)])
    for full in ({"objects": 5000}, {"in_memory": 128 * 1024**2}, {"on_disk": MOST_IN_FLIGHT_BYTES}):
        with pytest.raises(RefusedError, match="imports of user 1 wait"):
            require_room(mine, [mine, staged(1, **full)])


@pytest.mark.thorough
def test_what_programs_wanted_takes_no_more_memory_than_it_came_in():
    """It comes compressed, and is a hundred times as large when it is decoded."""
    item = {"key": key_of("one"), "options": "o", "devices": "d" * 1900, "platform": "cpu", "seconds": 0.1}
    history = protocol.Remember("program", "", [item] * protocol.MAX_WANTED, {"o": b"o"})
    part = runs.pack(runs.Run(history, [], {}, key_of("a toolchain")), namespace="", signer=None)
    content = runs.joined([part] * 4)
    assert len(content) < protocol.INLINE_LIMIT
    with host() as there, talking(there) as talk:
        message = commands.ImportHistory("program", "", True, content, len(content))
        before = resident(talk.pid)
        for _ in range(8):
            assert talk.ask(message) == protocol.Done()
        assert resident(talk.pid) - before < 150 * 1024**2
        assert talk.ask(commands.EndImport()) == commands.Imported(0, 0, 8)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.thorough
def test_a_bundle_of_very_many_entries_goes_in_steps(tmp_path):
    contents = {key_of(f"entry {number}"): b"small" for number in range(5001)}
    path = tmp_path / "cache.xcb"
    with host() as here:
        fill(here, contents)
        Shell(here).say("export", "-o", str(path))
    with host() as there:
        assert "stored 5001 entries" in Shell(there).say("import", "--all", str(path)).replace(",", "")
        assert entries_in(there) == set(contents)
