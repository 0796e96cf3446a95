"""Every region of an entry damaged in turn, in a program with a real jax: no wrong load, and healed in one run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.places import TESTS


@pytest.mark.thorough
@pytest.mark.slow
def test_a_damaged_entry_is_never_loaded_and_healed_in_one_run(place, campaign):
    rounds = campaign.rounds(28)
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "flips.py"), str(rounds), str(campaign.seed)],
        env=place.with_support | {"XCACHE": "1", "XCACHE_LOG": "error"},
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=60 + 2 * rounds,
        check=False,
    )
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    over = bool(trials) and trials[-1] == {"over": True}
    if done.returncode or not over:
        campaign.problem("crashes", f"after {len(trials)} trials: {done.returncode}: {done.stderr[-500:]}")
    for number, trial in enumerate(trials[:-1] if over else trials):
        campaign.fault()
        campaign.checked(2 * 4)
        if not trial["right"]:
            campaign.problem("wrong loads", f"trial {number}: {trial}")
        elif not (trial["noticed"] and trial["healed"]):
            campaign.problem("other problems", f"trial {number}: {trial}")
    campaign.judge()
