"""The campaigns' verdict finds a daemon that evicts the wrong entries."""

from __future__ import annotations

import time

import pytest
from support.acknowledged import Ledger
from support.campaigns import Campaign
from support.conversation import key_of, talking
from support.verdict import check

from xcache.wire import commands


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True], ids=["as it should", "the wrong one"])
def test_an_eviction_is_judged(place, wrong):
    """One that is small and new is worth more than one that is large and old, whichever of them is missing."""
    place.start_daemon(XCACHE_MAX_SIZE="1000000")
    # This campaign is separate, so that its findings do not count as findings of this run.
    ledger, campaign = Ledger(), Campaign(None, 0)
    with talking(place) as talk:
        for name, size in (("large and old", 400_000), ("small and new", 1000)):
            content = name.encode() * (size // len(name))
            began = time.monotonic()
            before = ledger.begins_to_put(key_of(name), content)
            ledger.has_put(key_of(name), content, talk.put(key_of(name), content), before, began)
        gone = key_of("small and new" if wrong else "large and old")
        assert isinstance(talk.ask(commands.Remove([gone])), commands.Removed)
    place.stop()
    place.execute("INSERT OR REPLACE INTO statistics (name, amount) VALUES ('evictions', 1)")
    place.start_daemon()
    check(place, ledger, campaign, "afterwards", evicting=True)
    assert [problem for problem in campaign.problems if "was worth less" in problem] == campaign.problems
    assert bool(campaign.problems) == wrong
