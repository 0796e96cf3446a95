"""Replays traces under policies, and prints what each saves next to the clairvoyant bound."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from simulate_bound import most_saved
from simulate_policies import FEW, POLICIES, replay
from simulate_traces import MADE_UP, Request, make, recorded

SHARES = (0.01, 0.03, 0.1, 0.3)


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description="What eviction policies save.")
    parser.add_argument("traces", nargs="*", default=list(MADE_UP), metavar="TRACE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="replay a recorded trace so many times over")
    parser.add_argument("--noise", type=float, default=0.0, help="spread of measured compile times (of a log-normal)")
    parser.add_argument("--policies", choices=("few", "all"), default="few")
    options = parser.parse_args()
    names = list(POLICIES) if options.policies == "all" else FEW
    for name in options.traces:
        requests = make(name, options.seed) if name in MADE_UP else recorded(Path(name), options.repeat)
        print_table(name if name in MADE_UP else Path(name).stem, requests, names, options.noise)


def print_table(name: str, requests: Sequence[Request], policies: Sequence[str], noise: float) -> None:
    sizes = {request.key: request.size for request in requests}
    everything = sum(request.seconds for request in requests)
    print(
        f"### {name}\n\n{len(requests):,} requests of {len(sizes):,} keys, {sum(sizes.values()) / 2**20:,.0f} MiB;"
        f" without a cache they compile for {everything:,.0f} s. Seconds saved:\n"
    )
    print(f"| size | {' | '.join(policies)} | bound |\n|---|{'---:|' * (len(policies) + 1)}")
    for share in SHARES:
        capacity = int(sum(sizes.values()) * share)
        saved = [f"{replay(requests, capacity, POLICIES[policy], noise=noise).saved:,.0f}" for policy in policies]
        bound = f"{most_saved(requests, capacity):,.0f}"
        print(f"| {share:.0%}: {capacity / 2**20:,.0f} MiB | {' | '.join([*saved, bound])} |")
    print(flush=True)


if __name__ == "__main__":
    main()
