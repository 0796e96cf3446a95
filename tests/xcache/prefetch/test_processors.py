"""The processors are taken when other processes want as many as there are."""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import subprocess
import sys
import threading

import pytest
from support.places import until

from xcache.prefetch import processors


def test_as_many_busy_processes_as_processors_take_them_all():
    # Each ends by itself, should this test be killed.
    busy = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    children = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(os.cpu_count() or 1)]
    try:
        assert until(processors.are_taken)
    finally:
        for child in children:
            child.kill()
            child.wait(20)


def test_threads_of_this_process_are_counted_apart():
    is_over = threading.Event()
    data = bytes(1 << 24)

    def work():
        while not is_over.is_set():
            hashlib.sha256(data)

    threads = [threading.Thread(target=work) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        # They hash without the GIL.
        assert until(lambda: processors._own_threads() >= 3)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(20)
    assert until(lambda: processors._own_threads() == 1)


@pytest.mark.parametrize(
    ("looks", "own", "taken"),
    [
        ((9, 1, 9), 1, True),
        ((1, 9, 1), 1, False),
        ((2, 2, 2), 1, False),
        ((3, 3, 3), 1, True),
        ((5, 5, 5), 4, False),
        ((6, 6, 6), 4, True),
    ],
)
def test_others_count_and_one_look_that_meets_a_thread_by_chance_decides_nothing(monkeypatch, looks, own, taken):
    contents = iter(looks)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(processors, "_own_threads", lambda: own)
    monkeypatch.setattr(builtins, "open", lambda *_: io.BytesIO(b"0.5 0.4 0.3 %d/80 4711\n" % next(contents)))
    assert processors.are_taken() is taken


@pytest.mark.parametrize("content", [None, b"", b"0.1 0.2 0.3 x/80 1\n"])
def test_a_system_that_does_not_say_so_is_not_taken(monkeypatch, content):
    def opened(*_: object) -> io.BytesIO:
        if content is None:
            raise FileNotFoundError
        return io.BytesIO(content)

    monkeypatch.setattr(builtins, "open", opened)
    assert processors.are_taken() is False
