"""A steady mixed load leaves nothing behind in a daemon, however long it lasts, and neither do gets in a program.

A leak is told from a heap that is still filling its holes by comparing the second half of a load with the end of the
first, and if that is too much, by going on for as long again: holes are filled in the end, a leak has then left twice
as much. The allowance is fixed, so ``--soak SECONDS`` makes what can be noticed smaller. At 7000 requests a second, on
two cores, the usual 12 seconds notice 50 bytes a request in the daemon; of its 15,000 gets a program may keep 66 bytes
each.
"""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from support import steady_load
from support.conversation import key_of, talking
from support.places import until
from support.program_files import program_text
from support.resources import Sample, descriptors_of, helping, sample

from xcache.wire import commands, protocol

PROCESSES = 3
GETS_PER_SECOND = 1250
SAMPLES = 80
MAX_SIZE = 8_000_000
ALLOWED = 2_000_000
ALLOWED_IN_PROGRAM = 500_000


@pytest.mark.slow
@pytest.mark.timeout(100_000)
def test_a_steady_load_leaves_nothing_behind_in_the_daemon(place, campaign):
    seconds = campaign.seconds(12.0)
    child = place.start_daemon(XCACHE_MAX_SIZE=str(MAX_SIZE))
    with talking(place) as talk:
        assert talk.put(key_of("row"), b"content") == protocol.Stored(True)
        assert talk.put(key_of("file"), b"content" * 10_000) == protocol.Stored(True)
        assert talk.get(key_of("file")) == b"content" * 10_000
        before, open_before = sample(place, talk, child.pid), descriptors_of(child.pid)
        samples: list[Sample] = []
        with helping(place, "-P", steady_load.__file__, place.root, PROCESSES, campaign.seed) as load:
            start = time.monotonic()
            for more in (seconds, seconds, 2 * seconds):
                deadline = time.monotonic() + more
                while (left := deadline - time.monotonic()) > 0 and load.poll() is None:
                    time.sleep(min(left, seconds / SAMPLES))
                    samples.append(sample(place, talk, child.pid))
                if load.poll() is not None or grown(samples) < ALLOWED:
                    break
            taken = time.monotonic() - start
            # The end of its stdin is the end of the load.
            _, stderr = load.communicate(timeout=60)
        assert (load.returncode, stderr) == (0, "")
        counts: Counter[str] = Counter()
        for number in range(PROCESSES):
            counts.update(json.loads((place.root / f"counts-{number}.json").read_text()))
        answered = counts.total() - counts["killed clients"] - counts["loads"]
        campaign.counts["requests answered"] += answered
        campaign.counts["samples"] += len(samples)
        growth = grown(samples)
        campaign.note(f"{answered} requests answered in {taken:.0f} s: {dict(sorted(counts.items()))}")
        campaign.note(f"MB in memory: {[round(each.resident / 1e6, 1) for each in samples[:: len(samples) // 16]]}")
        campaign.note(f"the second half added {growth / 1e6:.2f} MB: {2 * growth / answered:.0f} bytes a request")
        assert talk.ask(commands.Sync()) == protocol.Done()
        assert until(lambda: descriptors_of(child.pid) == open_before), descriptors_of(child.pid) - open_before
        after = sample(place, talk, child.pid)
        assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
        assert (after.connections, after.leases) == (1, 0)
        assert after.stored <= MAX_SIZE
        # The thread that looks at what this user has announced comes and goes; there is one at a time.
        assert {each.threads for each in samples} <= {before.threads, before.threads + 1}
        assert growth < ALLOWED


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(100_000)
def test_gets_leave_nothing_behind_in_the_program_that_makes_them(place, campaign):
    gets = 10 * round(GETS_PER_SECOND * campaign.seconds(12.0) / 10)
    place.start_daemon()
    with helping(place, "-c", program_text("get_again_and_again"), gets, XCACHE_TIMEOUT="300") as program:
        stdout, stderr = program.communicate(timeout=60 + gets / 100)
    assert (program.returncode, stderr) == (0, "")
    kinds, looks = json.loads(stdout)
    assert kinds == {"hit": gets * 9 // 10, "miss": gets // 10 + 205}
    descriptors = [number for _, number in looks]
    memory = [resident for resident, _ in looks[1:-1]]
    campaign.counts["requests answered"] += sum(kinds.values())
    campaign.note(f"{gets} gets of one program, MB in memory: {[round(each / 1e6, 1) for each in memory]}")
    # Each of the two caches has one connection for the thread that asks and one for that which stores.
    assert max(descriptors) <= descriptors[0] + 4
    assert descriptors[-1] == descriptors[0]
    assert memory[-1] - memory[len(memory) // 2 - 1] < ALLOWED_IN_PROGRAM


def grown(samples: list[Sample]) -> int:
    """Bytes that the second half of a load added to the least that was in memory at the end of the first.

    The least: what requests under way hold comes and goes by more than the allowance.
    """
    eighth = len(samples) // 8
    middle, end = samples[3 * eighth : 4 * eighth], samples[-eighth:]
    return min(each.resident for each in end) - min(each.resident for each in middle)
