"""Measures what xcache costs a program, in processes of their own; prints medians, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 7

KEY = """
import sys, json, time, statistics
sys.path.insert(0, {scripts!r})
import jax, jaxlib, numpy as np, demo_model as model
from pathlib import Path
from jax._src import cache_key, compiler
from xcache import keys
from xcache.keys.describe import Surroundings
parameters = jax.eval_shape(model.initialize, jax.random.key(0))
state = parameters, parameters, parameters, jax.ShapeDtypeStruct((), int)
tokens = jax.ShapeDtypeStruct((model.BATCH, model.LENGTH + 1), np.int32)
module = model.train_step.lower(state, tokens).compiler_ir("stablehlo")
devices = np.array(jax.devices()[:1])
client = devices[0].client
options = compiler.get_compile_options(1, 1, device_assignment=np.array([[0]]))
surroundings = Surroundings(Path(jaxlib.__file__).parent, jaxlib.__version__, Path({memo!r}), None)
def ours():
    return keys.combine(surroundings.components(client, module, tuple(devices), options.SerializeAsString()))
def jaxs():
    return cache_key.get(module, devices, options, client)
ours(), jaxs()
def timed(function):
    start = time.perf_counter(); function(); return (time.perf_counter() - start) * 1e3
rounds = [(timed(ours), timed(jaxs)) for _ in range(21)]
print(json.dumps([statistics.median(column) for column in zip(*rounds)]))
"""

SWITCH = """
import json, os, time
wanted = os.environ.pop("XCACHE")
import jax
jax.devices()
os.environ["XCACHE"] = wanted
start = time.perf_counter()
import xcache.plugin
xcache.plugin.initialize()
print(json.dumps((time.perf_counter() - start) * 1e3))
"""

HITS = """
import json, statistics, time
import jax, jax.numpy as jnp
jax.devices()
from jax._src import compiler
from jaxlib import xla_client
loading = []
original = xla_client.Client.deserialize_executable
def load(*arguments):
    start = time.perf_counter()
    try:
        return original(*arguments)
    finally:
        loading.append(time.perf_counter() - start)
xla_client.Client.deserialize_executable = load
wrapped, outside = compiler.compile_or_get_cached, []
def compile(*arguments):
    del loading[:]
    start = time.perf_counter()
    result = wrapped(*arguments)
    outside.append((time.perf_counter() - start - sum(loading)) * 1e3)
    return result
compiler.compile_or_get_cached = compile
for number in range(100):
    shape = jax.ShapeDtypeStruct((number + 1,), jnp.float32)
    jax.jit(lambda v: jnp.sin(v) * number + jnp.sum(v)).lower(shape).compile()
import xcache
print(json.dumps([statistics.median(outside), xcache.stats().hits]))
"""

LARGE = """
import json, time
import jax, jax.numpy as jnp, numpy as np
jax.devices()
# Random numbers do not become smaller when they are compressed.
constant = np.random.default_rng(0).standard_normal((8 << 20, 2)).astype(np.float32)
lowered = jax.jit(lambda v: (v * constant).sum(0)).lower(jax.ShapeDtypeStruct((2,), jnp.float32))
start = time.perf_counter()
lowered.compile()
print(json.dumps(time.perf_counter() - start))
"""

STORE = """
import sys, json, time
sys.path.insert(0, {scripts!r})
import jax, numpy as np, demo_model as model
from jax._src import compiler
jax.devices()
seconds = {{}}
def timed(owner, name):
    original = getattr(owner, name)
    def measured(*arguments, **more):
        start = time.perf_counter()
        try:
            return original(*arguments, **more)
        finally:
            seconds[name] = time.perf_counter() - start
    setattr(owner, name, measured)
from jaxlib import xla_client
timed(compiler, "backend_compile_and_load")
timed(compiler, "compile_or_get_cached")
timed(xla_client.LoadedExecutable, "serialize")
parameters = jax.eval_shape(model.initialize, jax.random.key(0))
state = parameters, parameters, parameters, jax.ShapeDtypeStruct((), int)
tokens = jax.ShapeDtypeStruct((model.BATCH, model.LENGTH + 1), np.int32)
model.train_step.lower(state, tokens).compile()
from xcache.process_cache import current
current().close()
print(json.dumps(seconds))
"""


def run(program: str, place: Path, **environment: str):
    """Run a program with a store of its own, and return what it prints."""
    settings = {"XCACHE_DIR": str(place / "store"), "XCACHE_SOCKET": str(place / "s"), "XCACHE_IDLE_EXIT": "60"}
    result = subprocess.run(
        [sys.executable, "-c", program.format(scripts=str(Path(__file__).parent), memo=str(place))]
        if "{scripts" in program
        else [sys.executable, "-c", program],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(result.stdout)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="xc", dir="/tmp") as folder:
        place = Path(folder)
        try:
            ours, jaxs = run(KEY, place)
            print(f"a key for a 24-layer training step     {ours:8.2f} ms   (jax's own: {jaxs:.2f} ms)")
            # The first run writes bytecode and remembers the digests of jaxlib's libraries.
            on = [run(SWITCH, place, XCACHE="1") for _ in range(ROUNDS + 1)][1:]
            print(f"switching on: import and install       {statistics.median(on):8.2f} ms")
            off = [run(SWITCH, place, XCACHE="0") for _ in range(ROUNDS)]
            print(f"switched off                           {statistics.median(off):8.2f} ms")
            run(HITS, place, XCACHE="1")
            hits = [run(HITS, place, XCACHE="1") for _ in range(ROUNDS)]
            if any(count != 100 for _, count in hits):
                raise SystemExit("not every small program was a hit; the figures would mean something else")
            median = statistics.median(milliseconds for milliseconds, _ in hits)
            print(f"a hit for a small program, without loading it {median:.2f} ms")
            # The program asks for this one, so that the time to load it counts.
            run(LARGE, place, XCACHE="1")
            large = statistics.median(run(LARGE, place, XCACHE="1", XCACHE_PREFETCH="0") for _ in range(ROUNDS))
            with contextlib.closing(sqlite3.connect(place / "store" / "store.db")) as store:
                ((size,),) = store.execute("SELECT max(footprint) FROM entries")
            print(f"a hit for {size / 1e6:.0f} MB of constants {large:.2f} s: {size / 1e6 / large:.0f} MB/s")
            seconds = run(STORE, place, XCACHE="1")
            compiled = seconds["backend_compile_and_load"]
            blocked = seconds["compile_or_get_cached"] - compiled
            print(f"a cold compile of the step: {compiled:.2f} s, and {blocked * 1e3:.0f} ms more in the compile call;")
            print(f"  serialize() holds the GIL behind it for {seconds['serialize']:.2f} s")
        finally:
            subprocess.run(
                [Path(sys.executable).with_name("xcache"), "stop"],
                env=os.environ | {"XCACHE_DIR": str(place / "store"), "XCACHE_SOCKET": str(place / "s")},
                stdout=subprocess.DEVNULL,
                check=False,
            )


if __name__ == "__main__":
    main()
