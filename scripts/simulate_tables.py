"""Replays traces under policies, and prints what each saves next to the clairvoyant bound."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from operator import truediv
from pathlib import Path

from simulate_bound import most_saved
from simulate_policies import FEW, POLICIES, replay
from simulate_traces import MADE_UP, Request, make, recorded

SHARES = (0.01, 0.03, 0.1, 0.3)


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description="What eviction policies save.")
    kinds = f"a file that a daemon recorded (XCACHE_TRACE), or one of {', '.join(MADE_UP)}; all of these by default"
    parser.add_argument("traces", nargs="*", default=list(MADE_UP), metavar="TRACE", help=kinds)
    parser.add_argument("--seed", type=int, default=0, help="what the made-up requests follow from")
    parser.add_argument("--repeat", type=int, default=1, help="replay a recorded trace so many times over")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of measured compile times (of a log-normal)")
    parser.add_argument("--policies", choices=("few", "all"), default="few", help=f"few: {', '.join(FEW)}")
    options = parser.parse_args()
    names = list(POLICIES) if options.policies == "all" else FEW
    cells: list[list[float]] = []
    for name in options.traces:
        try:
            requests = make(name, options.seed) if name in MADE_UP else recorded(Path(name), options.repeat)
        except OSError as error:
            parser.error(f"{name} is none of {', '.join(MADE_UP)}, and no file that can be read: {error.strerror}")
        if not requests:
            parser.error(f"{name} records no request for anything that was ever stored")
        cells += print_table(name if name in MADE_UP else Path(name).stem, requests, names, options.noise)
    if len(options.traces) > 1:
        print_summary(names, [cell for cell in cells if any(cell[:-1])])


def print_table(name: str, requests: Sequence[Request], policies: Sequence[str], noise: float) -> list[list[float]]:
    """What each policy saves, and last the bound, at each size."""
    sizes = {request.key: request.size for request in requests}
    everything = sum(request.seconds for request in requests)
    digits = 0 if everything >= 1000 else 1
    unit, scale = ("MiB", 2**20) if sum(sizes.values()) >= 100 * 2**20 else ("KiB", 2**10)
    print(
        f"### {name}\n\n{len(requests):,} requests of {len(sizes):,} keys, {sum(sizes.values()) / scale:,.0f} {unit};"
        f" without a cache they compile for {everything:,.{digits}f} s. Seconds saved:\n"
    )
    print(f"| size | {' | '.join(policies)} | bound |\n|---|{'---:|' * (len(policies) + 1)}")
    rows = []
    for share in SHARES:
        capacity = int(sum(sizes.values()) * share)
        saved = [replay(requests, capacity, POLICIES[policy], noise=noise).saved for policy in policies]
        rows.append([*saved, most_saved(requests, capacity)])
        figures = [f"{seconds:,.{digits}f}" for seconds in rows[-1]]
        print(f"| {share:.0%}: {capacity / scale:,.0f} {unit} | {' | '.join(figures)} |")
    print(flush=True)
    return rows


def print_summary(policies: Sequence[str], cells: Sequence[Sequence[float]]) -> None:
    """All sizes of all traces together."""
    columns = list(zip(*cells, strict=True))[:-1]
    of_bound = [statistics.mean(map(truediv, column, (cell[-1] for cell in cells))) for column in columns]
    next_to_best = [min(map(truediv, column, (max(cell[:-1]) for cell in cells))) for column in columns]
    print(f"### All together\n\n| | {' | '.join(policies)} |\n|---|{'---:|' * len(policies)}")
    for what, shares in {"mean share of the bound": of_bound, "worst case, next to the best": next_to_best}.items():
        print(f"| {what} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
