"""A program in bad surroundings compiles, prints at most one line about each trouble, and loses no entry."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest
from support.marks import thorough
from support.places import new_place

COMPILE = """
import json, time, jax, jax.numpy as jnp, numpy as np
x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
constant = np.random.RandomState(0).randn(64, 512).astype(np.float32)
results = [np.asarray(jax.jit(lambda v, k=k: v * k + 1)(x)).tolist() for k in range(3)]
results.append(np.asarray(jax.jit(lambda v: v.reshape(-1) @ constant)(x)).tolist())
import dataclasses, xcache
print(json.dumps([results, dataclasses.asdict(xcache.stats())]))
"""
PROGRAMS = 4


def run(place, **environment):
    result = place.run(COMPILE, **({"XCACHE": "1"} | environment))
    assert result.returncode == 0, result.stderr
    results, stats = json.loads(result.stdout)
    return results, stats, result.stderr


@pytest.fixture(scope="module")
def expected():
    with new_place() as place:
        return run(place, XCACHE="0")[0]


def compiled_in_spite_of(found, expected, *words: str) -> dict[str, int]:
    """The program is right, compiled everything, and said one line with these words."""
    results, stats, stderr = found
    assert results == expected
    assert stats["hits"] == 0
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr
    return stats["errors"]


def test_a_socket_path_that_is_too_long(place, expected):
    found = run(place, XCACHE_SOCKET=f"{place.root}/{'x' * 120}")
    assert compiled_in_spite_of(found, expected, "too long for a Unix socket", "XCACHE_SOCKET") == {}


def test_a_directory_that_cannot_be_made(place, expected):
    file = place.root / "file"
    file.touch()
    found = run(place, XCACHE_DIR=str(file / "store"))
    assert compiled_in_spite_of(found, expected, str(file), "cannot be made")


@pytest.mark.thorough
def test_a_read_only_file_system(place, expected):
    place.dir.mkdir(mode=0o700)
    mounted(["mount", "--bind", str(place.dir), str(place.dir)])
    try:
        mounted(["mount", "-o", "remount,ro,bind", str(place.dir)])
        found = run(place)
    finally:
        subprocess.run(["umount", str(place.dir)], check=True)
    assert compiled_in_spite_of(found, expected, str(place.dir), "cannot be written")


def mounted(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting is not permitted here: {result.stderr.strip()}")


@pytest.mark.thorough
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_that_belongs_to_someone_else(place, expected):
    place.dir.mkdir(mode=0o700)
    os.chown(place.dir, 12345, 12345)
    found = run(place)
    assert compiled_in_spite_of(found, expected, "belongs to another user (uid 12345)")
    assert list(place.dir.iterdir()) == []


def test_a_directory_that_others_can_write(place, expected):
    place.dir.mkdir()
    place.dir.chmod(0o777)
    assert compiled_in_spite_of(run(place), expected, "can be written by other users")


@pytest.mark.thorough
def test_a_full_disk(place, expected):
    place.dir.mkdir(mode=0o700)
    mounted(["mount", "-t", "tmpfs", "-o", "size=300k,mode=700", "tmpfs", str(place.dir)])
    try:
        results, stats, stderr = run(place)
        assert results == expected
        assert stderr.count("\n") <= 1
        # Acknowledged entries are there in spite of it, and no entry is there by half.
        kept = stats["stores"]
        _, again, _ = run(place, XCACHE="readonly")
        assert again["hits"] >= kept
        place.stop()
    finally:
        subprocess.run(["umount", "-l", str(place.dir)], check=True)


@pytest.mark.thorough
def test_a_store_of_a_newer_xcache(place, expected):
    run(place)
    place.stop()
    database = sqlite3.connect(place.dir / "store.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
    before = (place.dir / "store.db").read_bytes()
    # More than any machine needs: what a daemon says before it gives up is heard when it is said.
    results, stats, stderr = run(place, XCACHE_TIMEOUT="20s")
    assert (results, stats["hits"]) == (expected, 0)
    assert stderr.count("\n") == 1
    assert "written by a newer xcache" in stderr
    assert (place.dir / "store.db").read_bytes() == before


@pytest.mark.thorough
def test_a_database_that_is_none(place, expected):
    place.dir.mkdir(mode=0o700)
    (place.dir / "store.db").write_bytes(b"this is not a database " * 1000)
    results, stats, stderr = run(place)
    assert (results, stats["hits"], stderr) == (expected, 0, "")
    # It is kept under another name, and a fresh one was begun.
    assert len(list(place.dir.glob("store.db.damaged-*"))) == 1
    assert run(place)[1]["hits"] == PROGRAMS


def rows(place, sql: str, *arguments: object) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database, database:
        return database.execute(sql, arguments).fetchall()


def alter(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "truncated": content[:middle],
        "emptied": b"",
        "lengthened": content + b"more",
    }[how]


@pytest.mark.parametrize("how", thorough(["flipped", "truncated", "emptied", "lengthened"], usual=("flipped",)))
def test_altered_entries_are_noticed_and_heal(place, expected, how):
    """In rows and in files, all at once; the next run finds all of them whole again."""
    run(place)
    inline = rows(place, "SELECT digest, content FROM blobs WHERE content IS NOT NULL")
    files = [path for path in (place.dir / "blobs").glob("??/*") if path.is_file()]
    assert len(inline) >= 3
    assert files
    for digest, content in inline:
        rows(place, "UPDATE blobs SET content = ? WHERE digest = ?", alter(content, how), digest)
    for path in files:
        path.write_bytes(alter(path.read_bytes(), how))
    results, stats, stderr = run(place)
    assert results == expected
    assert (stats["hits"], stats["misses"]) == (0, PROGRAMS)
    assert stats["errors"] == {"damaged entry": PROGRAMS}
    assert stderr.count("\n") == 1
    results, stats, stderr = run(place)
    assert (results, stats["hits"], stats["misses"], stats["errors"], stderr) == (expected, PROGRAMS, 0, {}, "")


@pytest.mark.thorough
def test_an_entry_that_stands_under_another_key_is_not_taken_for_its_own(place, expected):
    run(place)
    place.stop()
    keys = [key for (key,) in rows(place, "SELECT key FROM entries ORDER BY key")]
    blobs = dict(rows(place, "SELECT key, blob FROM entries"))
    for key, neighbour in zip(keys, keys[1:] + keys[:1], strict=True):
        rows(place, "UPDATE entries SET blob = ? WHERE key = ?", blobs[neighbour], key)
    results, stats, _ = run(place)
    assert results == expected
    assert (stats["hits"], stats["errors"]) == (0, {"damaged entry": PROGRAMS})


@pytest.mark.thorough
def test_a_file_that_is_gone(place, expected):
    run(place)
    for path in (place.dir / "blobs").glob("??/*"):
        path.unlink()
    results, stats, stderr = run(place)
    assert (results, stats["hits"], stats["misses"], stats["errors"], stderr) == (expected, PROGRAMS - 1, 1, {}, "")
    _, stats, _ = run(place)
    assert (stats["hits"], stats["misses"]) == (PROGRAMS, 0)


@pytest.mark.thorough
def test_a_daemon_that_is_stopped_costs_one_timeout(place, expected):
    run(place)
    pid = place.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        # Loading ahead is off: it would meet the stopped daemon as well, at the same time.
        results, stats, stderr = run(place, XCACHE_TIMEOUT="500ms", XCACHE_PREFETCH="0")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (results, stats["hits"]) == (expected, 0)
    # The others were not even tried.
    assert stats["errors"]["no answer"] == 1
    assert stderr.count("\n") <= 2


@pytest.mark.thorough
def test_a_daemon_that_dies_while_a_program_runs(place, expected):
    pid_file = place.root / "pid"
    kill = f"import os, signal; os.kill(int(open({str(pid_file)!r}).read()), signal.SIGKILL); time.sleep(0.2)"
    source = COMPILE.replace("results.append", f"{kill}\nresults.append")
    place.start_daemon()
    pid_file.write_text(str(place.daemon_pid()))
    result = place.run(source, XCACHE="1")
    assert result.returncode == 0, result.stderr
    results, _ = json.loads(result.stdout)
    assert results == expected
    assert result.stderr == ""
    # Another was started, and what was acknowledged by either is there.
    _, again, _ = run(place)
    assert again["misses"] == 0


def test_without_autostart_and_daemon_everything_compiles(place, expected):
    results, stats, stderr = run(place, XCACHE_AUTOSTART="0")
    assert (results, stats["hits"]) == (expected, 0)
    assert stderr.count("\n") == 1
    assert not Path(place.socket).exists()
