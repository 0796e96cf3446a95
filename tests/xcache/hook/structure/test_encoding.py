"""The encoder refuses what it does not know to the last attribute."""

from __future__ import annotations

import functools
import types

import pytest

from xcache.hook.structure.encoding import CannotSkipError, check_attributes


class Slotted:
    __slots__ = ("one", "two")

    @functools.cached_property
    def memo(self):
        return 1


@pytest.mark.parametrize("value", [types.SimpleNamespace(one=1, two=2), Slotted()], ids=["dictionary", "slots"])
def test_an_attribute_more_than_is_known_cannot_be_skipped_over(value):
    check_attributes(value, frozenset(("one", "two")))
    with pytest.raises(CannotSkipError, match=r"^unknown attribute: .*\.two$"):
        check_attributes(value, frozenset(("one",)))
