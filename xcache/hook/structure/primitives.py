"""Primitives and their lowering rules: a primitive is known by its name and by the code that lowers it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from jax._src import core
from jax._src.interpreters import mlir

from xcache.hook.structure.callables import describe_callable
from xcache.hook.structure.code import Seen, is_own, is_own_primitive
from xcache.hook.structure.encoding import CannotSkipError, Encoding, are_same, tagged, type_name
from xcache.hook.structure.rules import EXPERIMENTAL, is_imported_later, rule_tables, rules_of

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
# By id: each rule with its description, and with the reason if it has none. No exception, because that would hold the
# frames in which it was raised, with all that the program has there.
_descriptions: dict[int, tuple[Any, str, str | None]] = {}


def token(primitive: Any, in_kernel: bool) -> bytes:
    """Return what stands for a primitive and its lowering rules; raise CannotSkipError unless all are jax's own."""
    rules = rules_of(primitive)
    known = _examined.get((primitive, in_kernel))
    if known is None or not are_same(known[0], rules):
        known = _examined[primitive, in_kernel] = rules, _examine(primitive, rules, in_kernel)
    if isinstance(known[1], str):
        raise CannotSkipError(known[1])
    return known[1]


def use_imported_later(used: Iterable[Any]) -> bool:
    """Return whether one of these primitives has a rule that is not there before a program imports more than jax."""
    return any(is_imported_later(_description_of(rule)) for primitive in used for rule in rules_of(primitive))


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
    try:
        told = "|".join((primitive.name, type(primitive).__qualname__, *map(_description_of, rules)))
        if EXPERIMENTAL in told:
            return f"lowering rule of jax.experimental: {primitive.name}"
    except CannotSkipError as reason:
        return str(reason)
    return tagged(b"p", primitive.name.encode() + b" " + hashlib.blake2b(told.encode(), digest_size=12).digest())


def _description_of(rule: Any) -> str:
    """Return a rule's description, made once; raise CannotSkipError if it holds something that cannot be described."""
    known = _descriptions.get(id(rule))
    if known is None:
        made, refused = "", None
        try:
            made = describe_callable(rule)
        except CannotSkipError as reason:
            refused = str(reason)
        known = _descriptions[id(rule)] = rule, made, refused
    if known[2] is not None:
        raise CannotSkipError(known[2])
    return known[1]


class _RuleTables:
    """jax's tables of rules, which any rule may use: lowering ``softmax`` lowers ``exp`` on the way."""

    def __init__(self) -> None:
        self._seen: list[list[Any]] = []
        self._reason: str | None = None
        self._digests: dict[bool, bytes] = {}

    def check(self) -> None:
        """Raise CannotSkipError if somebody has replaced a rule of jax's own by code of the program's."""
        tables = (*rule_tables(), mlir.ir_type_handlers, mlir._constant_handlers)
        now = [list(table.values()) for table in tables]
        if not (len(now) == len(self._seen) and all(map(are_same, now, self._seen))):
            # A rule's description contains those of the rules that it uses.
            _descriptions.clear()
            _examined.clear()
            self._reason = self._examine(tables)
            self._seen = now
        if self._reason is not None:
            raise CannotSkipError(self._reason)

    def digest(self, *, with_imported_later: bool) -> bytes:
        """Return a digest of which rule each primitive has; the last ``check`` has made it.

        A rule of jax's in the wrong place is jax's own code, too. ``with_imported_later`` adds the rules of what a
        program may import after jax.
        """
        return self._digests[with_imported_later]

    def _examine(self, tables: Sequence[dict[Any, Any]]) -> str | None:
        described: dict[bool, list[str]] = {False: [], True: []}
        seen: Seen = {}
        keys: Seen = {}
        for number, table in enumerate(tables):
            for key, entry in table.copy().items():
                # A rule for a primitive or type of the program's is met only where the program uses that.
                is_primitive = isinstance(key, core.Primitive)
                if not (is_own_primitive(key, keys) if is_primitive else is_own(key, keys)):
                    keys = {}
                    continue
                said = key.name if is_primitive else type_name(key)
                if not is_own(entry, seen):
                    return f"rule of jax replaced: {said}"
                try:
                    rule = _description_of(entry)
                except CannotSkipError:
                    # Any rule may use it.
                    return f"rule of jax that cannot be described: {said}"
                described[is_imported_later(rule)].append(f"{number} {said} {rule}")
        digests = [
            hashlib.blake2b("\n".join(sorted(described[late])).encode(), digest_size=16) for late in (False, True)
        ]
        self._digests = {False: digests[0].digest(), True: digests[0].digest() + digests[1].digest()}
        return None


rules_in_tables = _RuleTables()


def _primitive(encoding: Encoding, value: Any) -> None:
    encoding.write(token(value, encoding.kernels > 0))


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    return _primitive if isinstance(value, core.Primitive) else None
