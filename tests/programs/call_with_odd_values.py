"""Call functions of xcache.jit with static values that look alike and are not; print what they return."""

import collections
import dataclasses
import functools
import json
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import xcache

shown = {}
jit = functools.partial(xcache.jit, version="1")


def show(name, *values):
    shown[name] = [np.asarray(value).tolist() for value in values]


@dataclasses.dataclass(frozen=True)
class Config:
    num_hashes: int


@functools.partial(jit, static_argnums=1)
def configured(x, config):
    return x * config.num_hashes


show("field named as a hash", configured(1.0, Config(2)), configured(1.0, Config(3)))


def with_slope(factor):
    @jax.custom_vjp
    def function(x):
        return x

    function.defvjp(lambda x: (x, None), lambda _, slope: (slope * factor,))
    return function


@functools.partial(jit, static_argnums=1)
def slope(x, function):
    return jax.grad(function)(x)


show("derivative", slope(1.0, with_slope(2.0)), slope(1.0, with_slope(3.0)))


@functools.partial(jit, static_argnums=1)
def called(x, function):
    return x * function("a")


show("bound method of C's", called(1.0, {"a": 2.0}.get), called(1.0, {"a": 3.0}.get))


@functools.partial(jit, static_argnums=1)
def with_class(x, kind):
    return x * kind.number


show("class", with_class(1.0, type("Kind", (), {"number": 2})), with_class(1.0, type("Kind", (), {"number": 3})))


class Optimizer:
    """Two of them are never equal."""

    def __init__(self, rate):
        self.rate = rate


@jax.tree_util.register_pytree_node_class
class State:
    def __init__(self, weights, optimizer):
        self.weights, self.optimizer = weights, optimizer

    def tree_flatten(self):
        return (self.weights,), self.optimizer

    @classmethod
    def tree_unflatten(cls, optimizer, children):
        return cls(*children, optimizer)


@jit
def step(state):
    return State(state.weights - state.optimizer.rate, state.optimizer)


states = [State(jnp.full(2, float(number)), Optimizer(0.5)) for number in range(2)]
show("objects of each call's own", *(step(state).optimizer is state.optimizer for state in states))


def looking_at(value):
    @jit
    def function(x):
        return x * value

    return function


@jit
def shifted(x, operation=jnp.add):
    return operation(x, 100.0)


@jit
def halved(x, operation=jnp.negative):
    return operation(x) / 2


def applying(function):
    return jit(lambda x: function(x) * 1.0)


def repeating(times):
    return jit(lambda x: x * len(times))


show("functions of jax's as defaults", shifted(1.0), halved(1.0))
pair = {"weights": jnp.ones(2), "bias": jnp.zeros(2)}
for what, functions in {
    "functions of jax's": (functools.partial(jnp.add, 5.0), functools.partial(jnp.multiply, 5.0)),
    "methods of functions of jax's": (jnp.add.reduce, jnp.multiply.reduce),
    "getters": (operator.itemgetter("weights"), operator.itemgetter("bias")),
}.items():
    given = pair if what == "getters" else jnp.arange(3.0)
    show(f"{what} in closures", *(applying(function)(given) for function in functions))
show("ranges in closures", *(repeating(range(count))(1.0) for count in (2, 5)))
show("instances in closures", *(applying(type("Kind", (), {"__call__": each})())(1.0) for each in (
    lambda self, x: x + 1, lambda self, x: x + 2)))  # fmt: skip


RATE = 0.0


class Jitted:
    @functools.partial(jax.jit, static_argnums=0)
    def __call__(self, x):
        return x * RATE


class OfTheClass:
    @classmethod
    def __call__(cls, x):
        return x * RATE


class Made:
    def __new__(cls, x):
        return x * RATE


for made in (Jitted(), OfTheClass(), Made):
    results = []
    for rate in (2.0, 3.0):
        RATE = rate
        results.append(jit(made)(1.0))
        jax.clear_caches()
    show(f"global of {made if isinstance(made, type) else type(made)}", *results)


weak, strong = jnp.asarray(1.0), jnp.float32(1)
half = jnp.ones((), jnp.bfloat16)
show("weak type", *(looking_at(value)(half).dtype == jnp.float32 for value in (weak, strong)))


@jit
def of_pair(pair):
    return pair.x - pair.y


pairs = [collections.namedtuple("Pair", names)(5.0, 3.0) for names in ("x y", "y x")]
show("named tuples of one name", *map(of_pair, pairs))


class Layer:
    def __init__(self, factor):
        self.weights = jnp.full(1000, factor)

    @functools.partial(jit, static_argnums=0)
    def largest(self, x):
        return x * float(np.asarray(self.weights).max())


show("large array of an object", Layer(2.0).largest(1.0), Layer(3.0).largest(1.0))


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, value, scale):
        self.value, self.scale = value, scale

    def tree_flatten(self):
        return (self.value,), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(*children, scale)


@jit
def as_float(node):
    return Node(node.value * 2, float(node.scale))


shown["equal data of a node"] = repr(as_float(Node(1.0, 1)).scale)


@jit
def warns(x):
    warnings.warn("traced", UserWarning, stacklevel=1)
    return x + 1


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    show("warning", warns(1.0))
shown["warned"] = [str(each.message) for each in caught]
shown["documentation"] = warns.__doc__ == jax.jit(warns.__wrapped__).__doc__


@jit
def doubled(x):
    return x * 2


show("before the mistake", doubled(jnp.ones(2)))
try:
    doubled(jax.ShapeDtypeStruct((2,), "float32"))
except TypeError as error:
    shown["mistake"] = str(error)
print(json.dumps({"shown": shown, "calls": xcache.stats().calls}))
