"""Custom calls that are not jaxlib's own: what is registered for them is in no key."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from jaxlib import xla_client
from support.program_files import program_text

from xcache.errors import UncacheableError
from xcache.keys import custom_calls, describe, platform, stablehlo, toolchain
from xcache.keys.describe import Surroundings

CALL = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
  %y = stablehlo.custom_call @{target}(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %y : tensor<4xf32>
}}"""
SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def foreign(module) -> str | None:
    return custom_calls.foreign(module, stablehlo.bytecode(module))


def calling(target: str):
    return stablehlo.parse(CALL.format(target=f'"{target}"'))


@pytest.mark.parametrize("target", ["mine", "lapack_mine", "my_lapack_spotrf_ffi", "cudnn_mine", "lapack_spotrf_ffi2"])
def test_a_target_that_nobody_knows_is_foreign(target):
    assert foreign(calling(target)) == target


def test_one_foreign_call_among_others_is_found_wherever_it_is():
    def body(i, x):
        return jnp.linalg.cholesky(x) + jax.ffi.ffi_call("mine", SQUARE)(x)

    module = jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x)).lower(SQUARE).compiler_ir("stablehlo")
    assert foreign(module) == "mine"


def test_targets_that_jaxlib_registers_are_known():
    names = {"Sharding", "SPMDFullToShardShape", "xla.sdy.FuncResultSharding", "mhlo.topk", "__cudnn$fusion"}
    for module in ("lapack", "cpu_sparse", "gpu_solver", "gpu_linalg", "gpu_sparse", "gpu_prng", "gpu_rnn"):
        try:
            registrations = importlib.import_module(f"jaxlib.{module}").registrations()
        except (ImportError, AttributeError):
            continue
        names |= {name for targets in registrations.values() for name, *_ in targets}
    assert len(names) > 50
    assert [name for name in sorted(names) if foreign(calling(name))] == []


@pytest.mark.parametrize(
    "function",
    [
        jnp.linalg.svd,
        jnp.linalg.eigh,
        jnp.linalg.qr,
        jnp.linalg.eig,
        jax.scipy.linalg.lu,
        jax.scipy.linalg.schur,
        functools.partial(jax.lax.top_k, k=2),
        functools.partial(jax.lax.approx_max_k, k=2),
    ],
)
def test_targets_that_jax_itself_calls_are_known(function):
    assert foreign(jax.jit(function).lower(SQUARE).compiler_ir("stablehlo")) is None


def components(target: str, *, partitions: int = 1, replicas: int = 1, client=None):
    options = xla_client.CompileOptions()
    options.num_partitions, options.num_replicas = partitions, replicas
    client = client or jax.devices()[0].client
    surroundings = Surroundings(Path(jaxlib.__file__).parent, jaxlib.__version__, None)
    return surroundings.components(client, calling(target), jax.devices()[:1], options.SerializeAsString())


def test_a_foreign_call_is_cached_unless_it_is_partitioned():
    """XLA asks how it is to be partitioned, and what it is told is known to nobody else."""
    assert components("mine")
    assert components("mine", replicas=2)
    assert components("lapack_spotrf_ffi", partitions=2)
    with pytest.raises(UncacheableError, match="foreign custom call in several partitions"):
        components("mine", partitions=2)


def test_a_foreign_call_is_not_cached_on_a_gpu(monkeypatch):
    """XLA asks the registered handler whether it may become part of a command buffer."""
    monkeypatch.setattr(platform, "describe", lambda *_: b"")
    monkeypatch.setattr(platform, "places", lambda _: ())
    monkeypatch.setattr(toolchain, "describe", lambda *_: toolchain.Toolchain(b"", ()))
    monkeypatch.setattr(describe.Surroundings, "_libtpu", lambda *_: "")
    gpu = SimpleNamespace(platform="cuda")
    assert components("cusolver_potrf_ffi", client=gpu)
    with pytest.raises(UncacheableError, match="foreign custom call on a GPU"):
        components("mine", client=gpu)


PARTITIONED = (
    """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, xcache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
"""
    + program_text("register_a_foreign_call")
    + r"""
if sys.argv[1] == "batch":
    jax.ffi.register_ffi_target_as_batch_partitionable("particular")
from jax.experimental.xla_metadata import set_xla_metadata
def f(x):
    with set_xla_metadata(num_batch_dims="1"):
        return jax.ffi.ffi_call("particular", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
text = jax.jit(f).lower(jax.ShapeDtypeStruct((4, 1, 2), jnp.float32, sharding=sharding)).compile().as_text()
alone = jax.jit(f).lower(jax.ShapeDtypeStruct((4, 1, 2), jnp.float32)).compile()
said = xcache.stats()
rows = [re.search(r"= f32\[(\d)", line)[1] for line in text.splitlines() if "custom-call(" in line]
print(json.dumps([rows, said.hits, said.misses, said.uncacheable]))
"""
)


@pytest.mark.slow
def test_how_a_call_is_registered_to_be_partitioned_decides(place):
    def run(how: str):
        done = subprocess.run(
            [sys.executable, "-c", PARTITIONED, how],
            env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    reason = {"foreign custom call in several partitions": 1}
    assert run("batch") == [["2"], 0, 1, reason]
    assert run("plain") == [["4"], 1, 0, reason]
