"""The run that a command is asked for."""

from __future__ import annotations

import os
import socket

import pytest

from xcache import clock
from xcache.cli.ledger_file import LedgerReader, StoredRun
from xcache.errors import StoreError
from xcache.start_up import Run


def reader(*folders: str) -> LedgerReader:
    """Return a reader of runs that began in these folders, the latest first; the first letter is the run's number."""
    runs = [
        StoredRun(number, Run(folder[0] * 8, 0, 1, "program", {"directory": folder}, 0.0, 0.0, 0.0))
        for number, folder in enumerate(folders)
    ]
    return LedgerReader(lambda: runs, lambda _: [])


def test_the_last_run_is_that_of_this_folder_or_else_the_last_of_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = reader("another", "before")
    assert elsewhere.run("last").run.facts["directory"] == "another"
    here = reader("another", str(tmp_path), str(tmp_path))
    assert here.run("last").id == 1


def test_a_run_is_found_by_the_beginning_of_its_number():
    runs = reader("a", "b")
    assert runs.run("bbbb").id == 1
    for wanted, says in (("cccc", "no run begins with 'cccc'"), ("b", "give 4 or more"), ("zzzz", "hexadecimal")):
        with pytest.raises(StoreError, match=says):
            runs.run(wanted)
    with pytest.raises(StoreError, match="2 runs begin with 'aaaa'"):
        reader("a", "a").run("aaaa")


def test_a_process_is_known_by_its_start_whatever_the_clock_says():
    facts = {"host": socket.gethostname(), "started": clock.own_start()}
    run = Run("a" * 8, os.getuid(), os.getpid(), "program", facts, 0.0, 0.0, None)
    assert StoredRun(1, run).state == "running"
    # It ended, and nobody saw how.
    assert StoredRun(1, run._replace(facts=facts | {"started": "1"})).state == "no end known"
    assert StoredRun(1, run._replace(facts=facts | {"killed_by": "SIGKILL"}, ended_at=1.0)).state == "killed"
