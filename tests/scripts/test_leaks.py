"""The fixture that fails a test for what it leaves behind."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading

import pytest
from support import leaks


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(leaks, "_SETTLE_SECONDS", 0.05)


def test_a_descriptor_a_thread_and_a_child_are_named():
    before = leaks.held()
    reading, writing = os.pipe()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(20,), name="left-behind")
    thread.start()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        left = leaks.left_since(before)
        child.communicate(b"\n")
    stop.set()
    thread.join()
    os.close(reading)
    os.close(writing)
    assert [each.split()[0] for each in left] == ["descriptor"] * 3 + ["thread", "child"]
    assert "left-behind" in left[3]
    assert str(child.pid) in left[4]
    assert leaks.left_since(before) == []


def test_a_file_that_the_collector_would_close_counts_as_left():
    gc.disable()
    try:
        before = leaks.held()
        cycle: list[object] = list(socket.socketpair())
        cycle.append(cycle)
        del cycle
        with pytest.warns(ResourceWarning):
            left = leaks.left_since(before)
    finally:
        gc.enable()
    assert len(left) == 2
    assert all("until the collector came" in each for each in left)
