"""Lowers programs that differ in one small thing each, which the digest has to see; eight devices of the CPU."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas
from jax.sharding import Mesh, NamedSharding, PartitionSpec

shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map

X = np.ones((8, 8), np.float32)


def lower(function: Callable[..., Any], *arguments: Any, platform: str | None = None, **options: Any) -> None:
    """Lower a function; print the error if it cannot be lowered, as some cannot in some versions of jax."""
    try:
        traced = jax.jit(function, **options).trace(*(arguments or (X,)))
        traced.lower(**({"lowering_platforms": (platform,)} if platform else {}))
    except Exception as error:  # noqa: BLE001 - the others are lowered all the same
        print(f"{getattr(function, '__name__', function)} {platform}: {type(error).__name__}: {error}"[:150])


def inner() -> Any:
    return jax.jit(lambda x: jnp.sin(x) * 2)


def shared_functions() -> None:
    """One inner function twice, and two equal ones."""
    for one, other in ((inner(),) * 2, (inner(), inner())):
        lower(lambda x, one=one, other=other: one(x) + other(x))


def constants() -> None:
    """One array twice, two equal ones, and arrays that only their layout or dtype tells apart; scalars."""
    plain = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for other in (plain, plain.copy()):
        lower(lambda x, other=other: x + plain + other * 2)
    broadcast = (np.float32(1), np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32)[:, None])
    arrays = (X, X.T, plain, plain.T, np.asfortranarray(plain), plain[::-1], plain.astype(np.float16))
    for each in (*arrays, *(np.broadcast_to(line, (8, 8)) for line in broadcast)):
        lower(lambda x, each=each: x + each)
        placed = jnp.asarray(each)
        lower(lambda x, placed=placed: x + placed)
    numbers = (1, 1.0, True, np.float32(1), np.float64(1), np.int8(1), jnp.bfloat16(1), 2**31 - 1)
    odd = (float("nan"), np.float32("nan"), 0.0, -0.0, 1e-45, float("inf"), -np.inf)
    for number in (*numbers, *odd):
        lower(lambda x, number=number: x + number)


def names() -> None:
    """Names of functions, of results and of scopes."""

    def function(x: Any) -> Any:
        return x + 1

    def scoped(x: Any) -> Any:
        with jax.named_scope("inner"):
            return x + 1

    lower(function)
    lower(lambda x: x + 1)
    for name in ("b", "c"):
        lower(lambda x, name=name: {name: x})
    with jax.named_scope("outer"):
        lower(lambda x: x + 2)
    scoped.__name__ = "function"
    lower(scoped)


def arguments() -> None:
    """Options of jit for the arguments, and the arguments' dtypes."""
    lower(lambda x: x * 2, donate_argnums=0)
    for keep in (True, False):
        lower(lambda x, y: x * 2, X, X, keep_unused=keep)
    for value in (1, 1.0, np.float32(1), np.int32(1), True, jnp.float32(1), X.astype(jnp.bfloat16), X.astype(int)):
        lower(lambda x: x * 2, value)


def meshes() -> None:
    """Shardings over the same devices in another order, shape, or under other names."""
    devices = np.array(jax.devices())
    kinds_of_memory = [memory.kind for memory in devices[0].addressable_memories()]
    square = devices.reshape(4, 2)
    kinds = ((devices, "x"), (square, "xy"), (devices[::-1], "x"), (square, "ab"), (square.reshape(2, 4).T, "xy"))
    for placed, axes in kinds:
        mesh = Mesh(placed, tuple(axes))
        for spec in (PartitionSpec(), PartitionSpec(axes[0]), PartitionSpec(None, axes[0]), PartitionSpec((*axes,))):
            on_mesh(mesh, spec, axes[0])
        if "pinned_host" in kinds_of_memory:
            lower(lambda x: x * 3, out_shardings=NamedSharding(mesh, PartitionSpec(axes[0]), memory_kind="pinned_host"))
        if hasattr(jax, "set_mesh"):
            with jax.set_mesh(mesh):
                lower(lambda x: x * 2)


def on_mesh(mesh: Any, spec: Any, axis: str) -> None:
    sharding = NamedSharding(mesh, spec)
    lower(lambda x: x * 2, in_shardings=sharding)
    lower(lambda x: x * 2, out_shardings=sharding)
    lower(lambda x: x * 2, jax.device_put(X, sharding))
    lower(lambda x: lax.with_sharding_constraint(x * 2, sharding))
    lower(shard_map(lambda x: lax.psum(x, axis), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
    lower(shard_map(lambda x: lax.ppermute(x, axis, [(0, 1), (1, 0)]), mesh=mesh, in_specs=spec, out_specs=spec))


def control_flow() -> None:
    for limit in (5, 6):
        lower(lambda x, limit=limit: lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * 2), (0, x)))
    for options in ({}, {"reverse": True}, {"unroll": 2}, {"unroll": True}, {"length": 8}):
        lower(lambda x, options=options: lax.scan(lambda c, a: (c + a, c * a), x[0], x, **options))
    for branches in ((jnp.sin, jnp.cos), (jnp.cos, jnp.sin), (jnp.sin, jnp.sin)):
        chosen = functools.partial(lambda x, branches: lax.cond(x.sum() > 0, *branches, x), branches=branches)
        lower(lambda x, chosen=chosen: chosen(x))
        lower(lambda x, chosen=chosen: jax.grad(lambda x: chosen(x).sum())(x))
    for policy in (None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names("a")):
        kept = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ x)).sum(), policy=policy)
        lower(lambda x, kept=kept: jax.grad(kept)(x))
        lower(lambda x, kept=kept: kept(x))
    unique = jax.custom_vjp(jnp.sin)
    unique.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    for function in (unique, jax.nn.relu, jax.nn.gelu):
        lower(function)
        lower(lambda x, function=function: jax.grad(lambda x: function(x).sum())(x))


def random_numbers() -> None:
    draws: list[Callable[[Any], Any]] = [
        lambda key: jax.random.normal(key, (4,)),
        lambda key: jax.random.bits(key, (4,)),
        lambda key: jax.random.split(key, 3),
        lambda key: jax.random.permutation(key, 8),
    ]
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.random.key(0, impl=implementation)
        for draw in draws:
            for platform in (None, "cuda", "tpu"):
                lower(draw, key, platform=platform)


def configuration() -> None:
    """Settings of jax that lowering or tracing reads."""
    for precision in ("default", "highest", "float32", "tensorfloat32", None):
        with jax.default_matmul_precision(precision):
            lower(lambda x: x @ x)
    before = jax.config.jax_enable_x64, jax.config.jax_threefry_partitionable
    for choice in (True, False):
        jax.config.update("jax_enable_x64", choice)
        lower(lambda x: x + jnp.arange(8.0))
        jax.config.update("jax_threefry_partitionable", choice)
        lower(lambda x: x + jax.random.normal(jax.random.key(0), (8,)))
    jax.config.update("jax_enable_x64", before[0])
    jax.config.update("jax_threefry_partitionable", before[1])


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: jnp.sort(x),
    "lu": lambda x: jax.scipy.linalg.lu(x),
    "svd": lambda x: jnp.linalg.svd(x),
    "eigh": lambda x: jnp.linalg.eigh(x),
    "qr": lambda x: jnp.linalg.qr(x),
    "cholesky": lambda x: jnp.linalg.cholesky(x),
    "fft": lambda x: jnp.fft.fft(x),
    "convolution": lambda x: jax.scipy.signal.convolve2d(x, x),
    "top_k": lambda x: lax.top_k(x, 2),
    "cumsum": lambda x: jnp.cumsum(x),
    "gather": lambda x: x[jnp.array([1, 2]), jnp.array([0, 1])],
    "scatter": lambda x: x.at[jnp.array([1, 2])].add(1.0, mode="drop"),
    "softmax": lambda x: jax.nn.softmax(x),
    "attention": lambda x: jax.nn.dot_product_attention(*(x.reshape(1, 8, 2, 4),) * 3),
    "erf_inv": lambda x: lax.erf_inv(x),
    "digamma": lambda x: lax.digamma(x),
    "window": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    "dot": lambda x: lax.dot_general(
        x, x, (((1,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.BF16_BF16_F32, preferred_element_type="float32"
    ),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "approximate": lambda x: lax.approx_max_k(x, 2),
    "ragged_dot": lambda x: lax.ragged_dot(x, jnp.ones((2, 8, 8)), jnp.array([4, 4])),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2], (1, 0)),
    "barrier": lambda x: lax.optimization_barrier(x),
    "interpolation": lambda x: jnp.interp(x, x[0], x[1]),
}


def operations() -> None:
    """Operations whose rules differ between platforms, batched, and differentiated."""
    for operation in OPERATIONS.values():
        for platform in (None, "cuda", "rocm", "tpu"):
            lower(lambda x, operation=operation: operation(x), platform=platform)
        lower(jax.vmap(operation), np.ones((2, 8, 8), np.float32))
    for name in ("softmax", "attention", "cholesky", "svd", "eigh", "gather", "scatter", "cumsum", "window"):
        total = functools.partial(lambda x, of: sum(leaf.sum() for leaf in jax.tree.leaves(of(x))), of=OPERATIONS[name])
        lower(lambda x, total=total: jax.grad(total)(x))


CUBE = np.ones((4, 4, 4), np.float32)
DIMENSIONS = (((1,), (0,)), ((0,), (1,)), ((0,), (0,)))

# The same operation on the same array with one parameter that is not in the result's shape.
PARAMETERS: list[list[Callable[[Any], Any]]] = [
    *([lambda x, a=a, f=f: f(x, axis=a) for a in (0, 1, 2)]
      for f in (jnp.sum, jnp.max, jnp.argmax, jnp.cumsum, jnp.sort)),
    [lambda x, p=p: x.transpose(p) for p in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0))],
    [lambda x, p=p: lax.integer_pow(x, p) for p in (3, 4, -3)],
    [lambda x, d=d: lax.rev(x, d) for d in ((0,), (1,), (0, 1))],
    [lambda x, s=s: lax.slice(x, s, tuple(i + 2 for i in s)) for s in ((0, 0, 0), (1, 0, 0), (0, 0, 2))],
    [lambda x, s=s: lax.slice(x, (0, 0, 0), (4, 3, 3), s) for s in ((2, 1, 1), (3, 1, 1))],
    [lambda x, p=p: lax.pad(x, 0.0, p) for p in (((1, 0, 0),) * 3, ((0, 1, 0),) * 3)],
    [lambda x, p=p: lax.reduce_precision(x, *p) for p in ((5, 3), (5, 4), (4, 3))],
    [lambda x, d=d: lax.dot_general(x[0], x[1], (d, ((), ()))) for d in DIMENSIONS],
    [lambda x, d=d: lax.broadcast_in_dim(x[0, 0], (4, 4), d) for d in ((0,), (1,))],
    [lambda x, d=d: lax.broadcasted_iota(np.int32, (4, 4), d) + x[0].astype(int) for d in (0, 1)],
    [lambda x, r=r: lax.cumsum(x, reverse=r) for r in (False, True)],
    [lambda x, k=k: lax.sort((x[0], x[1], x[2]), num_keys=k) for k in (1, 2)],
    [lambda x, s=s: lax.sort(x, is_stable=s) for s in (False, True)],
    [lambda x, k=k: jnp.fft.fft(x.astype(np.complex64)) if k else jnp.fft.ifft(x.astype(np.complex64)) for k in (0, 1)],
    [lambda x, m=m: x.at[jnp.array([1, 9])].get(mode=m) for m in ("fill", "clip", "promise_in_bounds")],
    [lambda x, v=v: x.at[jnp.array([1, 9])].get(mode="fill", fill_value=v) for v in (1.0, 2.0)],
    [lambda x, u=u: x.at[jnp.array([1, 2])].get(unique_indices=u) for u in (False, True)],
    [lambda x, u=u: x.at[jnp.array([1, 2])].add(1.0, indices_are_sorted=u) for u in (False, True)],
    [lambda x, m=m: x.at[jnp.array([1, 2])].set(1.0, mode=m) for m in ("drop", "clip", "promise_in_bounds")],
    [lambda x, o=o: lax.linalg.triangular_solve(x[0], x[1], **o) for o in ({}, {"lower": True}, {"left_side": True},
        {"transpose_a": True}, {"unit_diagonal": True})],
    [lambda x, o=o: lax.conv_general_dilated(x, x, **o) for o in (
        {"window_strides": (1,), "padding": ((1, 2),)}, {"window_strides": (1,), "padding": ((2, 1),)},
        {"window_strides": (1,), "padding": ((1, 2),), "precision": "highest"})],
    [lambda x, p=p: lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), p) for p in (((1, 0), (0, 0), (0, 0)),
        ((0, 1), (0, 0), (0, 0)))],
    [lambda x, k=k: lax.reduce_window(x, 0.0, lax.add, k, (1, 1, 1), "SAME") for k in ((2, 1, 1), (1, 2, 1))],
    [lambda x, c=c: lax.clamp(c, x, 2.0) for c in (0.0, 1.0)],
    [lambda x, t=t: lax.convert_element_type(x, t) for t in (np.int32, np.float16, bool)],
    [lambda x, t=t: lax.bitcast_convert_type(x, t) for t in (np.int32, np.uint32)],
    [lambda x, f=f: lax.map(f, x) for f in (jnp.sin, jnp.cos)],
    [lambda x, f=f: lax.while_loop(lambda c: c.sum() < 9, f, x) for f in (jnp.sin, jnp.cos)],
    [lambda x, f=f: lax.associative_scan(f, x) for f in (jnp.add, jnp.multiply)],
    [lambda x, k=k: lax.top_k(x, k)[0][..., :1] for k in (1, 2)],
    [lambda x, k=k: lax.approx_max_k(x, 2, recall_target=k) for k in (0.95, 0.5)],
    [lambda x, f=f: lax.reduce(x, np.float32(0), f, (0,)) for f in (lambda a, b: a * b + 1, lambda a, b: a - b)],
    [lambda x, s=s: jax.jit(jnp.sin, donate_argnums=s)(x + 1) for s in ((), (0,))],
    [lambda x, s=s: jax.jit(lambda y: y * 2, inline=s)(x) for s in (False, True)],
    [lambda x, s=s: jax.checkpoint(jnp.sin, prevent_cse=s)(x) for s in (False, True)],
    [lambda x, o=o: jnp.linalg.eigh(x, **o) for o in ({}, {"symmetrize_input": False}, {"UPLO": "U"})],
    [lambda x, o=o: jnp.linalg.svd(x, **o) for o in ({"full_matrices": True}, {"full_matrices": False})],
    [lambda x, s=s: jax.random.randint(jax.random.key(s), (4,), 0, 9) + x[0, 0].astype(int) for s in (0, 1)],
]  # fmt: skip


def parameters() -> None:
    for alternatives in PARAMETERS:
        for function in alternatives:
            lower(lambda x, function=function: function(x), CUBE)


def partitioner() -> None:
    """A setting that changes nothing of the jaxpr."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    if hasattr(jax.config, "jax_use_shardy_partitioner"):
        before = jax.config.jax_use_shardy_partitioner
        for choice in (True, False):
            jax.config.update("jax_use_shardy_partitioner", choice)
            lower(lambda x: lax.with_sharding_constraint(x * 2, sharding))
        jax.config.update("jax_use_shardy_partitioner", before)


def kernels() -> None:
    """Pallas: names and scopes are in the kernels, and before jax 0.12 the places where they were written."""
    places = []
    for _ in range(2):

        def here(a: Any, out: Any) -> None:
            out[...] = a[...] + 1

        places.append(here)

    def here(a: Any, out: Any) -> None:
        out[...] = a[...] + 1

    for each in (*places, here):
        calls = pallas.pallas_call(each, jax.ShapeDtypeStruct((256, 256), "float32"))
        lower(lambda x, calls=calls: calls(x), np.ones((256, 256), np.float32), platform="tpu")

    def kernel(a: Any, b: Any, out: Any, *, scope: str) -> None:
        with jax.named_scope(scope):
            out[...] = a[...] + b[...]

    wide = np.ones((256, 256), np.float32)
    block = pallas.BlockSpec((128, 256), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((256, 256), "float32")
    for scope in ("one", "other"):
        for name in (None, "named"):
            for platform in (None, "tpu", "cuda"):
                call = pallas.pallas_call(
                    functools.partial(kernel, scope=scope), shape, grid=(2,), in_specs=[block] * 2, out_specs=block,
                    interpret=platform is None, name=name,
                )  # fmt: skip
                lower(lambda x, call=call: call(x, x), wide, platform=platform)


def what_must_be_lowered() -> None:
    """Callbacks, foreign calls, custom partitioning and primitives of the program's own."""
    from jax._src import core
    from jax._src.interpreters import mlir
    from jax.experimental.custom_partitioning import custom_partitioning

    lower(lambda x: jax.pure_callback(lambda a: a, x, x))
    lower(lambda x: jax.debug.print("{}", x))
    for attribute in (1, 2):
        foreign = jax.ffi.ffi_call("nothing", jax.ShapeDtypeStruct((8, 8), "float32"))
        lower(lambda x, foreign=foreign, attribute=attribute: foreign(x, attribute=attribute))
    partitioned = custom_partitioning(lambda x: x * 2)
    partitioned.def_partition(lambda *a: None, lambda *a: None, sharding_rule="i j->i j")
    lower(lambda x: partitioned(x))
    for function in (jnp.sin, jnp.cos):
        # Both have one name; only the program knows that they lower differently.
        primitive = core.Primitive("mine")
        primitive.def_abstract_eval(lambda x: x)
        mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
        lower(lambda x, primitive=primitive: primitive.bind(x))


def metadata() -> None:
    from jax.experimental.compute_on import compute_on
    from jax.experimental.xla_metadata import set_xla_metadata

    def apart(x: Any) -> Any:
        with compute_on("device_host"):
            return x * 2

    def noted(x: Any, value: str) -> Any:
        with set_xla_metadata(a=value):
            return x * 2

    lower(apart)
    for value in ("1", "2"):
        lower(lambda x, value=value: noted(x, value))


CASES = (
    shared_functions, constants, names, arguments, meshes, control_flow, random_numbers, configuration, operations,
    parameters, partitioner, kernels, metadata, what_must_be_lowered,
)  # fmt: skip

if __name__ == "__main__":
    for case in CASES:
        if not sys.argv[1:] or case.__name__ in sys.argv[1:]:
            case()
