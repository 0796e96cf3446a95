"""Trains a small transformer language model on bytes for a few steps; one line of JSON says how it went.

``python demo_model.py TEXT LAYERS``: an ordinary program in plain JAX. It knows xcache only to print what was counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path

STARTED = time.perf_counter()

import jax  # noqa: E402  # importing it counts
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import xcache  # noqa: E402

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, int(sys.argv[2])
BATCH, LENGTH, STEPS, KEEP = 2, 64, 5, 0.9
RATE, DECAY_1, DECAY_2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def initialize(key):
    """Return the parameters of the whole model, drawn from one key."""

    @partial(jax.jit, static_argnums=(1, 2))
    def dense(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)

    embed, place, *blocks = jax.random.split(key, 2 + LAYERS)
    layers = []
    for block in blocks:
        attend, project, widen, narrow = jax.random.split(block, 4)
        layers.append(
            {
                "norm_1": jnp.ones(WIDTH),
                "attend": dense(attend, WIDTH, 3 * WIDTH),
                "project": dense(project, WIDTH, WIDTH),
                "norm_2": jnp.ones(WIDTH),
                "widen": dense(widen, WIDTH, 4 * WIDTH),
                "narrow": dense(narrow, 4 * WIDTH, WIDTH),
            }
        )
    return {
        "embed": dense(embed, VOCABULARY, WIDTH),
        "place": dense(place, LENGTH, WIDTH),
        "layers": layers,
        "norm": jnp.ones(WIDTH),
    }


def normalize(x, scale):
    """Root-mean-square normalization."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x, layer):
    """Causal self-attention with several heads."""
    batch, length, _ = x.shape
    q, k, v = (
        part.reshape(batch, length, HEADS, WIDTH // HEADS) for part in jnp.split(x @ layer["attend"], 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(WIDTH // HEADS)
    visible = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["project"]


def dropout(x, key):
    """Leave out some, and scale the rest to make up for it."""
    return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)


@jax.jit
def block(x, layer, key):
    """Attention and a small network, each around a residual."""
    attended, widened = jax.random.split(key)
    x = x + dropout(attention(normalize(x, layer["norm_1"]), layer), attended)
    return x + dropout(jax.nn.gelu(normalize(x, layer["norm_2"]) @ layer["widen"]) @ layer["narrow"], widened)


def loss_of(parameters, tokens, key):
    """Mean cross entropy of each next byte."""
    x = parameters["embed"][tokens[:, :-1]] + parameters["place"]
    for layer, dropped in zip(parameters["layers"], jax.random.split(key, LAYERS), strict=True):
        x = block(x, layer, dropped)  # not a scan: each layer is compiled
    scores = jax.nn.log_softmax(normalize(x, parameters["norm"]) @ parameters["embed"].T)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()


@partial(jax.jit, donate_argnums=0)
def train_step(state, tokens):
    """Take one step of Adam."""
    parameters, first, second, step = state
    loss, gradient = jax.value_and_grad(loss_of)(parameters, tokens, jax.random.key(step))
    step = step + 1
    first = jax.tree.map(lambda m, g: DECAY_1 * m + (1 - DECAY_1) * g, first, gradient)
    second = jax.tree.map(lambda v, g: DECAY_2 * v + (1 - DECAY_2) * g * g, second, gradient)

    @jax.jit
    def update(p, m, v):
        return p - RATE * (m / (1 - DECAY_1**step)) / (jnp.sqrt(v / (1 - DECAY_2**step)) + EPSILON)

    return (jax.tree.map(update, parameters, first, second), first, second, step), loss


def batches(text):
    """Yield the same windows of the text in each run."""
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        starts = random.integers(0, len(data) - LENGTH - 1, BATCH)
        yield np.stack([data[start : start + LENGTH + 1] for start in starts])


def main():
    """Train, and print what came of it."""
    parameters = initialize(jax.random.key(0))
    state = parameters, *(jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)), jnp.zeros((), int)
    losses, first_step = [], None
    for tokens in batches(Path(sys.argv[1]).read_bytes()):
        state, loss = train_step(state, tokens)
        losses.append(float(loss))
        first_step = first_step or time.perf_counter() - STARTED
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    report = {
        "losses": losses,
        "digest": digest.hexdigest(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state[0])),
        "first_step_seconds": first_step,
        "stats": dataclasses.asdict(xcache.stats()),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
