"""Primitives and their lowering rules: a primitive is known by its name and by the code that lowers it."""

from __future__ import annotations

from typing import Any

from jax._src import core

from xcache.hook.structure.description import lowering_tables
from xcache.hook.structure.encoding import CannotSkipError, Encoding, tagged
from xcache.hook.structure.pristine import pristine

# Parameters that lowering does not look at: functions for differentiation and the like, which jax has used by then.
_UNUSED = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees", "fwd"),
    "custom_vjp_call_jaxpr": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
    "shard_map": ("debug_info",),
    "checkpoint": ("policy",),
    "remat2": ("policy",),
    "custom_vmap_call": ("rule",),
    "remat_opt": ("fun_jaxpr_thunk",),
}
# Primitives whose jaxpr becomes a kernel that embeds names.
KERNELS = frozenset(("pallas_call", "core_map", "mpmd_map"))


def token(encoding: Encoding, primitive: Any) -> bytes:
    """Return what stands for a primitive and its lowering rules; raise CannotSkipError unless all are jax's own."""
    tokens, key = pristine.tokens, (primitive, encoding.kernels > 0)
    known = tokens.get(key)
    if known is None:
        known = tokens[key] = _examine(primitive, in_kernel=encoding.kernels > 0)
    if isinstance(known, str):
        raise CannotSkipError(known)
    return known


def unused(primitive: Any) -> tuple[str, ...]:
    """Return the names of the parameters that lowering does not look at."""
    return _UNUSED.get(primitive.name, ())


def _examine(primitive: Any, *, in_kernel: bool) -> bytes | str:
    rules = [table.get(primitive) for table in lowering_tables()]
    if not any(rules) and not in_kernel:
        return f"no lowering rule: {primitive.name}"
    try:
        return tagged(b"p", primitive.name.encode() + b" " + pristine.describe(primitive, *rules))
    except CannotSkipError as reason:
        return f"lowering rule outside jax: {primitive.name}: {reason}"


def _primitive(encoding: Encoding, value: Any) -> None:
    encoding.write(token(encoding, value))


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    return _primitive if isinstance(value, core.Primitive) else None
