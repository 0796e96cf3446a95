"""Jaxprs, equation by equation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax._src import config, core

from xcache.hook.structure import code, locations, values
from xcache.hook.structure.encoding import (
    CannotSkipError,
    Encoding,
    attributes_of_class,
    encodes,
    text,
    type_name,
)
from xcache.hook.structure.objects import attributes
from xcache.hook.structure.pristine import pristine

# jax 0.11 joined Jaxpr and ClosedJaxpr.
_CLOSED = getattr(core, "ClosedJaxpr", None)
_CONTEXT = getattr(core, "JaxprEqnContext", None)
_simplified_constants = getattr(config, "use_simplified_jaxpr_constants", None)
# All that lowering may read of these; a later jax may have more.
for _kind, _known in (
    (core.Jaxpr, "_all_invars _consts _constvars _debug_info _effects _eqns _invars _is_high _outvars"),
    (
        _CLOSED or core.Jaxpr,
        "_all_invars _consts _constvars _debug_info _effects _eqns _invars _is_high _jaxpr _outvars",
    ),
    (core.JaxprEqn, "ctx effects invars outvars params primitive source_info"),
    (core.Var, "aval count final_qdd initial_qdd suffix"),
    (core.Literal, "aval hash val"),
):
    if _others := attributes_of_class(_kind)[0].difference(_known.split(), ("__weakref__",)):
        raise LookupError(f"{_kind.__name__}.{min(_others)}")


@encodes(_CLOSED)
def _closed(encoding: Encoding, value: Any) -> None:
    if not encoding.met_before(b"C", value):
        jaxpr(encoding, value.jaxpr)
        _constants(encoding, value.consts)


@encodes(core.Jaxpr)
def jaxpr(encoding: Encoding, value: Any) -> None:
    """Write a jaxpr; raise CannotSkipError if its lowering depends on anything outside it."""
    if encoding.met_before(b"J", value):
        return
    if getattr(value, "is_high", False):
        raise CannotSkipError("high jaxpr")
    if encoding.kernels:
        locations.function(encoding, value.debug_info)
    numbers: dict[Any, int] = {}
    for variables in (value.constvars, value.invars):
        encoding.write(b"(%d" % len(variables))
        for variable in variables:
            _define(encoding, variable, numbers)
    if hasattr(value, "_consts"):
        _constants(encoding, value.consts)
    if value.effects:
        encoding.write_unordered(value.effects)
    encoding.write(b"[%d" % len(value.eqns))
    for equation in value.eqns:
        _equation(encoding, equation, numbers)
    encoding.write(b"=%d" % len(value.outvars))
    for variable in value.outvars:
        _use(encoding, variable, numbers)


def _equation(encoding: Encoding, equation: Any, numbers: dict[Any, int]) -> None:
    primitive, write = equation.primitive, encoding.write
    write(pristine.tokens.get((primitive, encoding.kernels > 0)) or code.token(encoding, primitive))
    write(b"(%d" % len(equation.invars))
    for variable in equation.invars:
        _use(encoding, variable, numbers)
    _context(encoding, equation.ctx)
    if primitive.name in code.KERNELS:
        if equation.params.get("debug"):
            raise CannotSkipError("kernel that is printed while it is lowered")
        locations.settings(encoding)
        locations.location(encoding, equation.source_info)
        with encoding.kernel():
            _parameters(encoding, primitive, equation.params)
    elif equation.params:
        _parameters(encoding, primitive, equation.params)
    if equation.effects:
        encoding.write_unordered(equation.effects)
    if encoding.kernels:
        locations.location(encoding, equation.source_info)
    write(b")%d" % len(equation.outvars))
    for variable in equation.outvars:
        _define(encoding, variable, numbers)


def _parameters(encoding: Encoding, primitive: Any, parameters: dict[str, Any]) -> None:
    unused = code.UNUSED.get(primitive.name, ())
    for name in sorted(parameters):
        if name in unused:
            continue
        encoding.write(text(name))
        try:
            encoding.encode(parameters[name])
        except CannotSkipError as reason:
            reason.add_note(f"{primitive.name}.{name}")
            raise
    encoding.write(b".")


def _define(encoding: Encoding, variable: Any, numbers: dict[Any, int]) -> None:
    if type(variable) is core.DropVar:
        encoding.write(b"_")
    if getattr(variable, "initial_qdd", None) is not None:
        raise CannotSkipError("quasi-dynamic data")
    numbers[variable] = len(numbers)
    encoding.encode(variable.aval)


def _use(encoding: Encoding, variable: Any, numbers: dict[Any, int]) -> None:
    if type(variable) is core.Literal:
        literal(encoding, variable)
        return
    number = numbers.get(variable)
    if number is None:
        raise CannotSkipError("free variable")
    encoding.write(b"v%d;" % number)


def _constants(encoding: Encoding, constants: Iterable[Any]) -> None:
    constants = tuple(constants)
    encoding.write(b"(%d" % len(constants))
    for constant in constants:
        _constant(encoding, constant)


def _constant(encoding: Encoding, value: Any) -> None:
    if isinstance(value, (np.ndarray, jax.Array)) or type(value) is values.TYPED_ARRAY:
        if encoding.met_before(b"K", value):
            return
        encoding.constants.append(value)
    elif isinstance(value, (bool, int, float, complex, np.generic)):
        # Lowering emits one constant for each object, so an object used twice differs from two equal objects.
        encoding.met_before(b"k", value)
    else:
        raise CannotSkipError(f"unknown constant: {type_name(type(value))}")
    values.constant(encoding, value)


@encodes(core.Literal)
def literal(encoding: Encoding, value: Any) -> None:
    """Write a literal: a scalar, or an array that jax makes an argument of the program or a constant."""
    encoding.write(b"L")
    content = value.val
    is_array = isinstance(content, (np.ndarray, jax.Array)) or type(content) is values.TYPED_ARRAY
    if is_array and np.ndim(content):
        encoding.met_before(b"l", value)
        if _simplified_constants is not None and _simplified_constants.value and core.is_hoistable(value):
            # It becomes an argument: its value is not in the program.
            encoding.met_before(b"K", content)
            encoding.constants.append(content)
            encoding.write(b"hoisted")
        else:
            _constant(encoding, content)
    else:
        values.constant(encoding, content)
    encoding.encode(value.aval)


def _context(encoding: Encoding, context: Any) -> None:
    if context is None:
        encoding.write(b"n")
    elif type(context) is not _CONTEXT:
        raise CannotSkipError("context of an equation")
    else:
        encoding.write_token(context, attributes)
