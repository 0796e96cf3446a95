"""Measures what recording costs a program: small programs, found and compiled, of which every second is not recorded.

The processor time of the thread that asks is measured, because other work on the machine adds nothing to that. Rounds
swap which programs are recorded, so that each is compared with itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS, ROUNDS = 200, 5

# Prints for each program whether it was recorded, found, and the milliseconds it took; and those of the thread that
# sends the rows, for each row.
PROGRAM = f"""
import contextlib, json, os, time
import jax, jax.numpy as jnp
jax.devices()
import xcache
from jax._src import monitoring
from xcache import cache as caches, hook
from xcache.process_cache import current
cache = current()
ledger, stages, nothing = cache.ledger, hook.current_stages(), lambda *_, **__: None
without = {{
    ledger: {{
        "asking": contextlib.nullcontext, "resuming": lambda _: contextlib.nullcontext(),
        "stage": lambda _: contextlib.nullcontext(),
        **dict.fromkeys(("note", "note_daemon", "tell", "note_compiling"), nothing),
    }},
    stages: dict.fromkeys(("describe", "note_arguments"), nothing),
    caches: {{"located_first": lambda _: b""}},
}}
listeners = monitoring._event_duration_secs_listeners
heard = next(each for each in listeners if getattr(each, "__self__", None) is stages)
before = {{owner: {{name: getattr(owner, name) for name in names}} for owner, names in without.items()}}

def record(wanted):
    for owner, names in (before if wanted else without).items():
        for name, value in names.items():
            setattr(owner, name, value)
    if wanted != (heard in listeners):
        (listeners.append if wanted else listeners.remove)(heard)

sending, send = [], ledger.send
def timed_send():
    start = time.thread_time()
    send()
    sending.append(time.thread_time() - start)
ledger.send = timed_send

def compile(number):
    shape, salt = jax.ShapeDtypeStruct((number + 1,), jnp.float32), float(os.environ["SALT"])
    lowered = jax.jit(lambda v: jnp.sin(v) * (number + salt) + jnp.sum(v)).lower(shape)
    lowered.compile()

compile({PROGRAMS})
found = []
for number in range({PROGRAMS}):
    wanted, hits = (number + int(os.environ["ROUND"])) % 2 == 0, xcache.stats().hits
    record(wanted)
    start = time.thread_time()
    compile(number)
    found.append([number, wanted, xcache.stats().hits > hits, (time.thread_time() - start) * 1e3])
record(True)
cache.close()
print(json.dumps([found, sum(sending) * 1e3 / ({PROGRAMS} // 2)]))
"""


def run(root: Path, number: int, salt: int) -> tuple[list[list[float]], float]:
    """Run the program, and return what it prints."""
    env = {"XCACHE": "1", "XCACHE_DIR": str(root / "store"), "XCACHE_SOCKET": str(root / "s"), "XCACHE_PREFETCH": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | env | {"ROUND": str(number), "SALT": str(salt)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found, sending = json.loads(done.stdout)
    return found, sending


def print_costs(what: str, runs: list[tuple[list[list[float]], float]]) -> None:
    """Print the median of a program's ratio, recorded to not recorded, and of both times."""
    by_way: dict[bool, dict[float, list[float]]] = {True: {}, False: {}}
    for programs, _ in runs:
        for number, is_recorded, _, milliseconds in programs:
            by_way[bool(is_recorded)].setdefault(number, []).append(milliseconds)
    recorded, without = ({n: statistics.median(each) for n, each in by_way[way].items()} for way in (True, False))
    ratios = [recorded[number] / without[number] for number in recorded if number in without]
    medians = [statistics.median(each.values()) for each in (without, recorded)]
    sending = statistics.median(sending for _, sending in runs)
    print(
        f"{what}: {medians[0]:.3f} ms not recorded, {medians[1]:.3f} ms recorded: {statistics.median(ratios):.3f};"
        f" {sending:.3f} ms more on the thread that stores"
    )


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="xc", dir="/tmp") as folder:
        root = Path(folder)
        try:
            # Each salt is another set of programs.
            compiled = [run(root, number, ROUNDS + number) for number in range(2 * ROUNDS)]
            found = [run(root, number, ROUNDS) for number in range(2 * ROUNDS)]
            if any(is_found for programs, _ in compiled for _, _, is_found, _ in programs):
                raise SystemExit("a program that should have been compiled was found")
            if not all(is_found for programs, _ in found for _, _, is_found, _ in programs):
                raise SystemExit("a program that should have been found was compiled")
            print_costs("a small program that is compiled", compiled)
            print_costs("a small program that is found", found)
            with contextlib.closing(sqlite3.connect(root / "store" / "store.db")) as store:
                for outcome in ("miss", "hit"):
                    sql = "SELECT count(*), sum(length(spans || module_name || site || shapes || key || outcome"
                    sql += " || cause || stored || nearest) + 40) FROM ledger WHERE outcome = ?"
                    ((rows, size),) = store.execute(sql, (outcome,))
                    print(f"1,000 rows of {outcome}: {size / rows * 1e3 / 1024:.0f} KiB")
        finally:
            subprocess.run(
                [Path(sys.executable).with_name("xcache"), "stop"],
                env=os.environ | {"XCACHE_DIR": str(root / "store"), "XCACHE_SOCKET": str(root / "s")},
                stdout=subprocess.DEVNULL,
                check=False,
            )


if __name__ == "__main__":
    main()
