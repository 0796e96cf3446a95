"""Digests of many files: the same wherever and whenever they were installed, and read again only after a change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xcache.keys import file_digests
from xcache.keys.file_digests import MEMO, FileDigests
from xcache.wire import hashing


@pytest.fixture
def tree(tmp_path):
    """A folder of files that have settled."""
    folder = tmp_path / "tree"
    (folder / "inner").mkdir(parents=True)
    for name in ("a.py", "inner/b.py", "c.so"):
        (folder / name).write_text(f"what is in {name}")
        os.utime(folder / name, (1e9, 1e9))
    return folder


def digest(folder, mark="m", memo=None):
    digests = FileDigests(memo)
    found = digests.of_tree(mark, {str(path.relative_to(folder)): path for path in folder.rglob("*.*")})
    digests.save()
    return found


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(file_digests, "is_settled", lambda _: True)


def test_the_place_and_the_time_do_not_count(tree, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    os.utime(copy / "a.py", (2e9, 2e9))
    assert digest(copy) == digest(tree)


@pytest.mark.parametrize("name", ["a.py", "inner/b.py", "c.so"])
def test_each_content_and_name_counts(tree, name):
    before = digest(tree)
    (tree / name).write_text("another content")
    changed = digest(tree)
    (tree / name).rename(tree / "d.py")
    assert len({before, changed, digest(tree)}) == 3


def test_a_tree_is_read_once_for_each_mark(tree, tmp_path, settled, monkeypatch):
    memo = tmp_path / "memo"
    first = digest(tree, "one", memo)
    monkeypatch.setattr(file_digests.hashlib, "file_digest", None)
    assert digest(tree, "one", memo) == first
    with pytest.raises(TypeError):
        digest(tree, "another", memo)


def test_few_trees_are_remembered(tree, tmp_path, settled):
    memo = tmp_path / "memo"
    for number in range(20):
        digest(tree, f"{number}", memo)
    known = json.loads((memo / MEMO).read_text())
    assert [name for name in known if name.startswith("tree ")] == [f"tree {number}" for number in range(4, 20)]


def test_a_tree_that_has_just_changed_is_not_remembered(tree, tmp_path):
    (tree / "a.py").write_text("just now")
    digest(tree, "m", tmp_path / "memo")
    memo = tmp_path / "memo" / MEMO
    assert not memo.exists() or "tree m" not in memo.read_text()


def test_one_of_several_threads_reads_a_file(tree, settled, monkeypatch):
    wanting, seen = threading.Barrier(4), []

    def read(file, threads):
        seen.append(threads)
        return hashing.file_digest(file, threads)

    monkeypatch.setattr(file_digests, "file_digest", read)
    monkeypatch.setattr(file_digests, "_read", {})

    def want(_):
        digests = FileDigests(None)
        wanting.wait(30)
        return digests.of(tree / "c.so").digest

    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(want, range(4))} == {hashing.digest(b"what is in c.so")}
    assert len(seen) == 1
    # Another file at its place is read.
    (tree / "c.so").write_text("something else")
    assert FileDigests(None).of(tree / "c.so").digest == hashing.digest(b"something else")


FORK = """
import os, sys, threading
from pathlib import Path
from xcache.keys import file_digests

with file_digests._reading:
    if not os.fork():
        want = threading.Thread(target=file_digests.FileDigests(None).of, args=(Path(sys.argv[1]),), daemon=True)
        want.start()
        want.join(20)
        os._exit(want.is_alive())
print(os.wait()[1])
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent(tree):
    # This process may have threads of jax, whose fork would be another question.
    done = subprocess.run([sys.executable, "-c", FORK, str(tree / "a.py")], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")
