"""Programs as users write them. Each sets ``out`` to something JSON can hold, which ``run`` reports."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

_HEAD = """
import jax, jax.numpy as jnp, numpy as np
x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
listed = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)
"""
_TAIL = """
import dataclasses, json, xcache
print(json.dumps({"out": out, "stats": dataclasses.asdict(xcache.stats())}))
"""

PLAIN = """
big = np.random.RandomState(0).randn(300, 300).astype(np.float32)
donated = jnp.ones((8, 4))
after = jax.jit(lambda v: v + 1, donate_argnums=0)(donated)
out = listed({
    "jit": jax.jit(lambda v: v * 2 + 1)(x),
    "eager": jnp.tanh(x) @ x.T,
    "grad": jax.grad(lambda v: jnp.tanh(v).sum())(x),
    "vmap": jax.vmap(lambda v: v / v.max())(x + 1),
    "scan": jax.lax.scan(lambda c, a: (c + a, c * a), x[0], x),
    "while": jax.lax.while_loop(lambda v: v.sum() < 1e4, lambda v: v * 2, x),
    "random": jax.random.normal(jax.random.key(0), (4,)),
    "linalg": jnp.linalg.eigh(jnp.eye(3) + 1),
    "constant": jax.jit(lambda v: v @ big)(np.ones((2, 300), np.float32)),
    "aot": jax.jit(jnp.sin).lower(x).compile()(x),
    "bfloat16": (jnp.bfloat16(x) * 3).astype(np.float32),
    "donated": [donated.is_deleted(), after],
})
"""

# A few forms, for what is asked of many surroundings.
SHORT = """
big = np.random.RandomState(0).randn(300, 300).astype(np.float32)
out = listed({
    "grad": jax.grad(lambda v: jnp.tanh(v).sum())(x),
    "scan": jax.lax.scan(lambda c, a: (c + a, c * a), x[0], x),
    "random": jax.random.normal(jax.random.key(0), (4,)),
    "constant": jax.jit(lambda v: v @ big)(np.ones((2, 300), np.float32)),
})
"""

X64 = """
jax.config.update("jax_enable_x64", True)
out = listed({"wide": jax.jit(lambda v: v / 3)(np.float64(x)), "ints": jnp.arange(5) * 2**40})
"""

EXPORTED = """
from jax import export
exported = export.deserialize(export.export(jax.jit(lambda v: jnp.cos(v) - 1))(x).serialize())
out = listed({"call": exported.call(x), "inside": jax.jit(lambda v: exported.call(v) * 2)(x)})
"""

SHARDED = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array(jax.devices()), ("d",))
rows = NamedSharding(mesh, P("d"))
xs = jax.device_put(x, rows)
out = listed({
    "pjit": jax.jit(lambda v: (v @ v.T).sum(0), in_shardings=rows, out_shardings=rows)(xs),
    "shard_map": jax.jit(shard_map(lambda v: jax.lax.psum(v, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))(xs),
    "elsewhere": jax.jit(lambda v: v * 3)(jax.device_put(x, jax.devices()[2])),
})
out["placed"] = [str(sorted(d.id for d in jax.jit(lambda v: v * 3)(jax.device_put(x, where)).devices()))
                 for where in (jax.devices()[0], jax.devices()[3], rows)]
"""

CALLBACK = """
seen = []
def double(v):
    seen.append(v.shape)
    return np.asarray(v) * 2
out = listed({"pure": jax.jit(lambda v: jax.pure_callback(double, jax.ShapeDtypeStruct((8, 4), np.float32), v))(x)})
out["seen"] = [list(shape) for shape in seen]
"""

PARTITIONED = """
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
@custom_partitioning
def f(v):
    return v * 2
f.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (mesh, lambda v: v * 2, args[0].sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)
out = listed(jax.jit(f, in_shardings=rows, out_shardings=rows)(jax.device_put(x, rows)))
"""

# The compiler itself calls the function.
INSPECTED = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
out = []
@jax.jit
def f(v):
    v = jnp.sin(v)
    jax.debug.inspect_array_sharding(v, callback=lambda sharding: out.append(type(sharding).__name__))
    return v * 2
out += listed([f(jax.device_put(x, rows))])
"""

# An executable that came from the cache has to serialize like one that was compiled: bytes that run.
SERIALIZED = """
from jax.experimental import serialize_executable
compiled = jax.jit(lambda v: jnp.cos(v) @ jnp.sin(v.T)).lower(x).compile()
again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
out = listed({"compiled": compiled(x), "again": again(x)})
out["text"] = "HloModule" in compiled.as_text()
"""

# Once it has run, XLA:CPU cannot serialize a sort's comparison.
SORT = """
out = listed(jax.jit(lambda v: jnp.sort(v, axis=0))(x))
"""
TOP_K = """
numbers = np.arange(24, dtype=np.int32).reshape(4, 6) % 7
out = [
    listed(jax.jit(lambda v: jax.lax.top_k(v, 2)[0])(numbers)),
    listed(jax.jit(lambda v: jax.lax.top_k(v, 3)[1])(numbers)),
    listed(jax.jit(lambda v: jax.lax.approx_min_k(v, 2)[0])(x)),
]
"""

# jaxlib 0.8 forgets the layout of what a loaded executable returns, and the next program reads it wrongly.
LAID_OUT = """
from jax.sharding import SingleDeviceSharding
from jax.experimental import layout
Layout = getattr(layout, "DeviceLocalLayout", None) or layout.Layout
Format = getattr(layout, "Format", None) or layout.Layout
columns = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[0]))
turned = jax.jit(lambda v: v * 2 + 1, out_shardings=columns)(x)
out = listed([turned, jax.jit(lambda v: jnp.cumsum(v, 0))(turned), turned @ turned.T])
"""

# An unnamed axis of pmap is named by an address in jax 0.8 and 0.9.
PMAPPED = """
out = listed(jax.pmap(lambda v: v * 2 + jnp.arange(4.0))(x[:1]))
"""

# Compiling while a module is being built must leave that module alone.
NESTED = """
f = lambda v: jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct((), np.float32), v, vmap_method="sequential")
jaxpr = jax.make_jaxpr(lambda: jax.vmap(f)(jnp.zeros(100, np.float32)))()
with jax.ensure_compile_time_eval():
    out = listed(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts))
"""

# The program may replace its own clock.
CLOCK = """
from unittest import mock
with mock.patch("time.monotonic", side_effect=map(float, range(8))):
    out = float(jax.jit(lambda v: v * 3 + 1)(2.0))
"""

PROGRAMS = {
    "plain": PLAIN,
    "x64": X64,
    "exported": EXPORTED,
    "sharded": SHARDED,
    "callback": CALLBACK,
    "partitioned": PARTITIONED,
    "inspected": INSPECTED,
    "serialized": SERIALIZED,
    "laid out": LAID_OUT,
    "pmapped": PMAPPED,
    "nested": NESTED,
    "clock": CLOCK,
}
FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
NEEDS = {"sharded": FOUR_DEVICES, "partitioned": FOUR_DEVICES, "inspected": FOUR_DEVICES}


@dataclasses.dataclass
class Ran:
    """A program's results and xcache's statistics."""

    out: Any
    stats: dict[str, Any]
    stderr: str

    @property
    def complaints(self) -> list[str]:
        """The program's stderr, without times and thread numbers of XLA's own lines."""
        return sorted(re.sub(r"^([EWI])\d{4} [\d:.]+ +\d+", r"\1", line) for line in self.stderr.splitlines())

    @property
    def result(self) -> str:
        """The results in a short form for comparison."""
        return hashlib.sha256(json.dumps(self.out, sort_keys=True).encode()).hexdigest()


def run(place, source: str, mode: str | None = "1", **environment: str) -> Ran:
    """Run a program in a process of its own, with XCACHE set to ``mode``."""
    if mode is not None:
        environment["XCACHE"] = mode
    result = place.run(_HEAD + source + _TAIL, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    said = json.loads(result.stdout)
    return Ran(said["out"], said["stats"], result.stderr)
