"""Prepare the calls of four batch sizes, then make them; print what jax traced, what it compiled meanwhile, and all."""

import dataclasses
import inspect
import json
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

import xcache

traced = []


@xcache.jit(version="1", static_argnames="double")
def serve(weights, x, *, double=False):
    traced.append(x.shape[0])
    return jnp.tanh(x @ weights) * (2 if double else 1)


weights = jax.ShapeDtypeStruct((8, 8), np.float32)
calls = [(weights, jax.ShapeDtypeStruct((size, 8), np.float32)) for size in (1, 2, 4)]
named = inspect.signature(serve).bind(weights, jax.ShapeDtypeStruct((8, 8), np.float32), double=True)
serve.prepare(*calls, named)
prepared, compiles = sorted(set(traced)), []
traced.clear()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiles.append(name) if name.endswith("backend_compile_duration") else None
)
results = [serve(np.eye(8, dtype=np.float32), np.full((size, 8), 0.5, np.float32)) for size in (1, 2, 4)]
results.append(serve(np.eye(8, dtype=np.float32), np.full((8, 8), 0.5, np.float32), double=True))
try:
    serve.prepare((weights, "text"))
except TypeError as error:
    wrong = re.sub("0x[0-9a-f]+", "", str(error))
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("xcache-prepare")]
print(
    json.dumps(
        {
            "results": [np.asarray(result).tolist() for result in results],
            "prepared": prepared,
            "traced": traced,
            "compiles": len(compiles),
            "wrong": wrong,
            "left": left,
            "stats": dataclasses.asdict(xcache.stats()),
        }
    ),
    file=sys.stdout,
)
