"""Start programs together, and wait for each."""

from __future__ import annotations

import json
import subprocess
import sys

from support.places import Place

# Some seconds of compiling, and a few small programs around it; and the same with less of it.
PROGRAM = """
import dataclasses, json, jax, jax.numpy as jnp, numpy as np, xcache
def f(x):
    for i in range(120):
        x = jnp.tanh(x @ x) * (i + 1) + jnp.cos(x)
    return x
x = jnp.linspace(0, 1, 48 * 48).reshape(48, 48)
small = [float(jax.jit(lambda v, k=k: (v * k).sum())(x)) for k in range(4)]
out = np.asarray(jax.jit(f)(x)).tolist()
print(json.dumps([[small, out], dataclasses.asdict(xcache.stats())]))
"""
SHORT_PROGRAM = PROGRAM.replace("range(120)", "range(20)")


def begin(place: Place, source: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env=place.env | {"XCACHE": "1"} | environment,
        cwd=place.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(child: subprocess.Popen[str]) -> tuple[list, str]:
    try:
        stdout, stderr = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0, stderr[-3000:]
    # Gloo prints a line on stdout.
    return json.loads(stdout.splitlines()[-1]), stderr
