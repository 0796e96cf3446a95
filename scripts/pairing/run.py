"""Runs pairs of programs and judges them: each must give the results that it gives without xcache."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import jax

from pairing.judging import judged
from pairing.pair import Pair
from pairing.table import all_pairs
from pairing.running import Programs, Worker

from support.places import new_place  # noqa: E402 - running has made it importable

# So many programs share a process, where they leave it as it was.
_TOGETHER = 16


def planned(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs whose programs share processes, the costly ones first."""
    together: dict[object, list[Pair]] = {}
    for pair in pairs:
        if pair.is_alone or pair.is_fresh or pair.jax_files is not None:
            yield [pair]
        else:
            together.setdefault((pair.jit, str(pair.environments)), []).append(pair)
    for group in together.values():
        for start in range(0, len(group), _TOGETHER):
            yield group[start : start + _TOGETHER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="pairs whose names contain one of these")
    parser.add_argument("--sample", type=int, help="so many pairs, of each family its share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--records", type=Path, help="the folder that gets what was found")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--show", action="store_true", help="print each result, and what the programs say")
    options = parser.parse_args()
    pairs = [*all_pairs()]
    if options.only:
        pairs = [pair for pair in pairs if any(wanted in pair.name for wanted in options.only)]
    if options.sample is not None:
        pairs = random.Random(options.seed).sample(pairs, min(options.sample, len(pairs)))  # noqa: S311
    if options.list:
        print(*(pair.name for pair in pairs), sep="\n")
        return
    start = time.monotonic()
    records = []
    with contextlib.ExitStack() as undo, concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        workers: SimpleQueue[Worker] = SimpleQueue()
        programs = Programs(undo.enter_context(new_place()).root, pairs)
        for _ in range(options.processes):
            worker = Worker(undo.enter_context(new_place()), programs, keeps=options.show)
            undo.callback(worker.close)
            workers.put(worker)

        def run(group: list[Pair]) -> list[dict[str, object]]:
            worker = workers.get()
            try:
                ran = worker.run(group)
            finally:
                workers.put(worker)
            return [judged(pair, ran[pair.name]) for pair in group]

        for done in concurrent.futures.as_completed([pool.submit(run, group) for group in planned(pairs)]):
            for record in done.result():
                records.append(record)
                if record["verdict"] != "right" or options.show:
                    print(f"{record['verdict'].upper()}: {record['name']}\n  {record['why']}", flush=True)
    counts: dict[str, int] = {}
    for record in records:
        counts[record["verdict"]] = counts.get(record["verdict"], 0) + 1
    print(f"jax {jax.__version__}: {len(records)} pairs in {time.monotonic() - start:.0f} s: {counts}")
    if options.records is not None:
        options.records.mkdir(parents=True, exist_ok=True)
        (options.records / f"{jax.__version__}.json").write_text(json.dumps(records, indent=1))
    if counts.get("wrong") or counts.get("tests nothing"):
        sys.exit(1)


if __name__ == "__main__":
    main()
