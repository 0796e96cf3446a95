"""Ask for modules in every way that jax offers, some long after they were lowered; print digests of what it shows."""

import hashlib
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import xcache

X = np.arange(64.0, dtype=np.float32).reshape(8, 8)
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
shown = {}


def show(name, text):
    shown[name] = hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def program(x):
    with jax.named_scope("inner"):
        return jax.nn.softmax(jnp.sin(x) @ x.T)


# Compiled first, so that everything below is asked of something that is in use.
show("result", np.asarray(jax.jit(program)(X)).tobytes())
lowered = jax.jit(program).lower(X)
compiled = lowered.compile()
show("compiled", np.asarray(compiled(X)).tobytes())
show("text", lowered.as_text())
show("text with locations", lowered.as_text(debug_info=True))
show("hlo", lowered.as_text(dialect="hlo"))
show("compiler_ir", str(lowered.compiler_ir()))
show("compiler_ir hlo", lowered.compiler_ir("hlo").as_hlo_text())
show("cost", json.dumps(lowered.cost_analysis(), sort_keys=True, default=str))
show("compiled text", str(len(compiled.as_text()) > 0))
show("exported", str(export.export(jax.jit(program))(X).mlir_module()))

# The configuration and the constants are those of the time of lowering.
constant = np.ones((8, 8), np.float32)
early = jax.jit(lambda x: (x @ x + constant) * constant).lower(X)
early.compile()
constant[:] = 5.0
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_enable_x64", True)
show("changed since", early.as_text())
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_default_matmul_precision", None)
show("result with the changed constant", np.asarray(jax.jit(lambda x: (x @ x + constant) * constant)(X)).tobytes())
# An array of jax's may be deleted, and so may a key.
table, key = jnp.arange(64.0).reshape(8, 8) * 3, jax.random.key(7)
of_deleted = jax.jit(lambda x: x + table + jax.random.normal(key, (8, 8))).lower(X)
table.delete()
key.delete()
show("result with deleted constants", np.asarray(of_deleted.compile()(X)).tobytes())
show("deleted since", of_deleted.as_text())
with jax.default_matmul_precision("float32"):
    within = jax.jit(lambda x: x @ x).lower(X)
    within.compile()
show("after its context", within.as_text())
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
with jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else mesh:
    meshed = jax.jit(lambda x: x * 3).lower(X)
    meshed.compile()
show("after its mesh", meshed.as_text())

# From another thread, which has a configuration of its own.
other = jax.jit(lambda x: x * 4).lower(X)
other.compile()


def look():
    with enable_x64(True), jax.default_matmul_precision("highest"):
        show("from a thread", other.as_text())


thread = threading.Thread(target=look)
thread.start()
thread.join()

# Options of the compiler, and the same function compiled twice.
show("twice", np.asarray(lowered.compile(compiler_options={"xla_cpu_enable_fast_math": False})(X)).tobytes())
show("linalg", np.round(np.asarray(jnp.linalg.eigh(X + X.T)[0]), 2).tobytes())
show("random", np.asarray(jax.random.normal(jax.random.key(3), (5,))).tobytes())
print(json.dumps({"shown": shown, "lowerings": xcache.stats().lowerings, "errors": xcache.stats().errors,
                  "hits": xcache.stats().hits}))  # fmt: skip
