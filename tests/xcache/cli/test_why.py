"""``xcache why`` on rows of the ledger that no program needs to make."""

from __future__ import annotations

import json

import pytest

from xcache.cli import advice
from xcache.keys import stablehlo
from xcache.wire import ledger
from xcache.wire.ledger import UNUSED, Row

SPANS = json.dumps([("compile", 1.0, 0.5, "MainThread")])


def taking(size):
    """Return a program that takes an array of this size."""
    kind = f"tensor<{size}xf32>"
    text = f"module @jit_f {{ func.func public @main(%x: {kind}) -> {kind} {{ return %x : {kind} }} }}"
    return stablehlo.bytecode(stablehlo.parse(text))


def test_what_was_loaded_ahead_in_vain_does_not_hide_the_run_that_compiled_it(shell):
    stored, missed = shell.put("jit_f"), "d" * 64
    shell.record_run(stored, run="a" * 16, shapes="f32[8]")
    shell.record_run(stored, run="b" * 16, module_name="", shapes="", cause="", outcome=UNUSED)
    shell.record_run(missed, run="b" * 16, position=1, shapes="f32[16]", cause="other program", nearest=stored)
    (miss,) = shell.json("why", "--run", "bbbb")["misses"]
    assert "f32[16] here, f32[8] in the stored program" in miss["differences"][0]["text"]


def test_programs_of_one_run_are_compared_with_one_another_only_if_they_are_asked_for(shell):
    stored, missed = (shell.put("jit_f", program=taking(size)) for size in (8, 16))
    first = Row(0, "jit_f", "t.py:1", "f32[8]", stored, "miss", "new", "yes", "", SPANS)
    second = first._replace(position=1, shapes="f32[16]", key=missed)
    shell.record_rows([first, second], run="b" * 16)
    told = shell.say("why", "--run", "bbbb")
    assert "nothing is wrong: 2 programs are new to the store (1.00 s)" in told
    assert "jit_f, 2 programs, 1.00 s, called at t.py:1" in told
    assert "compared" not in told
    assert f"compared with {stored[:12]}, which this run compiled before:" in shell.say("why", "f", "--run", "bbbb")


@pytest.mark.parametrize(
    ("site", "is_compared"),
    [("t.py:1 in main", True), ("t.py:9 in main", True), ("t.py:1 in other", False), ("u.py:1 in main", False)],
)
def test_only_what_was_called_at_the_same_place_is_compared(shell, site, is_compared):
    """Operations of jax's own and lambdas of many places share a name."""
    stored, missed = (shell.put("jit_multiply", program=taking(size)) for size in (8, 16))
    shell.record_run(stored, run="a" * 16, module_name="jit_multiply", site="t.py:1 in main", shapes="f32[8]")
    changes = {"module_name": "jit_multiply", "cause": "other program", "nearest": stored, "site": site}
    shell.record_run(missed, run="b" * 16, shapes="f32[16]", **changes)
    assert ("compared with the stored" in shell.say("why", "--run", "bbbb")) == is_compared
    assert ("nothing is wrong: 1 program is new" in shell.say("why", "--run", "bbbb")) == (not is_compared)
    assert "compared with the stored" in shell.say("why", "multiply", "--run", "bbbb")


def test_a_random_key_of_another_kind_does_not_hide_another_difference(shell):
    shell.record_run("c" * 64, run="a" * 16, shapes="key<fry>[], f32[8], f32[3]")
    changes = {"shapes": "key<rbg>[], f32[16], f32[3] weak", "cause": "other program", "nearest": "c" * 64}
    shell.record_run("d" * 64, run="b" * 16, **changes)
    (miss,) = shell.json("why", "--run", "bbbb")["misses"]
    assert [each["text"] for each in miss["differences"]] == [
        "argument 0 is a random key of another kind: key<rbg>[] here, key<fry>[] in the stored program",
        "argument 2 is weakly typed here, but not in the stored program",
        "argument 1 is f32[16] here, f32[8] in the stored program",
    ]


def test_one_setting_that_changes_several_parts_of_the_key_is_one_cause():
    cause = "other options; other flags; other platform"
    assert advice.meaning_of(cause, is_told=True) == "the same program was stored under other settings"
    assert advice.meaning_of(cause).count(";") == 2
    assert advice.meaning_of("other flags", is_told=True) == ledger.CAUSES["other flags"]


def test_many_compiles_point_to_the_report(shell):
    rows = [Row(n, "jit_f", "", "", f"{n}" * 64, "miss", "new", "yes", "", SPANS) for n in range(5)]
    shell.record_rows(rows, run="a" * 16)
    assert "`xcache report` shows where the time went" in shell.say("why")
    shell.record_rows(rows[:4], run="b" * 16)
    assert "xcache report" not in shell.say("why")


def test_a_name_chooses_among_what_was_compiled_and_does_not_change_how_much_that_was(shell):
    rows = [Row(n, f"jit_{name}", "", "", f"{n}" * 64, "miss", "new", "yes", "", SPANS) for n, name in enumerate("fgh")]
    shell.record_rows(rows, run="a" * 16)
    assert "3 of 3 programs compiled\n1 of them named or keyed 'jit_g'\n" in shell.say("why", "jit_g")


def test_what_a_run_has_lost_of_its_rows_is_said(shell):
    rows = [Row(n, "jit_f", "", "", f"{n}" * 64, "miss", "new", "yes", "", SPANS) for n in (4, 7)]
    shell.record_rows(rows, run="a" * 16)
    for command in ("why", "run"):
        assert "the ledger has no row of 6 programs more" in shell.say(command).replace("\n", " ")
    shell.record_rows([row._replace(position=n) for n, row in enumerate(rows)], run="b" * 16)
    assert "no row of" not in shell.say("why")


def test_programs_that_differ_in_the_same_way_are_told_once(shell):
    stored = shell.put("jit_f")
    shell.record_run(stored, run="a" * 16, shapes="f32[8], f32[3]")
    rows = [
        Row(number, "jit_f", "train.py:1", shapes, f"{number}" * 64, "miss", "other program", "yes", stored, SPANS)
        for number, shapes in enumerate(["f32[16], f32[3]", "f32[24], f32[3]", "f32[32], f32[3]", "f32[8], i32[3]"])
    ]
    shell.record_rows(rows, run="b" * 16)
    said = shell.say("why", "--run", "bbbb")
    assert said.count("needs an executable of its own") == 1
    assert "2 more programs of this function differ in the same way, 1.00 s more; --all shows each" in said
    assert said.count("i32[3] here") == 1
    assert shell.say("why", "--run", "bbbb", "--all").count("f32[3] here") == 0
    assert shell.say("why", "--run", "bbbb", "--all").count(" here, f32[8] in the stored program") == 3


def test_a_setting_is_named_only_if_the_runs_differ_in_it(shell):
    stored = shell.put("jit_f")
    settings = {"settings": json.dumps({"jax_enable_x64": "False", "jax_default_prng_impl": "rbg"})}
    shell.record_run(stored, run="a" * 16, facts=settings)
    changes = {"shapes": "f64[8]", "cause": "other program", "nearest": stored}
    shell.record_run("d" * 64, run="b" * 16, facts=settings, **changes)
    shell.record_run("e" * 64, run="c" * 16, facts={}, **changes)
    settings = {"settings": json.dumps({"jax_enable_x64": "True", "jax_default_prng_impl": "rbg"})}
    shell.record_run("f" * 64, run="d" * 16, facts=settings, **changes)
    for run in ("bbbb", "cccc"):
        assert "jax_enable_x64" not in shell.say("why", "--run", run)
    said = shell.say("why", "--run", "dddd")
    assert "jax_enable_x64 is True here, and was False in the run that stored the other" in said
    assert "prng" not in said


@pytest.mark.parametrize(
    ("stored", "says_so"),
    [("yes", True), ("no: it is above the limit", False), ("no: compiling it was forbidden", False)],
)
def test_what_was_not_stored_serves_no_later_run(shell, stored, says_so):
    shell.record_run("d" * 64, run="a" * 16, stored=stored)
    said = shell.say("why", "--run", "aaaa")
    assert ("serves the next runs" in said) == says_so
    assert (f"not stored: {stored.removeprefix('no: ')}" in said) != says_so


def test_trouble_with_a_remote_store_is_not_called_nothing():
    cause = "new; remote trouble: redis://host: nobody answers"
    assert "redis://host: nobody answers" in advice.meaning_of(cause)
    assert ["remote check" in each for each in advice.for_cause(cause)] == [True]


def test_another_jaxlib_is_told_though_the_programs_cannot_be_compared(shell):
    """As those of entries that came from a remote store or a bundle: they stayed where they were lowered."""
    stored, missed = (shell.put("jit_f", jaxlib=version) for version in ("0.10.2", "0.12.0"))
    shell.record_run(missed, run="a" * 16, cause="other program", nearest=stored)
    (miss,) = shell.json("why")["misses"]
    assert miss["nearest"] == stored
    texts = [each["text"] for each in miss["differences"]]
    assert texts == ["the stored program was lowered by the jax of jaxlib 0.10.2, this one by that of 0.12.0"]
    assert "The programs cannot be compared here: " in miss["advice"]
