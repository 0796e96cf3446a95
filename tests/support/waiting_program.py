"""A program of many compiles that says how long its main thread waited in xcache, without asking xcache.

    python waiting_program.py COUNT

Beside COUNT programs that can be stored it compiles one that cannot be serialized and one that XLA refuses, so that it
sends every message that a program may send.

It watches every call of the main thread into C that may block, and adds up those that xcache made and that took long
enough to be a wait for the daemon. A wait for a load that XLA is doing on another thread does not count.
"""

import atexit
import dataclasses
import json
import sys
import threading
import time
from collections import Counter

_BLOCKING = {"poll", "acquire", "sleep", "connect", "recv", "recvmsg", "send", "sendmsg", "sendall", "waitpid", "join"}
_LONG = 0.05

start = time.clock_gettime(time.CLOCK_MONOTONIC)
waits: Counter[str] = Counter()
# For each program that was a hit, the seconds that the main thread waited for it.
hits: dict[str, float] = {}
_begun: list[tuple[float, bool]] = [(0.0, False)]


def _xla_loads():
    """Return whether another thread is in the part of xcache that calls XLA to load ahead."""
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename.endswith("hook/ahead.py") and frame.f_code.co_name == "__call__":
                return True
            frame = frame.f_back
    return False


def _watch(frame, event, function):
    if getattr(function, "__name__", "") not in _BLOCKING:
        return
    if event == "c_call":
        is_for_xla = frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait" and _xla_loads()
        _begun[0] = time.clock_gettime(time.CLOCK_MONOTONIC), is_for_xla
    elif event in ("c_return", "c_exception"):
        start, is_for_xla = _begun[0]
        seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - start
        if seconds >= _LONG and not is_for_xla:
            names = []
            while frame is not None:
                if "/xcache/" in frame.f_code.co_filename:
                    names.append(frame.f_code.co_name)
                frame = frame.f_back
            if names:
                waits[" < ".join([function.__name__, *names[:4]])] += seconds


def _say():
    sys.setprofile(None)
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC) - start
    stats = dataclasses.asdict(xcache.stats())
    said = {"results": results, "waits": waits, "hits": hits, "stats": stats, "seconds": seconds}
    sys.stdout.write(json.dumps(said))


# This runs last at exit, so that it sees the waits of xcache's own exit.
atexit.register(_say)
results: list[float] = []
sys.setprofile(_watch)

import jax  # noqa: E402
import numpy as np  # noqa: E402

import xcache  # noqa: E402
from xcache.errors import UncacheableError  # noqa: E402
from xcache.storing import StoreQueue  # noqa: E402

# Too large to come with a prediction, but for the first few.
table = np.frombuffer(np.random.RandomState(0).bytes(1 << 16), np.uint8).reshape(8, -1)
x = np.arange(8, dtype=np.float32)


def program(k):
    def compute(v):
        return (v[:, None] * (table + np.uint8(k))).sum() + k

    compute.__name__ = f"program_{k}"
    return jax.jit(compute)


def refused(v):
    return jax.ffi.ffi_call("nobody_registers_this", jax.ShapeDtypeStruct(v.shape, v.dtype))(v)


def add(queue, compiled, weight):
    """Queue a compiled program, or say of the one that cannot be serialized that it cannot."""
    if compiled.request.module_name == "jit_not_serializable":
        compiled = compiled._replace(serialized=UncacheableError("not serializable"))
    return add_as_usual(queue, compiled, weight)


def not_serializable(v):
    return v.sum() * 3


add_as_usual, StoreQueue.add = StoreQueue.add, add
results.append(float(jax.jit(not_serializable)(x)))
for k in range(int(sys.argv[1])):
    waited, hit = sum(waits.values()), xcache.stats().hits
    results.append(float(program(k)(x)))
    if xcache.stats().hits > hit:
        hits[f"jit_program_{k}"] = sum(waits.values()) - waited
try:
    jax.jit(refused)(x)
except jax.errors.JaxRuntimeError:
    results.append(-1.0)
