"""Interrupt xcache at every line while its plugin switches it on; the next compile raises the interrupt."""

import json
import sys

from jax._src import compiler
from support.every_line import EveryLine, check, descriptors, left_open, lowered

import xcache
from xcache import plugin, process_cache
from xcache.hook import deferred

# It is compiled once, and found in the cache from then on.
check(lowered(0).compile(), 0)
open_before = len(descriptors())
xcache.disable()
original = compiler.compile_or_get_cached
struck = None


def interrupt(where):
    global struck
    struck = where
    raise KeyboardInterrupt(where)


# These few lines are run without xcache as well, or are there to pass the interrupt on.
lines = EveryLine(interrupt, passed_over={plugin.__file__, deferred.__file__})


def attempt(k):
    before = len(lines.met)
    # jax swallows every exception that leaves this.
    process_cache._may_be_made = True
    plugin.initialize()
    sys.settrace(None)
    try:
        check(lowered(0).compile(), 0)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted == (len(lines.met) > before), (interrupted, lines.met)
    check(lowered(0).compile(), 0)
    xcache.disable()
    assert compiler.compile_or_get_cached is original, struck


lines.try_all(attempt, patience=3)
print(json.dumps({"lines": len(lines.met), "left open": left_open(open_before, 1)}))
