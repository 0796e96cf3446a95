"""The types of a program's arguments as the ledger holds them."""

from __future__ import annotations

from typing import NamedTuple

from xcache.cli.report.churn import parse
from xcache.hook import stages
from xcache.wire.ledger import MAX_TEXT


class Aval(NamedTuple):
    shape: tuple[int, ...]
    dtype: str = "float32"


def test_equal_types_in_a_row_are_counted():
    types = [Aval((2, 3)), Aval((2, 3)), Aval(()), Aval((4,), "int32")]
    assert stages._as_text(types) == "2 x f32[2,3], f32[], i32[4]"


def test_of_many_types_the_first_and_the_last_are_kept():
    types = [Aval((number, number % 7)) for number in range(1, 1000)]
    text = stages._as_text(types)
    assert MAX_TEXT - 50 < len(text) <= MAX_TEXT
    assert text.startswith("f32[1,1], f32[2,2], ")
    assert text.endswith(", f32[998,4], f32[999,5]")
    # Each argument keeps its number.
    leaves = parse(text)
    assert len(leaves) == 999
    assert all(leaf.dimensions in (None, aval.shape) for leaf, aval in zip(leaves, types, strict=True))


def test_a_type_that_is_too_long_by_itself_is_left_out():
    assert stages._as_text([Aval((1,)), Aval(tuple(range(2000)))]) == "... 2 more ..."
