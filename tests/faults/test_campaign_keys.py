"""Keys against code: whatever could change what XLA makes is changed, and equal keys must come with equal code.

The candidates are taken from what is installed: the fields of XLA's DebugOptions, jax's configuration, names of
variables in jax's sources and in its compilers' libraries. The surroundings of a program come on top, and so do orders
of dimensions in memory and of devices in meshes. A process of its own, without a cache, compiles varied programs for
each and says for every program xcache's key and what XLA made: for the processor, and for a TPU and a CUDA device that
need not be there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import cgroups, keys_jax
from support.campaigns import Campaign
from support.keys_askers import ASKERS, Askers
from support.keys_judge import NO_KEY, Judge
from support.keys_questions import COMPILERS, FEW, ONLY, candidates, elsewhere, in_turn, limits, surroundings

# The programs of the short form.
SOME = ["cumsum", "normal", "dot", "top_k", "while"]
# How many questions the short form has.
SHORT = {"cpu": 6, "tpu": 29, "cuda": 17}


@pytest.fixture
def askers(tmp_path, platform):
    made = Askers(tmp_path, platform)
    yield made
    made.close()


def _where_installed(platform: str) -> Any:
    try:
        found = importlib.util.find_spec(COMPILERS[platform])
    except ModuleNotFoundError:
        found = None
    reason = f"the compiler for {platform} is installed by scripts/campaign keys"
    return pytest.param(platform, marks=pytest.mark.skipif(found is None, reason=reason))


@pytest.fixture
def cgroup_folders(campaign: Campaign) -> Iterator[dict[str, str]]:
    """Cgroups with a limit each, for the processes that compile."""
    with contextlib.ExitStack() as made:
        folders = {}
        for kind in ("cpu", "cpuset", "memory"):
            try:
                folders[kind] = made.enter_context(cgroups.limited(kind))
            except OSError as error:
                campaign.note(f"left out: a cgroup with a limit of {kind}: {error}")
        yield folders


def test_an_answer_without_a_key_is_a_problem_unless_its_reason_is_listed():
    code = {"hlo": "h", "code": "c"}
    answers = {
        "as usual": {"no key": "key failed"} | code,
        "another": {"no key": next(iter(NO_KEY))} | code,
        "a third": {"no key": "key failed"} | code,
        "past the cache": {},
        "as asked": {"key": "k", "components": {}} | code,
    }
    expected = [
        "as usual: dot: no key: key failed",
        "a third: dot: no key: key failed",
        "past the cache: dot: no key: xcache was not asked",
    ]

    campaign = Campaign(None, 0)
    judge = Judge(campaign, None)
    for name, result in answers.items():
        judge.take(name, {}, {"answers": [{"dot": result}]})
    judge.conclude()

    assert campaign.problems == [f"other problems: {text}" for text in expected]


def test_nothing_usual_may_be_refused():
    campaign = Campaign(None, 0)
    judge = Judge(campaign, None)
    judge.take("as usual", {}, {"refused": "it ended"})
    judge.take("another", {}, {"refused": "it ended"})
    assert len(campaign.problems) == 1


@pytest.mark.slow
def test_each_option_of_jax_has_a_value_to_try():
    assert [name for name, values in keys_jax.options().items() if not values] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", [_where_installed(platform) for platform in COMPILERS])
def test_equal_keys_come_with_equal_code(
    campaign: Campaign, cgroup_folders: dict[str, str], askers: Askers, platform: str
):
    first = surroundings() | limits(cgroup_folders) if platform == "cpu" else elsewhere(platform)
    kinds = candidates(platform, campaign.seed)
    if ONLY in os.environ:
        first = {}
    others = {name: question for questions in kinds.values() for name, question in questions.items()}
    short, whole = SHORT[platform], len(first) + len(others)
    names = [*first, *in_turn(kinds, campaign.seed)][: min(campaign.rounds(short), whole)]
    questions = first | others
    usual: dict[str, Any] = {}
    if len(names) <= short:
        questions = {name: _shortened(name, questions[name], campaign.seed) for name in names}
        usual = {"programs": sorted({about for question in questions.values() for about in question["programs"]})}
    judge = Judge(campaign, askers)
    judge.take("as usual", usual, askers.ask(usual))
    # If that is refused, so is everything else, and the judge would take each question apart.
    campaign.judge()
    with ThreadPoolExecutor(ASKERS) as pool:
        for name, question, answer in pool.map(lambda name: _asked(askers, name, questions), names):
            judge.take(name, question, answer)
            judge.report()
    judge.conclude()
    campaign.judge()
    # Each question and the usual one; some ask about several options.
    assert campaign.counts["faults tried"] > len(names)


def _shortened(name: str, question: dict[str, Any], seed: int) -> dict[str, Any]:
    """Ask about fewer programs: some of those that the question is about, if it names any."""
    about = question.get("programs")
    chosen = random.Random(f"{seed} {name}").sample(about, len(FEW)) if about and len(about) > len(FEW) else about
    return question | {"programs": chosen or SOME}


def _asked(askers: Askers, name: str, questions: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any], Any]:
    return name, questions[name], askers.ask(questions[name])
