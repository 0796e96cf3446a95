"""jax's tables of lowering rules."""

from __future__ import annotations

from typing import Any

from jax._src.interpreters import mlir

# Its rules, helpers and classes are beyond what is examined.
EXPERIMENTAL = "jax.experimental."
# Rules of these are there only once a program has imported more than jax itself; jax's other rules do not use them.
_IMPORTED_LATE = (
    EXPERIMENTAL, "jax._src.pallas.", "jax._src.checkify.", "jax._src.buffer_callback.",
    "jax._src.xla_metadata.", "jax._src.tpu_custom_call.",
)  # fmt: skip


def rule_tables() -> list[dict[Any, Any]]:
    """Return jax's tables of lowering rules: those of all platforms, and one for each platform."""
    return [mlir._lowerings, *mlir._platform_specific_lowerings.values()]


def rules_of(primitive: Any) -> list[Any]:
    """Return a primitive's lowering rules for all platforms: another platform's may be part of this one's program."""
    return [entry for entry in (table.get(primitive) for table in rule_tables()) if entry is not None]


def is_imported_later(name: str) -> bool:
    """Return whether the name of a rule or module has one in it that ``import jax`` does not import."""
    return any(module in name for module in _IMPORTED_LATE)
