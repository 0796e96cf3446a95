"""Programs are described where that is worth the description of jax's code."""

from __future__ import annotations

import sys
import types

import pytest

from xcache.hook.describing import Describing
from xcache.hook.structure.encoding import CannotSkipError


class Described(Describing):
    """Describes programs, but has no description of jax's code."""

    def __init__(self, expected=None, *, always=False):
        self.expected, self.surprises = expected, 0
        super().__init__(lambda: self.expected, self.surprise, None, always=always)
        self._made_by = types.SimpleNamespace(structure=lambda *_: "described")

    def surprise(self):
        self.surprises += 1

    @property
    def is_cheap(self):
        try:
            return self.structure("jit_f", None, {}) != "described"
        except CannotSkipError as reason:
            return reason.kind == "lowering is cheap"


@pytest.mark.parametrize("expected", [None, 1.0, 7.5])
def test_a_program_that_may_gain_is_described(expected):
    assert not Described(expected).is_cheap


def test_a_program_that_gained_less_than_a_description_costs_is_lowered_unless_somebody_wants_it_skipped():
    assert Described(0.9).is_cheap
    assert not Described(0.9, always=True).is_cheap
    made = Described(0.9)
    made.begin()
    assert not made.is_cheap
    assert made.surprises == 0


def test_what_is_decided_at_the_first_program_holds(tmp_path):
    """jax's caches may have what other code has traced meanwhile."""
    made = Described(0.0)
    assert made.is_cheap
    made.expected = 2.0
    assert made.is_cheap


@pytest.mark.parametrize("change", [Describing.begin, lambda made: made.note_lowering(1.1)])
def test_the_next_process_measures_again_once_if_more_was_to_be_gained(change):
    made = Described(0.9)
    made.is_cheap  # noqa: B018 - the first program
    made.note_lowering(1.1)
    assert made.surprises == 0
    for _ in range(2):
        change(made)
        assert made.surprises == 1


def test_after_a_lowering_that_was_not_described_no_program_is():
    made = Described(always=True)
    made._made_by = None
    made.see(None)
    with pytest.raises(CannotSkipError, match="an earlier program was not described"):
        made.structure("jit_f", None, {})
    made.begin()
    assert made.surprises == 0


def test_a_program_without_a_structure_is_looked_at_once_jax_is_described():
    seen = []
    made = Described(always=True)
    made._made_by.look_at = seen.append
    made.see("a program")
    assert seen == ["a program"]
    assert not made.is_cheap


def test_what_a_lowering_is_worth_is_counted_in_descriptions():
    made = Described()
    made._price = 0.25
    assert made.worth(0.5) == 2


def test_a_jax_that_cannot_be_described_is_asked_once(tmp_path, monkeypatch):
    made = Describing(lambda: None, lambda: None, tmp_path, always=False)
    monkeypatch.setitem(sys.modules, "xcache.hook.structure.digest", None)
    monkeypatch.delattr("xcache.hook.structure.digest", raising=False)
    with pytest.raises(ImportError):
        made.structure("jit_f", None, {})
    with pytest.raises(CannotSkipError, match="this version of jax"):
        made.structure("jit_f", None, {})
