"""The functions that were compiled for many shapes, and the sizes that varied."""

from __future__ import annotations

from xcache.cli.report import churn
from xcache.cli.report.churn import Leaf, Use, of_functions, parse

STEP = ("train.py", "jit_step", "train.py in main")


def compiled(run: int, size: int, seconds: float = 10.0) -> Use:
    return Use(run, f"f32[{size},4], i32[{size}]", True, seconds)


def found(run: int, size: int) -> Use:
    return Use(run, f"f32[{size},4], i32[{size}]", False, 2.0)


def the_one(uses: list[Use]) -> churn.Churn:
    (only,) = of_functions({STEP: uses})
    return only


def test_types_are_read_as_the_ledger_writes_them():
    assert parse("f32[8,128], 2 x i32[], bf16[3] weak, key<fry>[2], token, Odd(1)") == (
        Leaf("f32", (8, 128)),
        Leaf("i32", ()),
        Leaf("i32", ()),
        Leaf("bf16 weak", (3,)),
        Leaf("key<fry>", (2,)),
        Leaf("token", None),
        Leaf("Odd(1)", None),
    )
    assert parse("") == (Leaf("", None),)
    assert parse("f32[8], ... 3 more ..., i32[2]") == (Leaf("f32", (8,)), *[Leaf("", None)] * 3, Leaf("i32", (2,)))


def test_what_the_shapes_cost_is_summed_over_all_runs():
    of = the_one([compiled(1, 8), compiled(1, 16), compiled(1, 32, 12.0), found(2, 8), found(2, 32)])
    assert (of.shapes, of.compiles, of.uses, of.runs, of.seconds) == (3, 3, 5, 2, 36.0)
    assert of.cost["f32[8,4], i32[8]"] == 12.0


def test_sizes_that_move_together_are_one_axis_and_others_are_not():
    together = the_one([Use(1, f"f32[{n},{2 * n}], i32[{n + 1}]", True, 1.0) for n in (3, 5, 9)])
    assert [axis.places for axis in together.axes] == [((0, 0),)]
    assert set(together.axes[0].followers) == {(0, 1), (1, 0)}
    apart = the_one([Use(1, f"f32[{a},{b}]", True, 1.0) for a, b in ((3, 9), (5, 4), (3, 4))])
    assert len(apart.axes) == 2


def test_other_kinds_and_numbers_of_arguments_are_other_functions():
    assert of_functions({STEP: [compiled(1, 8), Use(1, "f32[8]", True, 1.0), Use(1, "f64[9]", True, 1.0)]}) == []


def test_one_shape_is_no_churn():
    assert of_functions({STEP: [compiled(1, 8), compiled(2, 8), found(3, 9)]}) == []


def test_the_dearest_comes_first():
    other = ("train.py", "jit_eval", "")
    advised = of_functions({STEP: [compiled(1, 8, 1.0), compiled(1, 9, 1.0)], other: [compiled(1, 8), compiled(1, 9)]})
    assert [each.module_name for each in advised] == ["jit_eval", "jit_step"]


def test_what_is_left_out_of_a_long_list_counts_as_the_same():
    long = ", ".join(f"f32[{number}]" for number in range(9))
    uses = [Use(1, f"{long}, ... 200 more ..., i32[16,{size}]", True, 9.0) for size in (40, 50, 64)]
    advised = the_one(uses)
    assert advised.axes[0].where({}) == "dimension 1 of argument 209"
    assert advised.axes[0].where({209: "tokens"}) == "dimension 1 of tokens (argument 209)"


def test_the_arguments_that_vary_together_are_named_if_they_are_few():
    varying = the_one([Use(1, f"f32[8], i32[16,{size}], f32[16,{size}]", True, 9.0) for size in (40, 50)])
    where = varying.axes[0].where
    assert where({1: "tokens", 2: "mask"}) == "dimension 1 of tokens and mask (arguments 1 and 2)"
    assert where({1: "tokens"}) == "dimension 1 of tokens (argument 1) and 1 more that varies with it"


def test_single_operations_are_told_apart():
    assert the_one([compiled(1, 8, 0.02), compiled(1, 9, 0.02)]).is_small
    assert not the_one([compiled(1, 8), compiled(1, 9)]).is_small
