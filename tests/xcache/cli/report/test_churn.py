"""The shape-churn advisor: what it proposes would have saved what it says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcache.cli.report import churn
from xcache.cli.report.churn import Leaf, Use, advise, buckets, parse, powers_of_two

STEP = ("train.py", "jit_step", "train.py in main")


def compiled(run: int, size: int, seconds: float = 10.0, *, is_new: bool = True) -> Use:
    return Use(run, f"f32[{size},4], i32[{size}]", True, is_new, seconds, 2.0)


def found(run: int, size: int) -> Use:
    return Use(run, f"f32[{size},4], i32[{size}]", False, False, 2.0, 2.0)


def the_one(uses: list[Use]) -> churn.Churn:
    (only,) = advise({STEP: uses})
    return only


def plan(advised: churn.Churn, name: str) -> churn.Plan:
    return next(each for each in advised.plans if each.name == name)


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


def test_what_padding_to_the_largest_saves_is_what_the_runs_would_not_have_paid():
    advised = the_one([compiled(1, 8), compiled(1, 16), compiled(1, 32, 12.0), found(2, 8), found(2, 32)])
    largest = plan(advised, "pad to the largest")
    # One compile at the price of the dearest in the first run, and one load in the second.
    assert largest.saved_seconds == pytest.approx((10 + 10 + 12 + 2 + 2) - (12 + 2))
    assert (largest.sizes, largest.programs) == (((32,),), 1)
    # 32 * 5 elements three times, instead of 56 * 5.
    assert largest.padding == pytest.approx(96 / 56 - 1)
    assert (advised.shapes, advised.compiles, advised.runs, advised.seconds) == (3, 3, 2, 36.0)


def test_sizes_of_other_runs_count():
    advised = the_one([compiled(1, 60), compiled(2, 62), compiled(3, 64)])
    # One compile, and two loads.
    assert advised.best is not None
    assert advised.best.saved_seconds == pytest.approx(30 - (10 + 2 + 2))
    assert advised.best.sizes == ((64,),)


def test_a_compile_that_had_another_cause_is_not_saved():
    advised = the_one([compiled(1, 60), compiled(2, 64, is_new=False)])
    assert advised.best is None
    assert plan(advised, "pad to the largest").saved_seconds == 0


def test_a_program_that_a_run_compiled_twice_for_one_shape_has_another_reason():
    once = the_one([compiled(1, 60), compiled(1, 64)])
    twice = the_one([compiled(1, 60), compiled(1, 60), compiled(1, 64), compiled(1, 64)])
    assert plan(once, "pad to the largest").saved_seconds == pytest.approx(10)
    # Two programs remain, whatever the sizes.
    assert plan(twice, "pad to the largest").saved_seconds == pytest.approx(20)


def test_little_padding_is_proposed_where_it_saves_most():
    sizes = [*range(60, 65), *range(500, 513)]
    advised = the_one([compiled(1, size) for size in sizes])
    assert advised.best is not None
    assert advised.best.sizes == ((64, 512),)
    assert advised.best.padding < 0.05
    assert advised.best.saved_seconds == pytest.approx(10 * (len(sizes) - 2))


def test_the_last_and_smaller_batch_is_padded_although_that_adds_much():
    advised = the_one([compiled(1, 128), compiled(1, 37)])
    assert advised.best is not None
    assert advised.best.sizes == ((128,),)


def test_sizes_that_move_together_are_one_axis_and_others_are_not():
    together = the_one([Use(1, f"f32[{n},{2 * n}], i32[{n + 1}]", True, True, 1.0, 0.1) for n in (3, 5, 9)])
    assert [axis.places for axis in together.axes] == [((0, 0),)]
    assert set(together.axes[0].followers) == {(0, 1), (1, 0)}
    apart = the_one([Use(1, f"f32[{a},{b}]", True, True, 1.0, 0.1) for a, b in ((3, 9), (5, 4), (3, 4))])
    assert len(apart.axes) == 2
    assert plan(apart, "pad to the largest").sizes == ((5,), (9,))


def test_a_model_of_another_size_is_not_padded():
    shapes = ["f32[3,9,1,7]", "f32[5,4,2,6]", "f32[4,6,3,9]", "f32[6,5,1,8]"]
    advised = the_one([Use(1, each, True, True, 1.0, 0.1) for each in shapes])
    assert len(advised.axes) > 3
    assert (advised.plans, advised.best) == ((), None)


def test_other_kinds_and_numbers_of_arguments_are_other_functions():
    assert (
        advise({STEP: [compiled(1, 8), Use(1, "f32[8]", True, True, 1.0, 0.1), Use(1, "f64[9]", True, True, 1, 1)]})
        == []
    )


def test_one_shape_is_no_churn():
    assert advise({STEP: [compiled(1, 8), compiled(2, 8, is_new=False), found(3, 9)]}) == []


def test_the_dearest_comes_first():
    other = ("train.py", "jit_eval", "")
    advised = advise({STEP: [compiled(1, 8, 1.0), compiled(1, 9, 1.0)], other: [compiled(1, 8), compiled(1, 9)]})
    assert [each.module_name for each in advised] == ["jit_eval", "jit_step"]


def test_what_is_left_out_of_a_long_list_counts_as_the_same():
    long = ", ".join(f"f32[{number}]" for number in range(9))
    uses = [Use(1, f"{long}, ... 200 more ..., i32[16,{size}]", True, True, 9.0, 1.0) for size in (40, 50, 64)]
    advised = the_one(uses)
    assert advised.axes[0].where({}) == "dimension 1 of argument 209"
    assert advised.axes[0].where({209: "tokens"}) == "dimension 1 of tokens (argument 209)"
    assert advised.best is not None
    assert advised.best.sizes == ((64,),)


def test_the_arguments_that_vary_together_are_named_if_they_are_few():
    varying = the_one([Use(1, f"f32[8], i32[16,{size}], f32[16,{size}]", True, True, 9.0, 1.0) for size in (40, 50)])
    where = varying.axes[0].where
    assert where({1: "tokens", 2: "mask"}) == "dimension 1 of tokens and mask (arguments 1 and 2)"
    assert where({1: "tokens"}) == "dimension 1 of tokens (argument 1) and 1 more that varies with it"


def test_single_operations_are_told_apart():
    assert the_one([compiled(1, 8, 0.02), compiled(1, 9, 0.02)]).is_small
    assert not the_one([compiled(1, 8), compiled(1, 9)]).is_small


def test_powers_of_two_end_with_the_largest():
    assert powers_of_two([1, 3, 4, 9, 20]) == (1, 4, 16, 20)


@given(st.sets(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 4))
def test_no_other_buckets_of_that_number_pad_less(sizes, count):
    ordered = sorted(sizes)

    def padding(chosen: tuple[int, ...]) -> int:
        return sum(min(each for each in chosen if each >= size) - size for size in ordered)

    chosen = buckets(ordered, count)
    assert len(chosen) <= count
    others = itertools.combinations(ordered, min(count, len(ordered)))
    assert padding(chosen) == min(padding(other) for other in others if other[-1] == ordered[-1])


def test_a_thousand_sizes_take_no_time_to_speak_of():
    advised = the_one([compiled(1, size) for size in range(1, 1001)])
    assert advised.best is not None
    assert all(each[-1] == 1000 for each in (plan.sizes[0] for plan in advised.plans))
