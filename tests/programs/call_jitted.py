"""Call functions of xcache.jit in many ways; print what they return, and which of them jax traced."""

import collections
import dataclasses
import functools
import json
import random
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xcache

shown, traced, stdout = {}, collections.Counter(), sys.stdout
jit = functools.partial(xcache.jit, version="1")


class Counting:
    """Counts what is printed: no function names the counter, because its numbers would count for the record."""

    def write(self, text):
        if text != "\n":
            traced[text] += 1

    def flush(self):
        """Have nothing to write."""


def count(name):
    print(name)


sys.stdout = Counting()


def show(name, value):
    tree = re.sub(" at 0x[0-9a-f]+", "", str(jax.tree.structure(value)))
    shown[name] = tree, [described(leaf) for leaf in jax.tree.leaves(value)]


def described(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    held = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return [str(leaf.dtype), getattr(leaf, "weak_type", None), str(leaf.sharding), leaf._committed, held.tolist()]


class Pair(collections.namedtuple("Pair", "left right")):
    """A named tuple of the program's own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    """A node with a field that is not data: what tracing reads from it is part of the program."""

    value: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})
    activation: object = dataclasses.field(metadata={"static": True}, default=jnp.tanh)


@functools.partial(jit, static_argnums=1, static_argnames=("mode",))
def static(x, n, mode="times"):
    count("static")
    return x * n if mode == "times" else x + n


show("weak float", static(1.0, 2))
show("another static value", static(1.0, 3))
show("by name", static(1.0, 3, mode="plus"))
show("strong float", static(np.float32(1), 3))
show("weak int", static(1, 3))
show("numpy array", static(np.arange(3, dtype=np.float32), 3))
show("jax array", static(jnp.arange(3.0), 3))
show("another shape", static(jnp.arange(4.0), 3))


@jit
def keyed(key, x):
    count("keyed")
    key, used = jax.random.split(key)
    return key, x + jax.random.normal(used, x.shape)


show("typed key", keyed(jax.random.key(1), jnp.ones(3)))
show("another implementation", keyed(jax.random.key(1, impl="rbg"), jnp.ones(3)))
show("untyped key", keyed(jax.random.PRNGKey(1), jnp.ones(3)))


@jit
def square(x):
    count("square")
    return jnp.sin(x) ** 2


show("plain", square(2.0))
show("double", square(np.float32(2)))
with jax.default_matmul_precision("highest"):
    show("another configuration", square(3.0))
with jax.default_device(jax.devices()[1]):
    show("another default device", square(3.0))
squared = traced["square"]
show("grad", jax.grad(square)(1.0))
show("vmap", jax.vmap(square)(jnp.arange(3.0)))
show("inside jit", jax.jit(lambda x: square(x) + 1)(2.0))
# A transformation traces.
traced["square"] = squared

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
spread = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(mesh, P("a", "b")))


@functools.partial(jit, donate_argnums=0)
def sharded(x):
    count("sharded")
    return x @ x.T, {"n": (x.sum(), None), "l": [x], "p": Pair(x[0], x[1])}


show("on a mesh", sharded(spread))
donated = jax.device_put(jnp.ones((4, 4)), jax.devices()[2])
show("committed", sharded(donated))
show("donated", jnp.array(donated.is_deleted()))
show("uncommitted", sharded(jnp.ones((4, 4))))


@functools.partial(
    jit, in_shardings=NamedSharding(mesh, P("a")), out_shardings=NamedSharding(mesh, P(None, "b")), keep_unused=True
)
def placed(x, y):
    count("placed")
    return x * 2


show("shardings given", placed(np.ones((4, 4), np.float32), np.ones((2, 2), np.float32)))


@jit
def stepped(state, by):
    count("stepped")
    return dataclasses.replace(state, value=state.activation(state.value) * state.scale + by), Pair(by, state)


show("nodes of the program", stepped(State(jnp.ones(3), 2.0), 1.0))
show("another field", stepped(State(jnp.ones(3), 3.0), 1.0))
show("another function in it", stepped(State(jnp.ones(3), 3.0, jnp.cos), 1.0))


@jit
def solved(a):
    count("solved")
    return jnp.linalg.inv(a), jnp.linalg.eigh(a)


show("LAPACK", solved(jnp.eye(3) * 2))


@jit
def narrow(x):
    count("narrow")
    return x.astype(jnp.bfloat16), x.astype(jnp.float8_e4m3fn)


show("small floats", narrow(jnp.ones(2)))


def scaling(factor):
    @jit
    def scaled(x):
        count("scaled")
        return x * factor

    return scaled


show("closed over", scaling(2.0)(1.0))
show("another value closed over", scaling(3.0)(1.0))
nameless = [jit(lambda x: x + 1), jit(lambda x: x + 2)]
show("two without a name", [each(1.0) for each in nameless])
versions = [xcache.jit(lambda x: x - 1, version=version) for version in ("1", "2")]
show("two versions", [each(1.0) for each in versions])

# The calls below are never recorded.
once, table = dict(traced), jnp.arange(100.0)


@jit
def constant(x):
    count("constant")
    return x + table


changing = []


@jit
def unsteady(x):
    count("unsteady")
    changing.append(1)
    return x + (random.random() > 2) * random.random() + len(changing)


@jit
def talking(x):
    count("talking")
    jax.debug.print("x is {}", x)
    return x


show("a constant of the program's", constant(1.0))
unsteady(1.0)
show("an effect", [talking(1.0), talking(1.0)])
jax.effects_barrier()
assert traced["constant"] and len(changing) and traced["talking"]

# A plain jit of the same function, and one whose caches were cleared, trace.
traced.clear()
plain = jax.jit(square.__wrapped__)
show("plain jit of it", plain(np.ones(7)))
assert traced["square"] == 1, "a plain jit traces"
traced.clear()
square.clear_cache()
show("after clear_cache", square(2.0))
assert traced["square"] == 1, "clear_cache() has jax trace anew"
jax.clear_caches()
show("after clear_caches", keyed(jax.random.key(1), jnp.ones(3)))
assert traced["keyed"] == 1, "jax.clear_caches() has jax trace anew"

# As of jax.jit.
shown["lowered"] = [
    static.lower(1.0, 2).as_text(),
    str(static.trace(1.0, 2).jaxpr),
    str(static.eval_shape(jnp.ones(3), 2)),
    str(type(static) is type(plain)),
]
for wrong in (lambda: static("text", 2), lambda: static(jnp.ones(3)), lambda: sharded(jnp.ones(3), 4)):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        shown.setdefault("errors", []).append(f"{type(error).__name__}: {error}".partition(" at 0x")[0])
sys.stdout = stdout
print(json.dumps({"shown": shown, "traced": once, "stats": dataclasses.asdict(xcache.stats())}))
