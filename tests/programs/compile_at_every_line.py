"""Compile another function at every line of xcache's that a compile goes through."""

import json
import os

from support.every_line import ONE_IN, EveryLine, check, descriptors, left_open, lowered

KNOWN = 0
check(lowered(-1).compile(), -1)
open_before = len(descriptors())
# Made before: jax itself cannot be entered in the middle of tracing. Every other one is found in the cache.
others = [(n, lowered(n)) for n in range(1000, 1100 + 600 // int(os.environ[ONE_IN]))]
known = lowered(KNOWN)
check(known.compile(), KNOWN)
struck = 0
cold = True


def compile_another(where):
    global struck
    struck += 1
    n, program = others.pop() if struck % 2 else (KNOWN, known)
    check(program.compile(), n)


def attempt(k):
    check(lowered(k if cold else KNOWN).compile(), k if cold else KNOWN)


lines = EveryLine(compile_another)
lines.try_all(attempt, at_once=10)
cold = False
lines.try_all(attempt, at_once=10)
print(json.dumps({"lines": len(lines.met), "left open": left_open(open_before, 8)}))
