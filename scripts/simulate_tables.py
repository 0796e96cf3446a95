"""Replays traces under policies, and prints what each saves next to the clairvoyant bound."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from operator import truediv

from simulate_bound import most_saved
from simulate_policies import FEW, POLICIES, replay
from simulate_traces import MADE_UP, Request, make

SHARES = (0.01, 0.03, 0.1, 0.3)


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description="Print what eviction policies save.")
    kinds = "kinds of requests; all of them by default"
    parser.add_argument("traces", nargs="*", choices=[[], *MADE_UP], metavar="KIND", help=kinds)
    parser.add_argument("--seed", type=int, default=0, help="what the made-up requests follow from")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of measured compile times (of a log-normal)")
    parser.add_argument("--policies", choices=("few", "all"), default="few", help=f"few: {', '.join(FEW)}")
    options = parser.parse_args()
    names = list(POLICIES) if options.policies == "all" else FEW
    cells: list[list[float]] = []
    kinds_chosen = options.traces or list(MADE_UP)
    for kind in kinds_chosen:
        cells += print_table(kind, make(kind, options.seed), names, options.noise)
    if len(kinds_chosen) > 1:
        print_summary(names, [cell for cell in cells if any(cell[:-1])])


def print_table(name: str, requests: Sequence[Request], policies: Sequence[str], noise: float) -> list[list[float]]:
    """Print and return what each policy saves, and last the bound, at each size."""
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
    """Print the summary over all sizes of all traces."""
    columns = list(zip(*cells, strict=True))[:-1]
    of_bound = [statistics.mean(map(truediv, column, (cell[-1] for cell in cells))) for column in columns]
    next_to_best = [min(map(truediv, column, (max(cell[:-1]) for cell in cells))) for column in columns]
    print(f"### All together\n\n| | {' | '.join(policies)} |\n|---|{'---:|' * len(policies)}")
    for what, shares in {"mean share of the bound": of_bound, "worst case, next to the best": next_to_best}.items():
        print(f"| {what} | {' | '.join(f'{share:.1%}' for share in shares)} |")


if __name__ == "__main__":
    main()
