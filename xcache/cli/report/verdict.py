"""The first lines of the report: where the time of a run went, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xcache import start_up
from xcache.cli import advice, program_diff
from xcache.cli.output import counted, duration
from xcache.cli.report.churn import Churn
from xcache.cli.report.ledger_facts import NOT_CACHEABLE, Got, by_cause, kinds, saved_by
from xcache.wire import ledger

_MOST_ACTIONS = 4
_MOST_AXES = 3
_MOST_TOLD = 3
# A saving below this share of the whole is not worth an advice.
_WORTH = 0.1
# Compiling is what the headline is about if it took at least this share.
_MOST_OF_IT = 0.25
_IN_WORDS = {
    "imports": "until jax was imported",
    "trace": "tracing",
    "lower": "lowering",
    "lookup": "looking programs up",
    "wait": "waiting for other processes that compiled the same",
    "load": "loading from the cache",
    "other": "work other than making programs",
}
# Programs that take less each, and more than so many of them, may be operations outside of jax.jit.
_SMALL_SECONDS, _MANY = 0.15, 20


class Action(NamedTuple):
    """Something to do: a headline, the reason, the seconds of this start at stake, and the place that has more."""

    text: str
    reason: str
    seconds: float
    anchor: str = ""

    @property
    def stake(self) -> str:
        """Words for what is at stake."""
        return f"{duration(self.seconds)} of this start"


def parts_of(shown: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the parts of a start-up that ``of_run`` has summed up, in their order."""
    stages = [(stage, seconds) for stage, seconds in shown["stages"].items() if stage not in ("serialize", "store")]
    parts = [("imports", shown["seconds_to_hook"]), *stages]
    other = shown["ready_seconds"] - sum(seconds for _, seconds in parts)
    return [(name, seconds) for name, seconds in [*parts, ("other", other)] if seconds > 0]


def without_pauses(shown: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the sums of a run without what it did between its programs, such as training before an evaluation."""
    return {**shown, "ready_seconds": max(0.0, shown["ready_seconds"] - seconds), "pauses": seconds}


def headline(shown: Mapping[str, Any], programs: Sequence[Got], known: Mapping[str, float]) -> str:
    """Return the sentences that follow the seconds until the last program was ready: where they went, and why."""
    compiled = [each for each in programs if not each.is_found and each.row.outcome != ledger.FAILED]
    if not programs:
        return "This run asked for no program."
    begin = "until its last program was ready"
    if shown["pauses"]:
        begin += f" ({duration(shown['pauses'])} of pauses between programs left out)"
    if shown["state"] in ("killed", "running"):
        begin += " (so far)" if shown["state"] == "running" else " before it was killed"
    if not compiled:
        saved = sum(saved_by(each, known) for each in programs)
        gain = f", which saved {duration(saved)}" if saved > 0 else ""
        all_of_them = f"all {len(programs)} programs" if len(programs) > 1 else "its one program"
        return f"{begin}; the cache had {all_of_them}{gain}."
    seconds = sum(each.compile_seconds for each in compiled)
    first = by_cause(compiled)[0]
    programs_of = counted(len(compiled), "program")
    if seconds < _MOST_OF_IT * shown["ready_seconds"]:
        part, longest = max(parts_of(shown), key=lambda part: part[1])
        begin += f", {duration(longest)} of it {_IN_WORDS.get(part, part)}"
        took = f"had to be compiled, which took {duration(seconds)}"
        return f"{begin}. {programs_of} of {len(programs)} {took}: {first['meaning']}."
    name, count, of_name = _dearest(compiled)
    mostly = f", {duration(of_name)} of that {name}" if len(compiled) > 1 and of_name > 0.5 * seconds else ""
    mostly += f" ({count} times)" if mostly and count > 1 else ""
    if 1 < len(compiled) == count:
        mostly = f", each of them {name}"
    cause = "Cause" if first["count"] == len(compiled) else f"Main cause ({duration(first['seconds'])})"
    return f"{begin}; {duration(seconds)} of it compiling {programs_of}{mostly}. {cause}: {first['meaning']}."


def _dearest(compiled: Sequence[Got]) -> tuple[str, int, float]:
    """Return the function that took longest to compile, how often that was, and the seconds."""
    of_names: dict[str, list[float]] = {}
    for each in compiled:
        of_names.setdefault(each.row.module_name, []).append(each.compile_seconds)
    name = max(of_names, key=lambda name: sum(of_names[name]))
    return name, len(of_names[name]), sum(of_names[name])


def actions(
    shown: Mapping[str, Any],
    programs: Sequence[Got],
    explained: Sequence[Mapping[str, Any]],
    churns: Mapping[str, Churn],
) -> list[Action]:
    """Return what to do, the most promising first.

    ``explained`` are the misses as ``xcache why`` explains them, ``churns`` functions that were compiled for many
    shapes, by the place in the report that has more about each.
    """
    found: list[Action] = []
    here = {each.run.id for each in programs}
    otherwise = {each["position"] for each in explained if not _is_of_shape(each)}
    for anchor, churn in churns.items():
        mine = (use for use in churn.compiled if use.run in here and use.position not in otherwise)
        seconds = sum(use.seconds for use in mine)
        if seconds:
            found.append(_for_churn(churn, names_of(churn, explained), anchor, seconds))
    found += _for_misses(explained)
    found += _for_causes(programs, explained)
    found += _for_small(programs)
    found += _for_stages(shown)
    least = _WORTH * shown["ready_seconds"]
    worthy = [each for each in found if each.seconds >= least]
    worthy.sort(key=lambda each: -each.seconds)
    return worthy[:_MOST_ACTIONS] or _for_first_time(programs)


def names_of(churn: Churn, explained: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the names of a function's arguments by number, as far as the explanations of its misses have them."""
    return {
        number: name
        for each in explained
        if each["module_name"] == churn.module_name
        for difference in each["differences"]
        for number, name in difference["arguments"]
    }


def _is_of_shape(explained: Mapping[str, Any]) -> bool:
    """Return whether a miss may be one of a shape alone, as far as it was compared with what is stored."""
    differences = explained["differences"]
    told = [each["advice"] for each in differences if each["advice"]]
    return not differences or all(each == program_diff.TYPED for each in told)


def _for_churn(churn: Churn, names: Mapping[int, str], anchor: str, here: float) -> Action:
    varying = f": {' and '.join(axis.where(names) for axis in churn.axes[:_MOST_AXES])}" if churn.axes else ""
    return Action(
        f"See the sizes for which {churn.module_name} was compiled{varying}.",
        f"It was compiled for {len({use.shapes for use in churn.compiled})} shapes, which took"
        f" {duration(sum(use.seconds for use in churn.compiled))} in"
        f" {counted(len({use.run for use in churn.compiled}), 'run')}. Each shape needs an executable of its own.",
        here,
        anchor,
    )


def _for_misses(explained: Sequence[Mapping[str, Any]]) -> list[Action]:
    """Return one action for each advice on what differs in a program, with all the programs it is for."""
    by_advice: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for each in explained:
        told = next(_told(each), None)
        if told is not None and kinds(each["cause"]) in advice.NEW:
            by_advice.setdefault(told["advice"], []).append((each, told["text"]))
    found = []
    for text, misses in by_advice.items():
        dearest, difference = max(misses, key=lambda miss: miss[0]["seconds"])
        more = f"; and {counted(len(misses) - 1, 'more program')}" if len(misses) > 1 else ""
        found.append(
            Action(
                text,
                f"{dearest['module_name']}: {difference}{more}.",
                sum(each["seconds"] for each, _ in misses),
                f"miss-{dearest['position']}",
            )
        )
    return found


def _told(explained: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """Yield the differences that there is advice about, and not only an explanation."""
    return (each for each in explained["differences"] if each["advice"] not in ("", *program_diff.EXPLANATIONS))


def _for_causes(programs: Sequence[Got], explained: Sequence[Mapping[str, Any]]) -> list[Action]:
    """Return what to do about causes that are not the programs' own; what one program shows holds for all of them."""
    found = []
    for each in by_cause(each for each in programs if not each.is_by_itself):
        of_cause = ([*_told(miss)] for miss in explained if kinds(miss["cause"]) == each["cause"])
        told = next(filter(None, of_cause), [])
        texts = advice.for_cause(each["cause"])
        if each["cause"].startswith(NOT_CACHEABLE):
            texts = [advice.for_uncacheable(each["cause"].removeprefix(NOT_CACHEABLE))]
        elif told:
            texts = [*dict.fromkeys(difference["advice"] for difference in told)]
        if texts:
            why = "; ".join(difference["text"] for difference in told[:_MOST_TOLD]) or each["meaning"]
            reason = f"{counted(each['count'], 'program')} compiled: {why}."
            found.append(Action(" ".join(texts), reason, each["seconds"], "misses"))
    return found


def _for_small(programs: Sequence[Got]) -> list[Action]:
    small = [each for each in programs if each.is_by_itself and each.seconds < _SMALL_SECONDS]
    if len(small) < _MANY:
        return []
    seconds = sum(each.seconds for each in small)
    return [
        Action(
            "See whether operations run outside of jax.jit: one function under jax.jit makes one program of them.",
            f"{len(small)} small programs were made one by one, {duration(seconds / len(small))} each."
            " Nothing tells which of them jax.jit was called for, and which are single calls of jax.numpy.",
            seconds,
            "programs",
        )
    ]


def _for_stages(shown: Mapping[str, Any]) -> list[Action]:
    """Return what helps against stages that the cache does not shorten."""
    stages = dict(parts_of(shown))
    preparing = stages.get("trace", 0.0) + stages.get("lower", 0.0)
    found = [
        Action(
            "Use xcache.jit(function, version=...) for the functions that take longest to trace.",
            f"Tracing and lowering took {duration(preparing)}. A later process skips both for calls that are recorded;"
            " its first such call takes about half a second, for a description of JAX's code.",
            preparing,
            "timeline",
        ),
        Action(
            "See what the program imports, and does before its first program: python -X importtime",
            f"{duration(stages.get('imports', 0.0))} went by before jax was ready. The cache cannot shorten that.",
            stages.get("imports", 0.0),
            "timeline",
        ),
        Action(
            "Look for the part of the program that is slow beside jax: reading data, checkpoints, the network.",
            f"{duration(stages.get('other', 0.0))} went to something other than making programs.",
            stages.get("other", 0.0),
            "timeline",
        ),
    ]
    # These are parts of every start-up; they matter only if they are large.
    return [each for each in found if each.seconds > max(1.0, 0.3 * shown["ready_seconds"])]


def _for_first_time(programs: Sequence[Got]) -> list[Action]:
    new = [each for each in programs if each.is_miss and each.row.stored == "yes"]
    if not new:
        return []
    return [
        Action(
            "Run it again: what was compiled is in the store now.",
            f"{counted(len(new), 'program')} had to be compiled for the first time.",
            sum(each.compile_seconds for each in new),
            "misses",
        )
    ]


def totals_of(run: start_up.Run, state: str, programs: Sequence[Got]) -> dict[str, Any]:
    """Return a run with sums over its programs, as ``xcache run`` shows them."""
    return start_up.of_run(run, state, [each.row for each in programs])
