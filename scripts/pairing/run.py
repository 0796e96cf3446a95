"""Runs pairs of programs and judges them: each must give the results that it gives without xcache."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
from pairing.judging import judged
from pairing.pair import Pair
from pairing.running import ORDERS, Programs, Worker, new_place
from pairing.table import all_pairs

# So many programs share a process, where they leave it as it was.
_TOGETHER = 16


def sampled(pairs: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    """Return some pairs, the families in turn; every fifth has processes of its own, which take longer."""
    chance = random.Random(seed)  # noqa: S311 - the same every time
    alone = [pair for pair in pairs if pair.has_own_process]
    together = [pair for pair in pairs if not pair.has_own_process]
    return [*_in_turn(alone, count // 5, chance), *_in_turn(together, count - count // 5, chance)]


def _in_turn(pairs: Iterable[Pair], count: int, chance: random.Random) -> Iterator[Pair]:
    families: dict[str, list[Pair]] = {}
    for pair in pairs:
        families.setdefault(pair.family, []).append(pair)
    for family in families.values():
        chance.shuffle(family)
    while count and families:
        for name in [*families][:count]:
            yield families[name].pop()
            count -= 1
            if not families[name]:
                del families[name]


def planned(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs whose programs share processes."""
    together: dict[object, list[Pair]] = {}
    for pair in pairs:
        if pair.has_own_process:
            yield [pair]
        else:
            together.setdefault((pair.jit, str(pair.environments)), []).append(pair)
    for group in together.values():
        for start in range(0, len(group), _TOGETHER):
            yield group[start : start + _TOGETHER]


def judgements(pairs: Sequence[Pair], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run all pairs, several at a time, and yield a record of each."""
    orders = () if options.off else ORDERS
    with contextlib.ExitStack() as undo, concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        programs = Programs(undo.enter_context(new_place()).root, pairs)
        workers: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(options.processes):
            worker = Worker(undo.enter_context(new_place()), programs, keeps=options.show)
            undo.callback(worker.close)
            workers.put(worker)

        def run(group: list[Pair]) -> list[dict[str, Any]]:
            worker = workers.get()
            try:
                ran = worker.run(group, orders)
            finally:
                workers.put(worker)
            return [judged(pair, ran[pair.name]) for pair in group]

        for done in concurrent.futures.as_completed([pool.submit(run, group) for group in planned(pairs)]):
            yield from done.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="pairs whose names contain one of these")
    parser.add_argument("--sample", type=int, help="so many pairs, of each family its share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--records", type=Path, help="the folder that gets what was found")
    parser.add_argument("--off", action="store_true", help="find out only whether A and B differ without xcache")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--show", action="store_true", help="print what the programs say, and each result")
    options = parser.parse_args()
    pairs = [pair for pair in all_pairs() if any(wanted in pair.name for wanted in options.only or [""])]
    if options.sample is not None:
        pairs = sampled(pairs, options.sample, options.seed)
    if options.list:
        print(*(pair.name for pair in pairs), sep="\n")
        return
    start, records = time.monotonic(), dict[str, dict[str, Any]]()
    file = None if options.records is None else options.records / f"{jax.__version__}.json"
    for record in judgements(pairs, options):
        records[record["name"]] = record
        if record["verdict"] != "right" or options.show:
            print(f"{record['verdict'].upper()}: {record['name']}\n  {record['why']}", flush=True)
    counts = Counter(record["verdict"] for record in records.values())
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"jax {jax.__version__}: {len(records)} pairs in {time.monotonic() - start:.0f} s: {told}")
    if file is not None and not options.off:
        _add(records, file)
    # Where most pairs test nothing, the run shows nothing.
    if counts["wrong"] or counts["tests nothing"] > len(records) / 10:
        sys.exit(1)


def _add(records: dict[str, dict[str, Any]], file: Path) -> None:
    """Add what was found to what earlier runs of other pairs have found."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        records = {record["name"]: record for record in json.loads(file.read_text())} | records
    file.write_text(json.dumps([*records.values()], indent=1))


if __name__ == "__main__":
    main()
