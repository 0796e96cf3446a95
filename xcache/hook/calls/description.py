"""The digest of a call: everything that tracing and lowering a function may read, as far as jax and Python show it."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core, xla_bridge
from jax._src import mesh as meshes
from jax._src.interpreters import pxla
from jax._src.lib import jax_jit

from xcache.hook.calls.program_values import ProgramEncoding
from xcache.hook.calls.trees import REGISTRY
from xcache.hook.structure import ambient
from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.libraries import LIBRARY, PROGRAM, is_of_jax, origin, package_of
from xcache.hook.structure.pristine import pristine

# This number is part of every digest. It changes with every change of what is written, or how.
_FORMAT = 15
# They only name the function, whose content is encoded below.
_NOT_OPTIONS = ("fun_sourceinfo", "fun_signature")
_ARRAYS = (jax.Array, np.ndarray, bool, int, float, complex, np.generic)
# ``import jax`` imports these.
_PUBLIC = ("jax", "jax.lax", "jax.nn", "jax.numpy", "jax.random", "jax.tree_util")


class Call(NamedTuple):
    """A call's digest, its dynamic arguments, and the trees of these."""

    digest: str
    leaves: list[Any]
    trees: list[Any]


def describe(
    fun: Any, options: Any, version: str, arguments: tuple[Any, ...], keywords: dict[str, Any], *, is_prepared: bool
) -> Call:
    """Return the description of a call; raise CannotSkipError if something in it cannot be described.

    ``options`` are those of ``jax.jit``, as jax has parsed them. A call that is only prepared may have
    ``jax.ShapeDtypeStruct`` for arrays.
    """
    if jax.process_count() > 1:
        raise CannotSkipError("several processes")
    pristine.refresh()
    signature, leaves = parsed(options, arguments, keywords)
    encoding = ProgramEncoding(_own_packages(fun))
    # Tracing may call anything of jax's; what it imports late must not count.
    pristine.check(*filter(is_of_jax, sys.modules.copy()))
    ambient.begin(encoding, f"xcache call {_FORMAT} {version}", xla_bridge.get_backend(), *_PUBLIC)
    encoding.encode((meshes.get_concrete_mesh(), meshes.thread_resources.env.physical_mesh))
    encoding.encode_all(
        (name, value) for name, value in zip(options._fields, options, strict=True) if name not in _NOT_OPTIONS
    )
    encoding.encode_all((
        signature.dynamic_arg_treedefs, signature.dynamic_arg_names, signature.static_args, signature.static_arg_names
    ))  # fmt: skip
    for leaf in leaves:
        is_known = isinstance(leaf, _ARRAYS) or (is_prepared and isinstance(leaf, jax.ShapeDtypeStruct))
        if not is_known or isinstance(leaf, core.Tracer):
            raise CannotSkipError("argument that is no array")
        _encode_argument(encoding, leaf)
    encoding.encode(fun)
    return Call(encoding.digest(), leaves, list(signature.dynamic_arg_treedefs))


def _own_packages(fun: Any) -> frozenset[str]:
    """Return the package of the function, or of the object that it is bound to: the program's own, installed or not."""
    while (
        not hasattr(fun, "__self__") and (inner := getattr(fun, "func", getattr(fun, "__wrapped__", None))) is not None
    ):
        fun = inner
    owner = getattr(fun, "__self__", fun)
    owner = owner if isinstance(owner, (type, types.FunctionType)) else type(owner)
    package = package_of(owner.__module__)
    return frozenset((package,) if origin(package) in (PROGRAM, LIBRARY) else ())


def parsed(options: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return jax's description of a call's arguments, and their leaves."""
    static = options.static_argnums, options.static_argnames
    try:
        return jax_jit.parse_arguments(arguments, tuple(keywords.values()), tuple(keywords), *static, REGISTRY)  # type: ignore[no-any-return]
    except (TypeError, ValueError):
        raise CannotSkipError("refused by jax") from None


def _encode_argument(encoding: ProgramEncoding, leaf: Any) -> None:
    """Write all that jax reads from an argument: its type, and its place unless jax is free to choose it."""
    try:
        aval = core.shaped_abstractify(leaf)
    except (TypeError, ValueError, OverflowError):
        raise CannotSkipError("refused by jax") from None
    encoding.encode(aval)
    sharding = getattr(leaf, "sharding", None)
    is_committed = sharding is not None and getattr(leaf, "_committed", True)
    if is_committed:
        encoding.encode((sharding, _layout(leaf, sharding)))
    elif sharding is not None and sharding.num_devices > 1:
        raise CannotSkipError("uncommitted array of several devices")
    else:
        encoding.write(b"anywhere")


def _layout(leaf: Any, sharding: Any) -> Any:
    """Return an argument's layout, or None for the one that jax would give it; random keys have no other."""
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    is_default = layout is None or pxla.is_default_layout(layout, sharding, core.shaped_abstractify(leaf))
    return None if is_default else layout
