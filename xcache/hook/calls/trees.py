"""The tree of a function's results, written without pickling.

A node of the program's own class is written as a reference to a part of the arguments' trees that holds the same
objects, because its data (functions, modules) often cannot be written, and because jax would return the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import tree_util

from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.libraries import named

_Tree = jax.tree_util.PyTreeDef
REGISTRY = getattr(tree_util, "tracing_registry", tree_util.default_registry)
_LEAF = jax.tree_util.tree_structure(0)
_BUILTIN = {"none": type(None), "tuple": tuple, "list": list, "dict": dict}
_NAMES = {kind: name for name, kind in _BUILTIN.items()}


class Part(NamedTuple):
    """A part of an argument's tree, and the same part of the tree that jax makes of the argument another time."""

    tree: Any
    again: Any


def parts_of(arguments: Iterable[Any], again: Iterable[Any]) -> list[Part]:
    """Return the parts of the trees of some arguments; ``again`` are the trees of the same arguments, made anew."""
    return [Part(*pair) for pair in zip(_parts(arguments), _parts(again), strict=True)]


def decode(form: Any, arguments: Sequence[Any]) -> Any:
    """Return the tree that was written, in terms of the trees of this call's arguments."""
    return _decode(form, list(_parts(arguments)))


def _parts(trees: Iterable[Any]) -> Iterator[Any]:
    """Yield each tree and its parts, depth first."""
    for tree in trees:
        yield tree
        yield from _parts(tree.children())


def encode(tree: Any, parts: Sequence[Part]) -> Any:
    """Return a tree as lists and texts; raise CannotSkipError if it cannot be written."""
    node = tree.node_data()
    if node is None:
        return None
    kind, data = node
    children = [encode(child, parts) for child in tree.children()] if kind in _NAMES or _is_named_tuple(kind) else []
    if kind is dict and not all(type(key) in (str, int) for key in data):
        raise CannotSkipError("keys of the results")
    if kind in _NAMES:
        return [_NAMES[kind], data, children]
    if _is_named_tuple(kind) and named(kind.__module__, kind.__qualname__) is kind:
        form = ["named", [kind.__module__, kind.__qualname__, *kind._fields], children]
        # If the program registered it as a node of its own, its fields are not all that it consists of.
        if _decode(form, [part.tree for part in parts]) == tree:
            return form
    for number, part in enumerate(parts):
        if part.tree == tree and _is_made_of_the_same(part, tree):
            return ["argument", number, []]
    raise CannotSkipError(f"tree of the results: {type_name(kind)}")


def _decode(form: Any, parts: list[Any]) -> Any:
    if form is None:
        return _LEAF
    name, data, children = form
    if name == "argument":
        return parts[data]
    kind, data = (_named_tuple(*data), None) if name == "named" else (_BUILTIN[name], data)
    return _Tree.from_node_data_and_children(REGISTRY, (kind, data), [_decode(child, parts) for child in children])


def _is_made_of_the_same(part: Part, tree: Any) -> bool:
    """Return whether two equal trees hold the same objects: the program's ``__eq__`` may call different ones equal."""
    one, again, other = part.tree.node_data(), part.again.node_data(), tree.node_data()
    if None in (one, again, other):
        return one is again is other
    children = map(Part, part.tree.children(), part.again.children())
    return _is_same_data(one[1], again[1], other[1]) and all(map(_is_made_of_the_same, children, tree.children()))


def _is_same_data(one: Any, again: Any, other: Any) -> bool:
    kind = type(one)
    # A list of the program's is another one even if it holds the same, because the program may change one of them; one
    # that is made anew for each tree is not.
    if kind is type(again) is type(other) and (kind is tuple or (kind in (list, dict) and again is not one)):
        if kind is dict:
            one, again, other = ((*each, *each.values()) for each in (one, again, other))
        return len(one) == len(again) == len(other) and all(map(_is_same_data, one, again, other))
    if type(one) in (str, int, float, bool) and type(other) is type(one):
        return repr(one) == repr(other)
    return one is other


def _named_tuple(module: str, qualified: str, *fields: str) -> Any:
    kind = named(module, qualified)
    if not _is_named_tuple(kind):
        raise ValueError(f"no named tuple: {module}.{qualified}")
    if kind._fields != fields:
        raise CannotSkipError(f"tree of the results: other fields: {module}.{qualified}")
    return kind


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
