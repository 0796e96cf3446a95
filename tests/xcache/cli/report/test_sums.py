"""The sums of a report: saved and lost time, causes, the time axis, the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from xcache.cli import advice, program_diff
from xcache.cli.ledger_file import StoredRun
from xcache.cli.report import ledger_facts, timeline, verdict
from xcache.cli.report.churn import Churn, of_functions
from xcache.cli.report.ledger_facts import Got, got
from xcache.start_up import Run, of_run
from xcache.wire.ledger import AHEAD, COMPILING, HIT, MISS, UNCACHEABLE, UNUSED, Row

DAY = 86400.0


def run(number: int = 1, began: float = 0.0) -> StoredRun:
    return StoredRun(number, Run(f"{number:016x}", 0, 7, "train.py", {"hook": "1.0"}, began, began + 60, began + 60))


def row(name: str, outcome: str, *spans: tuple[str, float, float], cause: str = "", **facts: object) -> Row:
    text = json.dumps([(*span, "MainThread") for span in spans])
    return Row(0, name, "train.py:3 in main", "f32[8]", name, outcome, cause, "yes", "", text)._replace(**facts)


def test_a_hit_saves_its_compile_less_its_loading_and_a_compile_is_lost():
    before = got(run(1, 10.0), [row("a", MISS, ("compile", 0, 5), cause="new")])
    after = got(
        run(2, DAY + 10), [row("a", HIT, ("lookup", 0, 0.5), ("load", 1, 1)), row("b", AHEAD, ("lookup", 2, 1))]
    )
    again = got(run(3, DAY + 20), [row("a", MISS, ("compile", 0, 6), cause="evicted")])
    known = ledger_facts.compile_seconds_by_key([*before, *after, *again], {"b": 3.0})
    # The ledger knows what the store has forgotten.
    assert known == {"a": 6.0, "b": 3.0}
    bars = ledger_facts.over_time([*before, *after, *again], known, 0.0, 20 * DAY)
    assert [bar["end"] - bar["begin"] for bar in bars] == [DAY] * 21
    first, second, *others = bars
    assert (first["new"], first["again"], first["saved"], first["misses"]) == (5.0, 0.0, 0.0, 1)
    assert (second["again"], second["hits"], second["misses"]) == (6.0, 2, 1)
    assert second["saved"] == pytest.approx((6 - 1.5) + (3 - 1))
    assert not any(bar["hits"] + bar["misses"] for bar in others)


def test_a_hit_whose_compile_time_nobody_knows_saves_nothing():
    (hit,) = got(run(), [row("a", HIT, ("load", 0, 1))])
    assert ledger_facts.saved_by(hit, {}) == 0.0


def test_compiles_are_counted_by_cause_and_explained():
    programs = got(
        run(),
        [
            row("a", MISS, ("compile", 0, 1), cause="new"),
            row("b", MISS, ("compile", 0, 9), cause="evicted: for c"),
            row("c", UNCACHEABLE, ("compile", 0, 2), cause="python callback"),
            row("d", COMPILING),
            row("e", HIT),
        ],
    )
    found = ledger_facts.by_cause(programs)
    assert [each["cause"] for each in found] == ["evicted", "not cacheable: python callback", "new", "not known"]
    assert "cannot be cached" in found[1]["meaning"]
    assert found[2]["meaning"] == "no program of this name was stored before this run"


def test_the_line_of_a_call_is_not_part_of_a_function():
    programs = got(run(), [row("a", MISS, site=f"train.py:{line} in main", cause="new") for line in (3, 9)])
    assert len(ledger_facts.uses(programs)) == 1


def test_a_long_pause_is_cut_out_of_the_axis_and_a_short_one_is_not():
    scale = timeline.Scale([(5.0, 6.0), (6.1, 7.0), (3600.0, 3602.0)])
    (pause,) = scale.pauses
    assert pause.seconds == pytest.approx(3593.0)
    assert (scale.x(5.0), scale.x(3602.0)) == (0.0, pytest.approx(100.0))
    assert scale.x(7.0) == pytest.approx(pause.x)
    assert scale.x(3600.0) == pytest.approx(pause.x + pause.width)
    # Twice as long is twice as wide.
    assert scale.x(3602.0) - scale.x(3600.0) == pytest.approx(scale.x(7.0) - scale.x(5.0))


def test_thousands_of_programs_are_few_blocks_within_the_axis():
    rows = [row(f"f{number}", MISS, ("compile", number * 0.001, 0.001)) for number in range(5000)]
    drawn = timeline.drawn(got(run(), rows))
    (thread,) = drawn["threads"]
    assert 0 < len(thread["blocks"]) < 1200
    assert all(block.x >= 0 and block.x + block.width <= 100.01 for block in thread["blocks"])
    assert "programs" in thread["blocks"][0].title
    assert drawn["left_out"] == 5000 - len(drawn["rows"])


def test_a_run_without_stages_has_an_empty_axis():
    drawn = timeline.drawn(got(run(), [row("a", COMPILING)]))
    assert (drawn["rows"], drawn["threads"], drawn["ticks"], drawn["pauses"]) == ([], [], [], [])


def headline(programs: list[Got], known: dict[str, float], state: str = "ended", pauses: float = 0.0) -> str:
    sums = of_run(run().run, state, [each.row for each in programs])
    return verdict.headline(verdict.without_pauses(sums, pauses), programs, known)


def test_the_headline_says_where_the_time_went_and_why():
    misses = got(run(), [row("a", MISS, ("compile", 2, 4), cause="new"), row("b", HIT, ("load", 6, 1))])
    assert headline(misses, {}) == (
        "until its last program was ready; 4.0 s of it compiling 1 program."
        " Cause: no program of this name was stored before this run."
    )
    both = [*misses, *got(run(), [row("c", MISS, ("compile", 7, 9), cause="evicted")])]
    assert "13.0 s of it compiling 2 programs, 9.0 s of that c. Main cause (9.0 s): its entry went" in headline(
        both, {}
    )
    assert headline(misses[1:], {"b": 5.0}).endswith("the cache had its one program, which saved 4.0 s.")
    slow = got(run(), [row("a", MISS, ("trace", 2, 8), ("compile", 10, 1), cause="new"), row("b", HIT)])
    assert headline(slow, {}).startswith(
        "until its last program was ready, 8.0 s of it tracing. 1 program of 2 had to be compiled, which took 1.0 s: no"
    )
    assert headline([], {}) == "This run asked for no program."
    assert "before it was killed" in headline(misses, {}, "killed")
    assert "(1m 00s of pauses between programs left out)" in headline(misses, {}, pauses=60.0)


def actions(programs: list[Got], explained: Sequence[dict] = (), churns: Sequence[Churn] = ()) -> list[verdict.Action]:
    sums = of_run(run().run, "ended", [each.row for each in programs])
    return verdict.actions(sums, programs, explained, {f"shapes-{n}": churn for n, churn in enumerate(churns)})


def miss(name: str, seconds: float, advice: str, text: str, cause: str = "other program") -> dict:
    told = [{"text": text, "advice": advice}]
    return {"module_name": name, "seconds": seconds, "position": name, "differences": told, "cause": cause}


def test_misses_with_one_remedy_are_one_action_and_the_dearest_comes_first():
    programs = got(run(), [row("a", MISS, ("compile", 1, 9), cause="other program")])
    explained = [miss("a", 2.0, "Pad it.", "dim 0"), miss("b", 3.0, "Pass it.", "x"), miss("c", 4.0, "Pass it.", "y")]
    first, second = actions(programs, explained)
    assert (first.text, first.seconds, first.anchor) == ("Pass it.", 7.0, "miss-c")
    assert first.reason == "c: y; and 1 more program."
    assert (second.text, second.reason) == ("Pad it.", "a: dim 0.")


COMPILED = ("compile", 1, 9)


def with_history(*last: Row) -> tuple[list[Got], list[Churn]]:
    """Return the programs of a last run, after two runs that compiled a function for two shapes."""
    before = [row("jit_f", MISS, COMPILED, cause="new", key="1", shapes="f32[8]")]
    before += [row("jit_f", MISS, COMPILED, cause="other program", key="2", shapes="f32[16]")]
    runs = [got(run(number, DAY * number), [each]) for number, each in enumerate(before, 1)]
    runs.append(got(run(3, 3 * DAY), last))
    return runs[-1], of_functions(ledger_facts.uses(each for of in runs for each in of))


def compiled_again(key: str, shapes: str = "f32[8]", cause: str = "other program") -> Row:
    return row("jit_f", MISS, COMPILED, cause=cause, key=key, shapes=shapes)


@pytest.mark.parametrize(
    ("last", "says"),
    [
        # As for another constant, static argument or helper.
        (compiled_again("3"), "Pass it."),
        (compiled_again("1", cause="evicted: size"), "Raise the limit"),
        (compiled_again("3", cause="other flags"), "Give all runs the same XLA_FLAGS."),
    ],
)
def test_a_function_that_once_had_two_shapes_may_be_compiled_for_something_else(last, says):
    programs, churns = with_history(last)
    (churn,) = churns
    assert (churn.shapes, churn.compiles, churn.seconds) == (2, 2, 18.0)
    told = [miss("jit_f", 9.0, "Pass it.", "a constant")] if last.cause == "other program" else []
    assert [each.text.startswith(says) for each in actions(programs, told, churns)] == [True]


def test_a_new_shape_is_named_with_the_compiles_of_shapes_alone():
    programs, churns = with_history(compiled_again("4", "f32[32]"))
    (only,) = actions(programs, [miss(0, 9.0, program_diff.TYPED, "dim 0")], churns)
    assert only.text == "See the sizes for which jit_f was compiled: dimension 0 of argument 0."
    assert (only.reason.partition(".")[0], only.seconds) == (
        "It was compiled for 3 shapes, which took 27", 9.0
    )  # fmt: skip
    assert "in 3 runs" in only.reason


def test_a_shape_that_is_new_together_with_something_else_is_not_blamed():
    programs, churns = with_history(compiled_again("4", "f32[32]"))
    assert [each.text for each in actions(programs, [miss(0, 9.0, "Pass it.", "weak")], churns)] == ["Pass it."]


def test_nobody_is_told_to_raise_what_must_stay_free():
    (told,) = advice.for_cause("evicted: disk")
    assert "lower XCACHE_MIN_FREE" in told
    assert "Raise" not in told
    # The report counts all evictions together.
    assert "Where the disk is full" in advice.for_cause("evicted")[0]


def test_what_only_explains_is_nothing_to_do():
    programs = got(run(), [row("a", MISS, ("compile", 1, 9), cause="other program")])
    for explanation in program_diff.EXPLANATIONS:
        assert [each.text for each in actions(programs, [miss("a", 9.0, explanation, "dim 0")])] == [
            "Run it again: what was compiled is in the store now."
        ]


def test_a_cause_of_many_small_programs_counts_whole_and_is_no_fault_of_theirs():
    rows = [row(f"f{n}", MISS, ("compile", n * 0.1, 0.1), cause="other flags") for n in range(50)]
    (only,) = actions(got(run(), rows))
    assert only.text == "Give all runs the same XLA_FLAGS."
    assert only.seconds == pytest.approx(5.0)
    shown = miss("f1", 0.1, "Set no flag.", "the flag x is set here", "other flags: x")
    (only,) = actions(got(run(), rows), [shown])
    assert (only.text, only.reason) == ("Set no flag.", "50 programs compiled: the flag x is set here.")
    assert only.seconds == pytest.approx(5.0)
    both = {**shown, "differences": [*shown["differences"], {"text": "the option y is 2 here", "advice": "Give y."}]}
    (only,) = actions(got(run(), rows), [both])
    assert only.text == "Set no flag. Give y."
    assert only.reason == "50 programs compiled: the flag x is set here; the option y is 2 here."
    uncacheable = got(run(), [row("a", UNCACHEABLE, ("compile", 1, 9), cause="python callback")])
    assert "jax.debug.print" in actions(uncacheable)[0].text
    uncacheable = got(run(), [row("a", UNCACHEABLE, ("compile", 1, 9), cause="custom_partitioning")])
    assert "not-cached" in actions(uncacheable)[0].text


def test_many_small_programs_and_a_first_run_have_advice():
    small = got(run(), [row(f"f{n}", MISS, ("compile", n * 0.1, 0.1), cause="new") for n in range(30)])
    assert "one function under jax.jit" in actions(small)[0].text
    first_time = got(run(), [row("a", MISS, ("compile", 1, 9), cause="new")])
    assert actions(first_time)[0].text == "Run it again: what was compiled is in the store now."
    assert actions(got(run(), [row("a", HIT, ("load", 1, 0.1))])) == []


def test_a_program_that_was_loaded_in_vain_is_none_that_was_compiled():
    assert got(run(), [row("", UNUSED, ("load", 1, 0.1))]) == []
