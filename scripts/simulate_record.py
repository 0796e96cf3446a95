"""Has small training programs run again and again, and a daemon record what they ask for."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS, RUNS, SLOPE = 24, 90, 0.7

PROGRAM = """
import sys
import jax, jax.numpy as jnp
which = int(sys.argv[1])
width, depth = 8 + 8 * (which % 6), 1 + which % 4
bend = (jnp.tanh, jax.nn.relu, jax.nn.gelu)[which // 6 % 3]
def model(layers, x):
    for weights, bias in layers:
        x = bend(x @ weights + bias)
    return x
def loss(layers, x, y):
    return ((model(layers, x) - y) ** 2).mean()
@jax.jit
def step(layers, x, y):
    value, slopes = jax.value_and_grad(loss)(layers, x, y)
    return jax.tree.map(lambda old, slope: old - 0.1 * slope, layers, slopes), value
key = jax.random.key(which)
layers = [(jax.random.normal(one, (width, width)) * 0.1, jnp.zeros(width)) for one in jax.random.split(key, depth)]
x = jax.random.uniform(key, (4, width))
y = jnp.sort(x, axis=-1)
for _ in range(3):
    layers, value = step(layers, x, y)
print(float(value), float(jax.jit(loss)(layers, x, y)), float(jnp.abs(model(layers, x)).max()))
"""


def main() -> None:
    """Write the trace; some are run far more often than others (Zipf), as it is with people."""
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/simulate --record FILE")
    trace = Path(sys.argv[1]).absolute()
    choose = random.Random(0)
    weights = list(itertools.accumulate((rank + 1) ** -SLOPE for rank in range(PROGRAMS)))
    with tempfile.TemporaryDirectory(prefix="xc") as folder:
        place = {"XCACHE_DIR": f"{folder}/store", "XCACHE_SOCKET": f"{folder}/s", "XCACHE_TRACE": str(trace)}
        environment = os.environ | place | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"}
        try:
            for which in choose.choices(range(PROGRAMS), cum_weights=weights, k=RUNS):
                command = [sys.executable, "-c", PROGRAM, str(which)]
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=300)
        finally:
            stop = [Path(sys.executable).with_name("xcache"), "stop"]
            subprocess.run(stop, env=environment, stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
