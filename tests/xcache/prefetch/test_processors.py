"""A machine is busy when more threads want a processor than there are."""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys

import pytest
from support.places import until

from xcache.prefetch import processors


def test_processors_with_more_busy_processes_than_there_are_of_them_are_busy():
    # Each ends by itself, should this test be killed.
    busy = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    children = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        assert until(processors.are_all_busy)
    finally:
        for child in children:
            child.kill()
            child.wait(20)


@pytest.mark.parametrize(
    ("looks", "busy"), [((9, 1, 9), True), ((1, 9, 1), False), ((2, 2, 2), False), ((3,) * 3, True)]
)
def test_one_look_that_meets_a_thread_by_chance_decides_nothing(monkeypatch, looks, busy):
    contents = iter(looks)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(builtins, "open", lambda *_: io.BytesIO(b"0.5 0.4 0.3 %d/80 4711\n" % next(contents)))
    assert processors.are_all_busy() is busy


@pytest.mark.parametrize("content", [None, b"", b"0.1 0.2 0.3 x/80 1\n"])
def test_a_system_that_does_not_say_so_is_not_busy(monkeypatch, content):
    def opened(*_: object) -> io.BytesIO:
        if content is None:
            raise FileNotFoundError
        return io.BytesIO(content)

    monkeypatch.setattr(builtins, "open", opened)
    assert processors.are_all_busy() is False
