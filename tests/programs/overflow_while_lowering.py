"""Lower constants that overflow: numpy warns, or raises if NUMPY_RAISES is set."""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np

if "NUMPY_RAISES" in os.environ:
    np.seterr(over="raise")
# jax warns of the donation, too, and that once for each lowering.
warnings.simplefilter("always")
x = np.arange(4, dtype=np.float16)


def filled(a):
    return a.at[jnp.array([1, 9])].get(mode="fill", fill_value=1e10)


for function, argument in (
    (jax.jit(lambda a: jnp.full((2,), 1e39) + a[0]), np.ones(1, np.float32)),
    (jax.jit(filled), x),
    (jax.jit(filled, donate_argnums=0), jnp.arange(4, dtype="float16")),
):
    try:
        print(function(argument))
    except FloatingPointError as error:
        print("FloatingPointError:", error)
