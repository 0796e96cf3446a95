"""The processors are taken when more threads want one than there are, and one more."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from support.places import until

from xcache.prefetch import processors
from xcache.prefetch.processors import Processors


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(processors, "_VALID_SECONDS", 0.0)


@pytest.fixture
def found():
    with contextlib.closing(Processors()) as made:
        made.open()
        yield made


def test_more_busy_processes_than_processors_take_them_all(found):
    # Each ends by itself, should this test be killed.
    busy = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    children = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range((os.cpu_count() or 1) + 2)]
    try:
        assert until(found.are_taken)
    finally:
        for child in children:
            child.kill()
            child.wait(20)


@pytest.mark.parametrize(
    ("looks", "taken"), [((9, 1, 9), True), ((1, 9, 1), False), ((3,) * 3, False), ((4,) * 3, True)]
)
def test_one_look_that_meets_a_thread_by_chance_decides_nothing(monkeypatch, found, looks, taken):
    contents = iter(looks)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "pread", lambda *_: b"0.5 0.4 0.3 %d/80 4711\n" % next(contents))
    assert found.are_taken() is taken


def test_an_answer_holds_for_a_moment(monkeypatch, found):
    monkeypatch.setattr(processors, "_VALID_SECONDS", 3600.0)
    monkeypatch.setattr(os, "cpu_count", lambda: -1)
    assert found.are_taken()
    monkeypatch.setattr(os, "cpu_count", lambda: 10_000)
    assert found.are_taken()


@pytest.mark.parametrize("content", [b"", b"0.1 0.2 0.3 x/80 1\n"])
def test_a_system_that_does_not_say_so_is_not_taken(monkeypatch, found, content):
    monkeypatch.setattr(os, "pread", lambda *_: content)
    assert not found.are_taken()


def test_a_system_without_the_file_is_not_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(processors, "_RUNNABLE", str(tmp_path / "none"))
    found = Processors()
    found.open()
    assert not found.are_taken()


def test_a_file_that_the_program_closed_is_not_read_and_no_other_in_its_place(monkeypatch, tmp_path):
    found = Processors()
    found.open()
    number = found._file.fileno()
    os.close(number)
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, number)
    try:
        assert found._wanting() == 0
        del found
        # Nor is it closed.
        os.fstat(number)
    finally:
        os.close(other)
        if other != number:
            os.close(number)


def test_the_numbers_of_the_standard_streams_stay_free():
    program = (
        "import os\nos.close(0)\nfrom xcache.prefetch.processors import Processors\n"
        "found = Processors()\nfound.open()\n"
        "print(found._wanting() > 0, found._file.fileno() > 2, os.open('/dev/null', os.O_RDONLY))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True True 0\n", "")
