"""SIGKILL at random moments of a mixed load, of starting and of leaving: what was acknowledged stays."""

from __future__ import annotations

import random
import signal
import time

import pytest
from support.acknowledged import Ledger
from support.conversation import talking
from support.load import Load
from support.places import PATIENCE
from support.verdict import check

from xcache.wire import commands, protocol

MAX_SIZE = 1_500_000


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, MAX_SIZE], ids=["without a limit", "with evictions"])
def test_a_daemon_that_is_killed_again_and_again_keeps_what_it_acknowledged(place, campaign, limit):
    ledger = Ledger()
    choose = random.Random(f"kills {limit} {campaign.seed}")
    environment = {"XCACHE_MAX_SIZE": str(limit)}
    child = place.start_daemon(**environment)
    for number in range(campaign.rounds(3)):
        way = choose.choice(["load", "load", "load", "load", "leaving", "starting"])
        load = Load(place, ledger, f"{campaign.seed} {limit} {number}", evicting=bool(limit))
        load.start()
        time.sleep(choose.uniform(0, 0.3))
        if way == "leaving":
            child.send_signal(signal.SIGTERM)
            time.sleep(choose.uniform(0, 0.1))
        child.kill()
        child.wait()
        load.finish()
        campaign.fault()
        if way == "starting":
            # This daemon recovers after the last kill; a kill in the middle of that must not harm either.
            child = place.daemon(**environment)
            time.sleep(choose.uniform(0.05, 0.4))
            child.kill()
            child.wait()
            campaign.fault()
        child = place.start_daemon(**environment)
        check(place, ledger, campaign, f"round {number} ({way})", evicting=bool(limit))
    if limit:
        # On a slow machine so little comes before each kill that the store is not full yet.
        deadline = time.monotonic() + PATIENCE
        while not ledger.evicted and time.monotonic() < deadline:
            load = Load(place, ledger, f"{campaign.seed} {limit} {time.monotonic()}", evicting=True)
            load.start()
            time.sleep(0.5)
            load.finish()
            check(place, ledger, campaign, "filling the store", evicting=True)
        with talking(place) as talk:
            assert talk.ask(commands.Sync()) == protocol.Done()
            assert talk.status()["bytes"] <= limit
        assert ledger.evicted > 0
    campaign.judge()
