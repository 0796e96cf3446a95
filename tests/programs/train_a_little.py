"""Train a small network for two steps, evaluate it, and say what was computed and what xcache did."""

import json
from functools import partial

import jax
import jax.numpy as jnp

import xcache


def forward(parameters, x):
    for w, b in parameters:
        x = jnp.tanh(x @ w + b)
    return x


def loss(parameters, x, y):
    return jnp.mean((forward(parameters, x) - y) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(parameters, x, y):
    value, gradient = jax.value_and_grad(loss)(parameters, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value


keys = jax.random.split(jax.random.key(0), 3)
parameters = [(jax.random.normal(key, (8, 8)), jnp.zeros(8)) for key in keys]
x = jnp.linspace(-1, 1, 32).reshape(4, 8)
losses = []
for _ in range(2):
    parameters, value = train_step(parameters, x, x * 0.5)
    losses.append(float(value))
evaluated = float(jax.jit(loss)(parameters, x, x))
said = xcache.stats()
counts = {"hits": said.hits, "misses": said.misses, "prefetched": said.prefetched, "errors": dict(said.errors)}
print(json.dumps({"computed": [*losses, evaluated]} | counts))
