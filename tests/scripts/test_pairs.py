"""The verdict on pairs of programs, and their tables."""

from __future__ import annotations

import re

from pairing import page
from pairing.judging import judged
from pairing.pair import Pair
from pairing.run import planned, sampled
from pairing.running import Ran
from pairing.table import all_pairs

PAIR = Pair("binding", "name", "out = 1")
OFF = [Ran("off", "A", ["a"], {}), Ran("off", "B", ["b"], {})]


def test_a_result_of_the_other_program_is_wrong():
    right = [*OFF, Ran("A", "A", ["a"], {}), Ran("AB", "B", ["b"], {"calls: skipped": 1})]
    assert judged(PAIR, right)["verdict"] == "right"
    found = judged(PAIR, [*right, Ran("ABA", "A", ["b"], {})])
    assert found["verdict"] == "wrong"
    assert found["why"].startswith("ABA gave B's")


def test_a_pair_that_differs_in_nothing_tests_nothing():
    same = [Ran("off", side, ["a"], {}) for side in "AB"]
    assert judged(PAIR, same)["verdict"] == "tests nothing"
    assert judged(PAIR._replace(is_same=True), same)["verdict"] == "right"
    assert judged(PAIR._replace(is_same=True), OFF)["verdict"] == "tests nothing"


def test_names_are_unique_and_a_sample_has_all_families():
    pairs = [*all_pairs()]
    names = [pair.name for pair in pairs]
    assert len(names) == len({*names}) > 400
    chosen = sampled(pairs, 40, 0)
    assert [pair.name for pair in chosen] == [pair.name for pair in sampled(pairs, 40, 0)]
    assert {pair.family for pair in chosen} == {pair.family for pair in pairs}
    assert sum(map(len, planned(chosen))) == len(chosen) == 40


def test_the_tables_stand_between_their_markers(tmp_path):
    records = [judged(PAIR, [*OFF, Ran("A", "A", ["b"], {"lowerings: skipped": 2, "hits": 3})])]
    written = tmp_path / "page.md"
    written.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write(written, page.tables({"1.2.3": records}))
    text = written.read_text()
    assert re.search(r"\| 1\.2\.3 \| 1 \| 1 \| 0 \| 1 \| 1 \| 2 \| 0 \| 3 \| 1 \|", text)
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
