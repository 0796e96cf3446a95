"""Read and write programs with jaxlib's MLIR."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

_PORTABLE = b"ML\xefR\rStableHLO_v"


def parse(program: Any) -> Any:
    """Parse MLIR text, bytecode or a portable artifact into a module; return a module as it is."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if isinstance(program, ir.Module):
        return program
    context = _context()
    if isinstance(program, bytes) and program.startswith(_PORTABLE):
        return stablehlo.deserialize_portable_artifact(context, program)
    return ir.Module.parse(program, context)


def bytecode(module: Any) -> bytes:
    """Return a module as MLIR bytecode."""
    output = io.BytesIO()
    module.operation.write_bytecode(file=output)
    return output.getvalue()


def name(module: Any) -> str:
    """Return a module's name; jax names it ``jit_`` and the function's name."""
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    return str(ir.StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else "module"


def operations(module: Any) -> Iterator[Any]:
    """Yield all operations within a module; the caller has entered the module's context.

    MLIR's ``walk()`` would turn an exception of the program's signal handlers into a RuntimeError.
    """
    waiting = [module.operation]
    while waiting:
        for region in waiting.pop().regions:
            for block in region:
                inner = [view.operation for view in block]
                yield from inner
                waiting += inner


def _context() -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    context = ir.Context()
    context.allow_unregistered_dialects = True
    registry = ir.DialectRegistry()
    _extension().register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def _extension() -> Any:
    """Return the module that registers the other dialects jax lowers to; jaxlib 0.7 renamed it."""
    try:
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    except ImportError:
        from jaxlib.mlir._mlir_libs import register_jax_dialects

        return register_jax_dialects
    return _jax_mlir_ext
