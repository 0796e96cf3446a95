"""The digest of a call: everything that tracing and lowering a function may read, as far as jax and Python show it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import core, xla_bridge
from jax._src import mesh as meshes
from jax._src.interpreters import pxla
from jax._src.lib import jax_jit

from xcache.hook.calls.contents import Contents
from xcache.hook.calls.trees import REGISTRY
from xcache.hook.structure import ambient
from xcache.hook.structure.encoding import MustLowerError, text
from xcache.hook.structure.patches import patches
from xcache.hook.structure.primitives import registries

# This number is part of every digest. It changes with every change of what is written, or how.
_FORMAT = 1
# They describe the function, which is described by its content.
_NOT_OPTIONS = ("fun_sourceinfo", "fun_signature")
_SCALARS = (bool, int, float, complex, np.generic)


class Call(NamedTuple):
    """A call's digest, its dynamic arguments, and the trees that these came in."""

    digest: str
    leaves: list[Any]
    trees: list[Any]


def describe(fun: Any, options: Any, version: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """Return the description of a call; raise MustLowerError if something in it cannot be told.

    ``options`` are those of ``jax.jit``, as jax has parsed them.
    """
    if jax.process_count() > 1:
        raise MustLowerError("several processes")
    registries.check()
    patches.check()
    signature, leaves = jax_jit.parse_arguments(
        arguments, tuple(keywords.values()), tuple(keywords), options.static_argnums, options.static_argnames, REGISTRY
    )
    contents = Contents()
    contents.write(b"xcache call %d " % _FORMAT)
    for part in (ambient.jax_files(), version, ambient.backend(xla_bridge.get_backend())):
        contents.write(text(part))
    contents.encode(ambient.trace_context())
    contents.write(ambient.configuration.digest())
    contents.encode((meshes.get_concrete_mesh(), meshes.thread_resources.env.physical_mesh))
    contents.encode_all(
        (name, value) for name, value in zip(options._fields, options, strict=True) if name not in _NOT_OPTIONS
    )
    contents.encode_all((
        signature.dynamic_arg_treedefs, signature.dynamic_arg_names, signature.static_args, signature.static_arg_names
    ))  # fmt: skip
    for leaf in leaves:
        _leaf(contents, leaf)
    contents.is_lenient = True
    contents.encode(fun)
    return Call(contents.digest(), leaves, list(signature.dynamic_arg_treedefs))


def _leaf(contents: Contents, leaf: Any) -> None:
    """Write all that jax reads from an argument: its type, and its place unless jax is free to choose it."""
    if isinstance(leaf, core.Tracer) or not isinstance(leaf, (jax.Array, np.ndarray, *_SCALARS, jax.ShapeDtypeStruct)):
        raise MustLowerError("argument that is no array")
    contents.encode(core.shaped_abstractify(leaf))
    sharding = getattr(leaf, "sharding", None)
    is_committed = sharding is not None and getattr(leaf, "_committed", True)
    if is_committed:
        contents.encode((sharding, _layout(leaf, sharding)))
    elif sharding is not None and sharding.num_devices > 1:
        raise MustLowerError("uncommitted array of several devices")
    else:
        contents.write(b"anywhere")


def _layout(leaf: Any, sharding: Any) -> Any:
    """Return an argument's layout, or None for the one that jax would give it."""
    layout = getattr(leaf.format, "layout", None)
    is_default = layout is None or pxla.is_default_layout(layout, sharding, core.shaped_abstractify(leaf))
    return None if is_default else layout
