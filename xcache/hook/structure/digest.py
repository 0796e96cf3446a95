"""The digest of everything that ``mlir.lower_jaxpr_to_module`` is given and reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax._src import core, sharding_impls

from xcache.hook.structure import ambient, jaxprs  # noqa: F401 - its types of the table
from xcache.hook.structure.encoding import CannotSkipError, Encoding, text
from xcache.hook.structure.pristine import pristine

# This number is part of every digest. It changes with every change of what is written, or how.
_FORMAT = 9
# Names of arguments appear only in locations. The backend is written as a text.
_LEFT_OUT = ("arg_names", "backend")


class Structure(NamedTuple):
    """The digest, the constants that the program can change in place, the seconds that this took, and jax's state."""

    digest: str
    constants: list[Any]
    seconds: float
    state: object


def structure(module_name: str, jaxpr: Any, arguments: Mapping[str, Any]) -> Structure:
    """Return the structure of a program; raise CannotSkipError if what lowering makes of it cannot be told from it."""
    if len(arguments["platforms"]) != 1:
        raise CannotSkipError("several platforms")
    if type(arguments["axis_context"]) is not sharding_impls.ShardingContext:
        raise CannotSkipError("pmap")
    if arguments["ordered_effects"]:
        raise CannotSkipError("ordered effects")
    if arguments["lowering_parameters"].override_lowering_rules:
        raise CannotSkipError("override_lowering_rules")
    began = time.thread_time()
    pristine.refresh()
    encoding = Encoding()
    ambient.begin(encoding, f"xcache structure {_FORMAT} {module_name}", arguments.get("backend"))
    for name in sorted(arguments):
        if name not in _LEFT_OUT:
            encoding.write(text(name))
            encoding.encode(arguments[name])
    encoding.encode(jaxpr)
    return Structure(encoding.digest(), encoding.changeable, time.thread_time() - began, pristine.state)


def is_as_then(made: Structure) -> bool:
    """Return whether jax's code is as it was when a structure was made."""
    pristine.refresh()
    return pristine.state is made.state


def look_at(jaxpr: Any) -> None:
    """Describe what lowers a program without a structure: jax's caches will have traces of that."""
    pristine.refresh()
    with contextlib.suppress(CannotSkipError):
        pristine.digest()
    encoding, waiting = Encoding(), [jaxpr.jaxpr]
    for each in waiting:
        waiting += core.subjaxprs(each)
        parts = [variable.aval for variable in (*each.constvars, *each.invars)]
        for equation in each.eqns:
            parts += (equation.primitive, *equation.params.values(), *(variable.aval for variable in equation.outvars))
        for part in parts:
            with contextlib.suppress(CannotSkipError):
                encoding.encode(part)
