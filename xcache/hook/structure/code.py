"""Write functions, classes and partials that stand in a program: by the description of jax's code."""

from __future__ import annotations

import functools
import types
from typing import Any

from xcache.hook.structure.encoding import CannotSkipError, Encoding, encodes, tagged, text, type_name
from xcache.hook.structure.libraries import is_of_jax
from xcache.hook.structure.pristine import pristine

_STANDARD = ("builtins", "numpy", "ml_dtypes", "enum", "typing", "abc", "collections", "dataclasses", "functools",
             "contextlib", "types")  # fmt: skip


def function(encoding: Encoding, value: Any) -> None:
    """Write a function, or an object that acts as one, if it is jax's own with all that it holds."""
    if not is_of_jax(getattr(value, "__module__", None)):
        raise CannotSkipError(f"callable outside jax: {getattr(value, '__qualname__', type(value).__qualname__)}")
    encoding.write(tagged(b"fn", pristine.describe(value)))


@encodes(functools.partial)
def _partial(encoding: Encoding, value: functools.partial[Any]) -> None:
    encoding.write(b"partial")
    encoding.encode_all((value.func, value.args, value.keywords))


@encodes(type)
def class_(encoding: Encoding, value: type) -> None:
    """Write a class by its name, if it is jax's or the standard library's."""
    if is_of_jax(value.__module__):
        encoding.write(tagged(b"t", pristine.describe(value)))
    elif value.__module__.split(".", 1)[0] in _STANDARD:
        encoding.write(b"t" + text(type_name(value)))
    else:
        raise CannotSkipError(f"class outside jax: {type_name(value)}")


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    if isinstance(value, type):
        return class_
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return function
    return None
