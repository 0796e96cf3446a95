"""Warnings that are collected while jax traces or lowers once more."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest

from xcache.hook.warned import collected_warnings


def test_threads_that_collect_at_once_leave_nothing_behind():
    before = warnings.warn, warnings.warn_explicit
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    collected = [first.enter_context(collected_warnings())]

    def collect():
        with second:
            collected.append(second.enter_context(collected_warnings()))
            begun.set()
            assert may_end.wait(30)
            warnings.warn("of the second")  # noqa: B028 - the place does not matter

    begun, may_end = threading.Event(), threading.Event()
    thread = threading.Thread(target=collect)
    thread.start()
    assert begun.wait(30)
    warnings.warn("of the first")  # noqa: B028 - the place does not matter
    first.close()
    with pytest.warns(UserWarning, match="the program's own"):
        warnings.warn("the program's own")  # noqa: B028 - the place does not matter
    may_end.set()
    thread.join(30)
    assert collected == [["of the first"], ["of the second"]]
    assert (warnings.warn, warnings.warn_explicit) == before


def test_collecting_within_collecting():
    with collected_warnings() as outer:
        with collected_warnings() as inner:
            warnings.warn("inner")  # noqa: B028 - the place does not matter
        warnings.warn("outer")  # noqa: B028 - the place does not matter
    assert (outer, inner) == (["outer"], ["inner"])
