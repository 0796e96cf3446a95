"""Ctrl-C at any line of the start of a daemon leaves nothing open."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from xcache.client import launcher as launching
from xcache.client.launcher import Launcher
from xcache.descriptors import OwnFile, identity

pytestmark = [
    pytest.mark.usefixtures("here"),
    # A file that is collected warns that nobody closed it. By default Python shows no such warning.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"),
]


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def start_interrupted(launcher: Launcher, met: set[int]) -> bool:
    """Start a daemon, with an interrupt at the first new line of launcher.py; return whether there is one."""

    def trace(frame, event, argument):
        if frame.f_code.co_filename != launching.__file__:
            return None
        if event == "line" and frame.f_lineno not in met and not struck:
            struck.append(frame.f_lineno)
            raise KeyboardInterrupt
        return trace

    struck: list[int] = []
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        launcher.start()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    met.update(struck)
    return bool(struck)


@pytest.mark.parametrize("highest", [launching.READY_FD, 100], ids=["as they are", "moved above the daemon's own"])
def test_an_interrupt_leaves_neither_lock_nor_pipe_open(place, monkeypatch, highest):
    monkeypatch.setattr(launching, "READY_FD", highest)
    monkeypatch.setattr(launching, "spawn", lambda *given: None)
    gc.collect()
    # Else each line would look through all that is imported.
    gc.freeze()
    before, met = descriptors(), set()
    try:
        while start_interrupted(Launcher(place.config()), met):
            gc.collect()
            assert descriptors() == before, max(met)
    finally:
        gc.unfreeze()
    assert len(met) > 25


def test_a_pipes_end_closes_with_the_last_reference_but_no_file_of_the_programs():
    reading, writing = map(OwnFile, os.pipe(), "rw")
    for end in (reading, writing):
        end.identity = identity(end.fileno())
    del end, writing
    assert reading.read(1) == b""
    with open(os.devnull, "rb") as programs:
        os.dup2(programs.fileno(), reading.fileno())
        number = reading.fileno()
        assert not reading.is_ours()
        reading.close()
        del reading
        gc.collect()
        assert identity(number) == identity(programs.fileno())
        os.close(number)
