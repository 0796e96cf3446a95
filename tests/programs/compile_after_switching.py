"""Compile programs whose lowering was skipped after the cache was switched off, or to another mode."""

import gc
import json

import jax
import jax.numpy as jnp
from jax._src.interpreters import pxla

import xcache

ONES = jnp.ones((4, 4))
shown = {}
before = [pxla._cached_lowering_to_hlo, pxla._cached_compilation, pxla.MeshComputation.stablehlo]


def run(name, compiled):
    shown[name] = float(compiled(ONES)[0, 0])


def function(number):
    return jax.jit(lambda x: jnp.sin(x) * number @ x)


held = [function(number) for number in range(6)]
with xcache.enable():
    lowered = [each.lower(ONES) for each in held[:3]]
    held[3](ONES)
    lowerings = xcache.stats().lowerings
run("lowered before", lowered[0].compile())
run("called before", held[3])
run("with other options", held[3].lower(ONES).compile({"xla_cpu_enable_fast_math": True}))
run("jitted again", jax.jit(held[1]))
shown["module"] = type(lowered[2].compiler_ir()).__name__
shown["text"] = len(held[3].lower(ONES).as_text()) > 100
with xcache.enable():
    lowered = [each.lower(ONES) for each in held[4:]]
with xcache.enable("refresh"):
    run("with refresh", lowered[0].compile())
with xcache.enable("on", lowering="off"):
    run("with lowering off", lowered[1].compile())
with xcache.enable():
    run("with the next cache", held[0].lower(ONES).compile())
    for number in range(6):
        # The next run skips their lowering.
        function(number)(ONES)
del lowered, held
jax.clear_caches()
gc.collect()
after = [pxla._cached_lowering_to_hlo, pxla._cached_compilation, pxla.MeshComputation.stablehlo]
shown["restored"] = all(one is other for one, other in zip(before, after, strict=True))
print(json.dumps({"shown": shown, "lowerings": lowerings}))
