"""At every line of xcache's that a program's compile goes through: it is interrupted, or a handler compiles there."""

from __future__ import annotations

import json
import sys

import pytest
from alongside import running, write

pytestmark = pytest.mark.slow

# sys.settrace stands for the signal: it can be had at each line once, where a real one comes where it pleases.
_TRACE = """
import faulthandler, jax.numpy as jnp, xcache
from xcache.cache import current
folder = os.path.dirname(xcache.__file__) + os.sep
met, strikes_left = set(), 0
passed_over = set()

def tracer(frame, event, argument):
    global strikes_left
    if not frame.f_code.co_filename.startswith(folder) or frame.f_code.co_filename in passed_over:
        return None
    where = (frame.f_code.co_filename, frame.f_lineno)
    if event == "line" and strikes_left and where not in met:
        met.add(where)
        strikes_left -= 1
        strike(where)
    return tracer

def lowered(k):
    return jax.jit(lambda v: v * k + 1).lower(x)

def right(compiled, k):
    assert np.array_equal(compiled(x), x * k + 1), k

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def at_every_line(attempt, patience=25, at_once=1):
    # Until it has come through untouched so often that nothing new can be expected.
    global strikes_left
    untouched, k = 0, 0
    while untouched < patience:
        before, strikes_left = len(met), at_once
        faulthandler.dump_traceback_later(20, exit=True)
        sys.settrace(tracer)
        try:
            attempt(k)
        finally:
            sys.settrace(None)
        untouched = 0 if len(met) > before else untouched + 1
        k += 1
    faulthandler.cancel_dump_traceback_later()
    return k

right(lowered(-1).compile(), -1)
open_before = descriptors()
slowest = 0.0
"""

INTERRUPTED = (
    _TRACE
    + """
def strike(where):
    raise KeyboardInterrupt(where)

def attempt(k):
    global slowest
    program = lowered(k if cold else 0)
    try:
        compiled = program.compile()
    except KeyboardInterrupt:
        sys.settrace(None)
        begun = time.monotonic()
        compiled = program.compile()
        slowest = max(slowest, time.monotonic() - begun)
    right(compiled, k if cold else 0)

cold = True
attempts = at_every_line(attempt)
cold = False
xcache.stats()
attempts += at_every_line(attempt)
print(json.dumps({"lines": len(met), "slowest": slowest, "left open": descriptors() - open_before}))
"""
)

COMPILED_THERE = (
    _TRACE
    + """
# Made before: jax itself cannot be entered in the middle of tracing.
others = [(n, lowered(n)) for n in range(1000, 1700)]

def strike(where):
    n, program = others.pop()
    right(program.compile(), n)

def attempt(k):
    right(lowered(k if cold else 0).compile(), k if cold else 0)

cold = True
at_every_line(attempt, at_once=5)
cold = False
at_every_line(attempt, at_once=5)
print(json.dumps({"lines": len(met), "slowest": slowest, "left open": descriptors() - open_before}))
"""
)


@pytest.mark.parametrize("source", [INTERRUPTED, COMPILED_THERE], ids=["interrupted", "compiled there"])
def test_at_every_line(place, source):
    place.start_daemon()
    with running([sys.executable, write(place, source)], place, XCACHE="1") as program:
        out, err = program.communicate(timeout=150)
    assert program.returncode == 0, err[-6000:]
    found = json.loads(out)
    # Some of them are met in every version: keys, client, connection, protocol, queue.
    assert found["lines"] > 100
    # It does not wait for itself, nor for a timeout.
    assert found["slowest"] < 4
    # Each thread that loads ahead has a connection of its own.
    assert found["left open"] < 20
    assert err == ""


SWITCHED_ON = (
    _TRACE
    + """
from jax._src import compiler
from xcache import plugin

# These few lines are run without xcache as well, or are there to pass the interrupt on.
passed_over |= {plugin.__file__, os.path.join(os.path.dirname(plugin.__file__), "hook", "late.py")}
xcache.disable()
original = compiler.compile_or_get_cached

def strike(where):
    global struck
    struck = where
    raise KeyboardInterrupt(where)

def attempt(k):
    before = len(met)
    # Whatever leaves this, jax swallows.
    plugin.initialize()
    sys.settrace(None)
    try:
        right(lowered(k).compile(), k)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted == (len(met) > before), (interrupted, met)
    right(lowered(k).compile(), k)
    xcache.disable()
    assert compiler.compile_or_get_cached is original, struck

at_every_line(attempt, patience=3)
print(json.dumps({"lines": len(met), "left open": descriptors() - open_before}))
"""
)


def test_an_interrupt_while_it_is_switched_on_comes_out_at_the_next_compile(place):
    with running([sys.executable, write(place, SWITCHED_ON)], place, XCACHE="1") as program:
        out, err = program.communicate(timeout=150)
    assert program.returncode == 0, err[-6000:]
    found = json.loads(out)
    assert found["lines"] > 30
    assert found["left open"] < 10
