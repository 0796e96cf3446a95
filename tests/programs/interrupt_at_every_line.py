"""Interrupt a compile at every line of xcache's, and compile again; first with new functions, then with a known one."""

import json
import sys

from support.every_line import EveryLine, check, descriptors, left_open, lowered

import xcache

longest_wait = 0.0
cold = True


def interrupt(where):
    raise KeyboardInterrupt(where)


def waited():
    found = xcache.stats()
    return found.lost_seconds + found.wait_seconds


def attempt(k):
    global longest_wait
    program = lowered(k if cold else 0)
    try:
        compiled = program.compile()
    except KeyboardInterrupt:
        sys.settrace(None)
        before = waited()
        compiled = program.compile()
        longest_wait = max(longest_wait, waited() - before)
    check(compiled, k if cold else 0)


check(lowered(-1).compile(), -1)
open_before = len(descriptors())
lines = EveryLine(interrupt)
lines.try_all(attempt)
cold = False
xcache.stats()
lines.try_all(attempt)
print(json.dumps({"lines": len(lines.met), "longest wait": longest_wait, "left open": left_open(open_before, 20)}))
