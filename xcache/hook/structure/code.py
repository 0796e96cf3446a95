"""Write what jax's code makes of a program, by the description of that: functions, classes, and primitives' rules."""

from __future__ import annotations

import functools
import types
from typing import Any

from jax._src import core

from xcache.hook.structure.description import lowering_tables
from xcache.hook.structure.encoding import CannotSkipError, Encoding, encodes, encodes_kinds_of, tagged, type_name
from xcache.hook.structure.libraries import is_of_a_library, is_of_jax
from xcache.hook.structure.pristine import pristine

# Parameters that lowering does not look at: functions for differentiation and the like, which jax has used by then.
UNUSED = {
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


@encodes_kinds_of(types.FunctionType, types.BuiltinFunctionType, types.MethodType)
def function(encoding: Encoding, value: Any) -> None:
    """Write a function, or an object that acts as one, if it is jax's own with all that it holds."""
    if not is_of_jax(getattr(value, "__module__", None)):
        raise CannotSkipError(f"callable outside jax: {getattr(value, '__qualname__', type(value).__qualname__)}")
    encoding.write(tagged(b"fn", pristine.describe(value)))


@encodes(functools.partial)
def _partial(encoding: Encoding, value: functools.partial[Any]) -> None:
    encoding.write(b"partial")
    encoding.encode_all((value.func, value.args, value.keywords))


@encodes_kinds_of(type)
def class_(encoding: Encoding, value: type) -> None:
    """Write a class, if it is jax's or a library's."""
    if not (is_of_jax(value.__module__) or is_of_a_library(value.__module__)):
        raise CannotSkipError(f"class outside jax: {type_name(value)}")
    encoding.write(tagged(b"t", pristine.describe(value)))


@encodes_kinds_of(core.Primitive)
def _primitive(encoding: Encoding, value: Any) -> None:
    encoding.write(pristine.tokens.get((value, encoding.kernels > 0)) or token(encoding, value))


def token(encoding: Encoding, primitive: Any) -> bytes:
    """Return what stands for a primitive and its lowering rules; raise CannotSkipError unless all are jax's own."""
    tokens, in_kernel = pristine.tokens, encoding.kernels > 0
    rules = [table.get(primitive) for table in lowering_tables()]
    if not any(rules) and not in_kernel:
        raise CannotSkipError(f"no lowering rule: {primitive.name}")
    try:
        made = tagged(b"p", primitive.name.encode() + b" " + pristine.describe(primitive, *rules))
    except CannotSkipError as reason:
        pristine.check_change()
        raise CannotSkipError(f"lowering rule outside jax: {primitive.name}: {reason}") from None
    tokens[primitive, in_kernel] = made
    return made
