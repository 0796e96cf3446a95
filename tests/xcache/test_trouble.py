"""Errors of the cache: each is counted; the first of each kind is a warning."""

from __future__ import annotations

import logging

from xcache.counters import Counting
from xcache.errors import RefusedError
from xcache.trouble import Trouble


def test_a_process_remembers_one_text_of_each_kind_that_it_warned_of(caplog):
    warned: set[str] = set()
    trouble = Trouble(Counting(), warned)
    with caplog.at_level(logging.DEBUG, logger="xcache"):
        for number in range(100):
            trouble.note(RefusedError("disk full", f"no room for {number}"))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "no room for 0 (disk full); compiling without the cache"
    ]
    assert warned == {"disk full", "no room for 0"}
