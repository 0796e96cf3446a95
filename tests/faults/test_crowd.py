"""A daemon and a crowd of programs that all ask at once."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from support import crowd
from support.conversation import key_of, talking
from support.places import digest, until
from support.resources import complaints, descriptors_of, helping

from xcache.wire import protocol

# Requests of each program, in the short form and in the long one; the first two hundred names are the same for all.
ASKS, LONG_ASKS = 250, 1100


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(100_000)
def test_a_crowd_of_programs_at_once_find_everything_right_and_compile_it_once(place, campaign):
    programs, asks = campaign.programs(50), LONG_ASKS if campaign.is_long else ASKS
    child = place.start_daemon(XCACHE_MAX_CONNECTIONS=str(4 * programs))
    with talking(place) as talk:
        # From here on everything is open that a daemon opens when it is first needed.
        # And what is made of this program takes so long to compile that it is waited for, however busy the machine is.
        known = {"compile_seconds": 1000.0, "program_digest": crowd.COMPONENTS["program"]}
        assert talk.put(key_of("first"), b"content", **known) == protocol.Stored(True)
        assert talk.get(key_of("first")) == b"content"
        before = descriptors_of(child.pid)
        began = time.monotonic()
        # Slow answers are to be expected of so many on one machine, and are not what this is about.
        with helping(place, "-P", crowd.__file__, programs, asks, place.root, XCACHE_TIMEOUT="300") as crowding:
            _, stderr = crowding.communicate(timeout=300 + programs)
        campaign.note(f"{programs} programs, {programs * asks} requests in {time.monotonic() - began:.1f} s")
        assert (crowding.returncode, stderr) == (0, "")
        results = [json.loads((place.root / f"{program}.json").read_text()) for program in range(programs)]
        compiled: Counter[str] = Counter()
        counted: Counter[str] = Counter()
        for result in results:
            assert result["wrong"] == []
            assert (result["counted"]["errors"], result["counted"]["uncacheable"]) == ({}, {})
            compiled.update(result["compiled"])
            counted.update({name: result["counted"][name] for name in ("requests", "hits", "misses", "stores")})
        names = {name for program in range(programs) for name in crowd.names_for(program, asks)}
        assert compiled == Counter(names)
        assert counted == {
            "requests": programs * asks,
            "hits": programs * asks - len(names),
            "misses": len(names),
            "stores": len(names),
        }
        campaign.counts["requests answered"] += counted["requests"]
        assert until(lambda: talk.status()["connections"] == 1)
        assert talk.ask(protocol.AskStatus()).compiles == []
        assert until(lambda: descriptors_of(child.pid) == before), descriptors_of(child.pid) - before
    stored = {key for (key,) in place.query("SELECT key FROM entries")}
    assert stored == {key_of("first"), *(digest(name.encode()) for name in names)}
    kept = dict(place.query("SELECT name, amount FROM statistics"))
    assert {name: kept[name] for name in ("requests", "hits", "misses")} == {
        name: counted[name] for name in ("requests", "hits", "misses")
    }
    assert kept["stores"] == counted["stores"] + 1
    assert complaints(place) == []
