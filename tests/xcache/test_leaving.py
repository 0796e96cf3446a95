"""A program that ends while its daemon is in trouble leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import threading

import pytest
from support.caching import compiled, raising, request


class Slow(logging.Handler):
    """Takes as long for a line as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end, self.said = threading.Event(), threading.Event(), []

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        assert self.may_end.wait(30)
        self.said.append(record.getMessage())


def test_a_thread_that_is_left_at_exit_is_not_in_the_middle_of_a_line_and_begins_none(caches):
    """The interpreter would end the process for it: it wants stderr to itself when it goes."""
    cache, output, left_behind = caches(), Slow(), threading.Event()

    def complain():
        cache.get_or_compile(compiled, raising(ValueError("first")))
        assert left_behind.wait(30)
        cache.get_or_compile(compiled, lambda: request(toolchain_files=raising(OSError("second"))))

    left = threading.Thread(target=complain, name="xcache-left")
    leaving = threading.Thread(target=cache._at_exit)
    logging.getLogger("xcache").addHandler(output)
    try:
        left.start()
        assert output.begun.wait(30)
        leaving.start()
        leaving.join(0.5)
        assert leaving.is_alive()
        output.may_end.set()
        leaving.join(30)
    finally:
        output.may_end.set()
        left_behind.set()
        left.join(30)
        logging.getLogger("xcache").removeHandler(output)
        gc.enable()
    assert output.said == ["ValueError: first (key failed); compiling without the cache"]


def test_an_interrupted_exit_leaves_the_thread_nothing_to_do_and_nothing_to_collect(caches, monkeypatch):
    cache, working, may_end, done = caches(), threading.Event(), threading.Event(), []

    def work(job: object) -> None:
        done.append(job)
        working.set()
        assert may_end.wait(30)

    monkeypatch.setattr(cache._queue, "_work", work)
    assert cache._queue.add("first", 1.0)
    assert working.wait(30)
    assert cache._queue.add("second", 1.0)
    left = cache._queue._thread

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._queue, "_is_late", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache._at_exit()
        assert not gc.isenabled()
    finally:
        gc.enable()
        may_end.set()
        left.join(30)
    assert done == ["first"]
