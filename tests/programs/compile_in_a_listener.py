"""Compile while jax is about to compile another program, as a listener for metrics may."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

x = np.arange(4, dtype=np.float32)
running = []


def listen(event, value, **_):
    if event == "/jax/core/compile/backend_compile_duration" and not running:
        running.append(1)
        print(jax.jit(lambda a: a.sum())(x))
        running.pop()


for register in ("register_scalar_listener", "register_event_duration_secs_listener"):
    if hasattr(jax.monitoring, register):
        getattr(jax.monitoring, register)(listen)
print(jax.jit(lambda a: jnp.sin(a) * 2 + 1)(x))
