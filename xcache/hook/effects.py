"""Tell by a lowering's module whether the lowering did more than make it, so that it must not be skipped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from xcache.keys import stablehlo

# Custom calls that the compiler replaces, or that jaxlib registers when it is imported: lowering has no side effect.
_WITHOUT_SIDE_EFFECTS = frozenset((
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "LayoutConstraint", "TopK",
    "ApproxTopK", "PartialReduce", "tpu_custom_call", "mhlo.topk", "mhlo.erf", "Qr", "Eigh", "LuDecomposition",
    "ProductOfElementaryHouseholderReflectors", "ShardBarrierFrom", "ShardBarrierTo", "xla.sdy.GlobalToLocalShape",
    "xla.sdy.LocalToGlobalShape", "MoveToHost", "MoveToDevice", "AllocateBuffer",
))  # fmt: skip
# Their lowering rules make jaxlib load SciPy's LAPACK; an executable would otherwise call a null pointer.
LAPACK = "lapack_"


def reason_to_lower(result: Any, calls: Collection[str]) -> str | None:
    """Return why the lowering that gave this module with these custom calls must not be skipped, or None."""
    if result.host_callbacks or result.keepalive:
        return "callbacks"
    if result.shape_poly_state.uses_dim_vars:
        return "symbolic shapes"
    for name in calls:
        if name not in _WITHOUT_SIDE_EFFECTS and not name.startswith(LAPACK):
            return "custom call"
    return None


def custom_calls(module: Any) -> set[str]:
    """Return the names of the custom calls in a module."""
    from jaxlib.mlir import ir

    found: set[str] = set()
    with module.context:
        for operation in stablehlo.operations(module):
            if operation.name == "stablehlo.custom_call":
                found.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
            elif "custom_call" in operation.name:
                found.add(operation.name)
    return found
