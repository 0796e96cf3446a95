"""Interrupt a compile at every line of xcache's, and compile again; first with new functions, then with a known one.

Each is lowered and compiled four times, and interrupted somewhere else each time; the last time it goes through.
"""

import contextlib
import json
import sys

from support.every_line import EveryLine, check, check_on_another_thread, descriptors, left_open, lowered

import xcache

INTERRUPTS = 4

longest_wait = 0.0
cold = True


def interrupt(where):
    raise KeyboardInterrupt(where)


def waited():
    found = xcache.stats()
    return found.lost_seconds + found.wait_seconds


def attempt(k):
    global longest_wait, waited_before
    number = k if cold else 0
    for _ in range(INTERRUPTS):
        with contextlib.suppress(KeyboardInterrupt):
            lines.go_on()
            lowered(number).compile()
    sys.settrace(None)
    check(lowered(number).compile(), number)
    longest_wait, waited_before = max(longest_wait, waited() - waited_before), waited()


check(lowered(-1).compile(), -1)
waited_before = waited()
open_before = len(descriptors())
lines = EveryLine(interrupt)
lines.try_all(attempt, at_once=INTERRUPTS)
cold = False
xcache.stats()
lines.try_all(attempt, at_once=INTERRUPTS)
check_on_another_thread(-2)
print(json.dumps({"lines": len(lines.met), "longest wait": longest_wait, "left open": left_open(open_before, 8)}))
