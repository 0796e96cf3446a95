"""Compile a function for each way in which programs change; with CHANGED=1, each of them in its changed form.

The name of a function is that of its way. One process has them all, because each way is a program of its own.
"""

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

IS_CHANGED = os.environ.get("CHANGED") == "1"
ONES = jnp.ones((8, 8))


def either(before, changed):
    return changed if IS_CHANGED else before


@jax.jit
def shape(x):
    return x @ x.T


shape(jnp.ones((8, either(128, 130))))


@jax.jit
def batch(weights, x, y):
    return ((x @ weights["kernel"] + weights["bias"] - y) ** 2).mean()


size = either(32, 7)
batch({"kernel": ONES, "bias": jnp.ones(8)}, jnp.ones((size, 8)), jnp.ones((size, 8)))


@jax.jit
def dtype(x):
    return jnp.sin(x)


dtype(ONES.astype(either(jnp.float32, jnp.bfloat16)))

learning_rate = either(0.1, 0.01)


@jax.jit
def number(x):
    return x - learning_rate * jnp.tanh(x)


number(ONES)


@jax.jit
def weak(x, scale):
    return x * scale


weak(ONES.astype(jnp.bfloat16), either(2.0, jnp.float32(2.0)))


def donated(x):
    return x + 1


jax.jit(donated, donate_argnums=either((), 0))(jnp.ones((8, 8)))


@partial(jax.jit, static_argnames="layers")
def static(x, layers):
    for _ in range(layers):
        x = jnp.tanh(x @ ONES)
    return x


static(ONES, layers=either(2, 3))


@partial(jax.jit, static_argnames="length")
def static_size(x, length):
    return jnp.zeros(length) + x


static_size(1.0, length=either(64, 65))


def compiler_option(x):
    return jnp.exp(x)


options = either({"xla_cpu_enable_fast_math": False}, {"xla_cpu_enable_fast_math": True})
jax.jit(compiler_option).lower(ONES).compile(compiler_options=options)


@jax.jit
def precision(x):
    return x @ x


with jax.default_matmul_precision(either("default", "highest")):
    precision(ONES)


def in_lines(source, blank_lines):
    """Have a function whose source begins some lines further down."""
    names = {"jax": jax, "jnp": jnp}
    exec(compile("\n" * blank_lines + source, "moved.py", "exec"), names)  # noqa: S102 - written here
    return names


for way in ("renamed_variable", "moved_line"):
    named = either("first", "second") if way == "renamed_variable" else "first"
    source = f"def {way}({named}):\n    inner = {named} * 2\n    return inner + 1\n"
    made = in_lines(source, either(0, 5) if way == "moved_line" else 0)
    jax.jit(made[way])(ONES)


@jax.jit
def seed(x):
    return x + jax.random.normal(jax.random.key(either(0, 1)), x.shape)


seed(ONES)


@jax.jit
def small_seed(x):
    return x + jax.random.normal(jax.random.key(either(0, 42)), x.shape)


small_seed(ONES)


@jax.jit
def generator(x):
    return x + jax.random.normal(jax.random.key(0, impl=either("threefry2x32", "rbg")), x.shape)


generator(ONES)


@jax.jit
def dropout(x):
    return either(x * 2, x * jax.random.bernoulli(jax.random.key(0), shape=x.shape))


dropout(ONES)


@jax.jit
def key_kind(x, key):
    return x + jax.random.normal(key, x.shape)


key_kind(ONES, jax.random.key(0, impl=either("threefry2x32", "rbg")))


@jax.jit
def key_count(x, keys):
    return x + jax.vmap(jax.random.uniform)(keys).sum()


key_count(ONES, jax.random.split(jax.random.key(0), either(3, 4)))


@jax.jit
def raw_key(x, key):
    return x + jax.random.uniform(key)


raw_key(ONES, either(jax.random.key, jax.random.PRNGKey)(0))


@jax.jit
def left_out(values):
    return sum(each.sum() for each in values.values() if each is not None)


left_out({"bias": either(ONES, None), "kernel": ONES})


@jax.jit
def loop(x):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry), None), x, None, length=either(5, 7))[0]


loop(ONES)

started = time.time() - either(100_000.0, 0.0)


@jax.jit
def timestamp(x):
    return x - started


timestamp(ONES)

weights = {"a": 2.0, "b": 3.0} if not IS_CHANGED else {"b": 3.0, "a": 2.0}


@jax.jit
def order_of_arguments(named, x):
    for each in named.values():
        x = jnp.tanh(x * each)
    return x


order_of_arguments(weights, ONES)


@jax.jit
def order(x):
    for each in weights.values():
        x = jnp.tanh(x * each)
    return x


order(ONES)

table = np.arange(8, dtype=np.float32) * either(1, 2)


@jax.jit
def array(x):
    return x + table


array(ONES)


@jax.jit
def structure(x, bias):
    return x if bias is None else x + bias


structure(ONES, either(None, jnp.ones(8)))


@jax.jit
def result_name(x):
    return {either("loss", "error"): x.sum()}


result_name(ONES)


def inner(x):
    return jnp.where(x > 0, x, 0.1 * x)


inner.__name__ = either("leaky", "leaky_relu")
inner = jax.jit(inner)


@jax.jit
def inner_name(x):
    return inner(x) + inner(x[:4, :4]).sum()


inner_name(ONES)


def renamed(x):
    return jnp.cosh(x)


renamed.__name__ = renamed.__qualname__ = either("before", "after")
jax.jit(renamed)(ONES)


@jax.jit
def operation(x):
    return either(jnp.sin, jnp.cos)(x)


operation(ONES)


@jax.jit
def operands(x, y):
    return either(x - y, y - x)


operands(ONES, ONES)


@jax.jit
def same(x):
    return x * 3


same(ONES)
