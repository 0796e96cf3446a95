"""Runs the targets of tests/fuzz for as many cases as wanted, and prints what came of them."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / each) for each in (".", "daemon", "tests")]

from support import fuzzing  # noqa: E402 - found through the path above

# So many times what a run of the tests has time for.
MORE = 50


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help=f"for each target; {MORE} times those of the tests unless said")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("target", nargs="*", choices=[[], *fuzzing.TARGETS], help="all of them unless some are named")
    chosen = parser.parse_args()
    cases = {name: chosen.cases or MORE * fuzzing.TARGETS[name].quick for name in chosen.target or fuzzing.TARGETS}
    failed = [name for name, count in cases.items() if not holds(name, count, chosen.seed)]
    if failed:
        sys.exit(f"scripts/fuzz: broken: {' '.join(failed)}")


def holds(target: str, cases: int, seed: int) -> bool:
    """Run the corpus of a target and then new cases."""
    try:
        replayed = fuzzing.replay(target)
        counts = fuzzing.fuzz(target, cases, seed)
    except fuzzing.Defect as defect:
        traceback.print_exception(defect)
        print(f"{target:9} kept as {fuzzing.keep(target, defect.data).relative_to(ROOT)}")
        return False
    rate = counts.cases / counts.seconds
    print(
        f"{target:9} {replayed.cases} kept and {counts.cases} new cases, {counts.taken} of them taken, "
        f"{counts.seconds:.0f} s, {rate:.0f} a second",
        flush=True,
    )
    return True


if __name__ == "__main__":
    main()
