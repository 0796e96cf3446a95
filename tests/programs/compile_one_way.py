"""Compile one function; the environment says in which one way it differs from the usual one."""

import os
import time

import jax
import jax.numpy as jnp

WAY = os.environ.get("WAY", "")
if WAY == "x64":
    jax.config.update("jax_enable_x64", True)
if WAY == "precision":
    jax.config.update("jax_default_matmul_precision", "highest")
factor = {"number": 3.0, "time": time.time() - float(os.environ.get("AGO", "0"))}.get(WAY, 2.0)
rows = 16 if WAY == "shape" else 8


def step(x):
    y = x @ x.T
    if WAY == "operation":
        y = jnp.tanh(y)
    return y * factor


x = jnp.ones((rows, 8), jnp.bfloat16 if WAY == "dtype" else None)
step = jax.jit(step, donate_argnums=0 if WAY == "donation" else ())
step(x)
