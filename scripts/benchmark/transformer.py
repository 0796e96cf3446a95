"""A small transformer, and how it is trained: what most of the programs are made of."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

WIDTH, HEADS, VOCABULARY = 128, 4, 256


def jit(fun: Callable[..., Any], **options: Any) -> Any:
    """Return ``jax.jit`` of a function; of the peer whose programs say what their code is, ``xcache.jit``."""
    import jax

    if os.environ.get("PROGRAM_SAYS_ITS_VERSION") != "1":
        return jax.jit(fun, **options)
    import xcache

    return xcache.jit(fun, version=_version(), **options)


@functools.cache
def _version() -> str:
    import xcache

    return xcache.version_of("programs")


def initialize(layers: int, key: Any, stacked: bool = False) -> Any:
    """Parameters of a small transformer; its layers in a list, or each of their parameters in one array."""
    import jax
    import jax.numpy as jnp

    def dense(key: Any, rows: int, columns: int) -> Any:
        return jax.random.normal(key, (rows, columns)) / jnp.sqrt(rows)

    def layer(key: Any) -> Any:
        attend, project, widen, narrow = jax.random.split(key, 4)
        return {
            "norm_1": jnp.ones(WIDTH),
            "attend": dense(attend, WIDTH, 3 * WIDTH),
            "project": dense(project, WIDTH, WIDTH),
            "norm_2": jnp.ones(WIDTH),
            "widen": dense(widen, WIDTH, 4 * WIDTH),
            "narrow": dense(narrow, 4 * WIDTH, WIDTH),
        }

    embed, *keys = jax.random.split(key, 1 + layers)
    every = jax.vmap(layer)(jnp.stack(keys)) if stacked else [layer(key) for key in keys]
    return {"embed": dense(embed, VOCABULARY, WIDTH), "norm": jnp.ones(WIDTH), "layers": every}


def normalize(x: Any, scale: Any) -> Any:
    """Root-mean-square normalization."""
    import jax
    import jax.numpy as jnp

    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(x: Any, layer: Any, cache: Any = None, position: Any = 0) -> tuple[Any, Any]:
    """Causal attention; with a cache of what came before (``[2, batch, length, width]``), from ``position`` on."""
    import jax
    import jax.numpy as jnp

    batch, length, _ = x.shape
    q, k, v = jnp.split(x @ layer["attend"], 3, axis=-1)
    if cache is not None:
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, position, 0))
        k, v = cache
    q, k, v = (part.reshape(batch, -1, HEADS, WIDTH // HEADS) for part in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
    visible = jnp.arange(k.shape[1]) <= position + jnp.arange(length)[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["project"], cache


def block(x: Any, layer: Any, cache: Any = None, position: Any = 0) -> tuple[Any, Any]:
    """Attention and a small network, each around a residual."""
    import jax

    attended, cache = attend(normalize(x, layer["norm_1"]), layer, cache, position)
    x = x + attended
    return x + jax.nn.gelu(normalize(x, layer["norm_2"]) @ layer["widen"]) @ layer["narrow"], cache


def cross_entropy(parameters: Any, x: Any, tokens: Any) -> Any:
    """Mean cross entropy of each next token, from what the last layer said."""
    import jax
    import jax.numpy as jnp

    scores = jax.nn.log_softmax(normalize(x, parameters["norm"]) @ parameters["embed"].T.astype(x.dtype))
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).astype(jnp.float32).mean()


def train_with(loss: Callable[[Any, Any], Any], state: Any, batches: Any) -> Any:
    """Some steps of Adam and an evaluation."""
    import jax
    import jax.numpy as jnp

    @partial(jit, donate_argnums=0)
    def train_step(state: Any, tokens: Any) -> Any:
        parameters, first, second, step = state
        value, gradient = jax.value_and_grad(loss)(parameters, tokens)
        step = step + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
        scale, power = 1 / (1 - 0.9**step), 1 / (1 - 0.999**step)

        def update(p: Any, m: Any, v: Any) -> Any:
            return (p - 1e-3 * (m * scale) / (jnp.sqrt(v * power) + 1e-8)).astype(p.dtype)

        return (jax.tree.map(update, parameters, first, second), first, second, step), value

    losses = []
    for tokens in batches:
        state, value = train_step(state, tokens)
        losses.append(float(value))
    return losses, jax.jit(loss)(state[0], batches[0]), state
