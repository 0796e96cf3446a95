"""Primitives and their lowering rules: a primitive is known by its name and by the code that lowers it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jax._src import core
from jax._src.interpreters import mlir

from xcache.hook.structure.code import is_own, is_own_primitive, name
from xcache.hook.structure.encoding import Encoding, MustLowerError, tagged

# Parameters that lowering does not look at: functions for differentiation and the like, which jax has used by then.
_UNUSED = {
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

# Each primitive's rules when it was examined, and its token or the reason why it has none.
_examined: dict[tuple[Any, bool], tuple[list[Any], bytes | str]] = {}


def token(primitive: Any, in_kernel: bool) -> bytes:
    """Return what stands for a primitive and its lowering rules; raise MustLowerError unless all are jax's own."""
    rules = _rules(primitive)
    known = _examined.get((primitive, in_kernel))
    if known is None or not _are_same(known[0], rules):
        known = _examined[primitive, in_kernel] = rules, _examine(primitive, rules, in_kernel)
    if isinstance(known[1], str):
        raise MustLowerError(known[1])
    return known[1]


def unused(primitive: Any) -> tuple[str, ...]:
    """Return the names of the parameters that lowering does not look at."""
    return _UNUSED.get(primitive.name, ())


def _examine(primitive: Any, rules: list[Any], in_kernel: bool) -> bytes | str:
    if not rules and not in_kernel:
        return f"no lowering rule: {primitive.name}"
    if not all(map(is_own, rules)):
        return f"lowering rule outside jax: {primitive.name}"
    if not is_own_primitive(primitive):
        return f"primitive outside jax: {primitive.name}"
    told = "|".join((primitive.name, type(primitive).__qualname__, *map(name, rules)))
    return tagged(b"p", primitive.name.encode() + b" " + hashlib.blake2b(told.encode(), digest_size=12).digest())


def _rules(primitive: Any) -> list[Any]:
    """Return a primitive's lowering rules for all platforms: another platform's may be part of this one's program."""
    return [entry for entry in (table.get(primitive) for table in rule_tables()) if entry is not None]


def _are_same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(a is b for a, b in zip(these, those, strict=True))


class _Registries:
    """jax's tables of rules, which any rule may use: lowering ``softmax`` lowers ``exp`` on the way."""

    def __init__(self) -> None:
        self._seen: list[list[Any]] = []
        self._reason: str | None = None

    def check(self) -> None:
        """Raise MustLowerError if somebody has replaced a rule of jax's own."""
        tables = (*rule_tables(), mlir.ir_type_handlers, mlir._constant_handlers)
        # Lists compare their items by identity first, so that this takes microseconds.
        now = [list(table.values()) for table in tables]
        if now != self._seen:
            self._reason, self._seen = self._find(tables), now
        if self._reason is not None:
            raise MustLowerError(self._reason)

    @staticmethod
    def _find(tables: Sequence[dict[Any, Any]]) -> str | None:
        for table in tables:
            for key, rule in table.items():
                # A rule for a primitive or type of the program's is met only where the program uses that.
                owned = is_own_primitive(key) if isinstance(key, core.Primitive) else is_own(key)
                if owned and not is_own(getattr(rule, "rule", rule)):
                    return f"rule of jax replaced: {getattr(key, 'name', key)}"
        return None


registries = _Registries()


def rule_tables() -> list[dict[Any, Any]]:
    """Return jax's tables of lowering rules: those of all platforms, and one for each platform."""
    return [mlir._lowerings, *mlir._platform_specific_lowerings.values()]


def _primitive(encoding: Encoding, value: Any) -> None:
    encoding.write(token(value, encoding.kernels > 0))


def rule(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    return _primitive if isinstance(value, core.Primitive) else None
