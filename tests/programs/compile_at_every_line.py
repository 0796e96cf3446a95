"""Compile another function at every line of xcache's that a compile goes through."""

import json

from support.every_line import EveryLine, check, descriptors, left_open, lowered

check(lowered(-1).compile(), -1)
open_before = len(descriptors())
# Made before: jax itself cannot be entered in the middle of tracing.
others = [(n, lowered(n)) for n in range(1000, 1700)]
cold = True


def compile_another(where):
    n, program = others.pop()
    check(program.compile(), n)


def attempt(k):
    check(lowered(k if cold else 0).compile(), k if cold else 0)


lines = EveryLine(compile_another)
lines.try_all(attempt, at_once=5)
cold = False
lines.try_all(attempt, at_once=5)
print(json.dumps({"lines": len(lines.met), "left open": left_open(open_before, 20)}))
