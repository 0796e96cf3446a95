"""Stands for your program: a step of training for eight layers, compiled for each of three sizes of batch."""

import time

import jax
import jax.numpy as jnp

WIDTH, LAYERS = 256, 8


def block(x, weights):
    """Return one layer of a transformer, with a single head."""
    attention = jax.nn.softmax((x @ weights["q"]) @ (x @ weights["k"]).swapaxes(-1, -2) / WIDTH**0.5)
    x = x + attention @ (x @ weights["v"])
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def loss(layers, x):
    """Return how far the last layer is from repeating the input."""
    y = x
    for weights in layers:
        y = block(y, weights)
    return jnp.mean((y - x) ** 2)


@jax.jit
def step(layers, x):
    """Return the layers after one step, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(layers, x)
    return jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, layers, gradients), value


def made(key):
    """Return the weights of one layer."""
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "up": (WIDTH, 1024), "down": (1024, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.02 * jax.random.normal(each, shapes[name]) for each, name in zip(keys, shapes, strict=True)}


if __name__ == "__main__":
    begin = time.perf_counter()
    layers = [made(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    for batch in (1, 2, 4):
        layers, value = step(layers, jnp.ones((batch, 32, WIDTH)))
    print(f"loss {value:.4f} after {time.perf_counter() - begin:.1f} s")
