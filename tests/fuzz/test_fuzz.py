"""Spoiled bytes for everything that reads bytes: a bounded number of cases here, millions by ``scripts/fuzz``."""

from __future__ import annotations

import typing

import pytest
from support import fuzzing, seeds

from xcache.wire import protocol


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_the_corpus_breaks_nothing(target):
    counts = fuzzing.replay(target)
    # The target raises everything that is wrong; where nothing is taken in, nothing was tried.
    assert counts.taken > 0


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_spoiled_bytes_break_nothing(target):
    counts = fuzzing.fuzz(target, fuzzing.TARGETS[target].quick, seed=1)
    # Where all is refused at the door, nothing behind it is tried.
    assert counts.taken > counts.cases / 1000


def test_the_same_seed_gives_the_same_cases():
    for target in fuzzing.TARGETS:
        assert list(fuzzing.made(target, 50, seed=3)) == list(fuzzing.made(target, 50, seed=3))
        assert list(fuzzing.made(target, 50, seed=3)) != list(fuzzing.made(target, 50, seed=4))


def test_fuzzing_begins_with_every_message_there_is():
    assert {type(message) for message in seeds.messages()} == set(typing.get_args(protocol.Message))


def test_the_corpus_stays_small():
    files = [path for path in seeds.CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(fuzzing.TARGETS)
    assert len(files) < 200
    assert sum(path.stat().st_size for path in files) < 200_000
