"""The program component: StableHLO as bytecode, without its source locations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from xcache.errors import UncacheableError
from xcache.keys import stablehlo
from xcache.keys.stablehlo import bytecode

# Names of custom calls as they stand, uncompressed, in the strings of MLIR bytecode. Looking for them there costs
# microseconds; walking the operations costs milliseconds.
_PARTITIONING = b"CustomSPMDPartitioning"
# Holds a pointer to a function that only the compiler calls; a cached executable would never call it.
_INSPECTING = b"InspectSharding"
_CALLBACKS = (b"python_cpu_callback", b"python_gpu_callback")
_MOSAIC = b"tpu_custom_call"
# jax 0.8 and 0.9 name an unnamed axis of pmap after the address of an object.
_TEMPORARY_AXIS = b"<axis 0x"


def canonical(
    module: Any,
    *,
    keep_locations: bool,
    ignore_partitioning_pointer: bool,
    callbacks_hold_pointers: bool,
    strip_kernels: Callable[[Any], None] | None = None,
) -> bytes:
    """Return the bytes that stand for ``module``: equal for the same program, wherever it was written.

    ``strip_kernels`` takes locations out of kernels that are embedded in custom calls. Raises UncacheableError for a
    program that holds a pointer into this process.
    """
    content = bytecode(module) if keep_locations else _stripped(module, None)
    if callbacks_hold_pointers and any(name in content for name in _CALLBACKS):
        raise UncacheableError("python callback")
    if _INSPECTING in content:
        raise UncacheableError("inspect_array_sharding")
    changes: list[Callable[[Any], None]] = []
    if _PARTITIONING in content:
        if not ignore_partitioning_pointer:
            raise UncacheableError("custom_partitioning")
        changes.append(_forget_partitioning)
    if _MOSAIC in content and strip_kernels is not None and not keep_locations:
        changes.append(strip_kernels)
    if changes:
        content = _changed(module, changes) if keep_locations else _stripped(module, changes)
    return _with_numbered_axes(module, content) if _TEMPORARY_AXIS in content else content


def _with_numbered_axes(module: Any, content: bytes) -> bytes:
    """Replace the addresses in axis names by numbers of the same length, equal where they were equal."""
    meshes = [
        str(operation.operation) for operation in module.body.operations if operation.operation.name == "sdy.mesh"
    ]
    for number, name in enumerate(dict.fromkeys(re.findall(r"<axis 0x[0-9a-f]+>", "\n".join(meshes)))):
        content = content.replace(name.encode(), f"<axis {number:0{len(name) - len('<axis >')}}>".encode())
    return content


def _clone(module: Any) -> Any:
    # Without ip=False, MLIR would insert the clone into the module that this thread is building, if any.
    return module.operation.clone(ip=False)


def _stripped(module: Any, changes: list[Callable[[Any], None]] | None) -> bytes:
    from jaxlib.mlir import passmanager

    with module.context:
        clone = _clone(module)
        manager = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
        # The module is known to be valid, and verifying it again costs more than stripping it.
        manager.enable_verifier(False)
        manager.run(clone.operation)
        for change in changes or ():
            change(clone)
        return bytecode(clone)


def _changed(module: Any, changes: list[Callable[[Any], None]]) -> bytes:
    with module.context:
        clone = _clone(module)
        for change in changes:
            change(clone)
        return bytecode(clone)


def _forget_partitioning(module: Any) -> None:
    """Take the pointer out of each custom_partitioning call, as jax does when the user allows it."""
    from jaxlib.mlir import ir

    for operation in stablehlo.operations(module):
        if operation.name == "stablehlo.custom_call" and "call_target_name" in operation.attributes:
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.encode() == _PARTITIONING:
                operation.attributes["backend_config"] = ir.StringAttr.get("pointer")
