"""Tell whether dictionaries, functions, classes, closures and objects' classes have changed, without looking inside.

CPython gives a dictionary a new version with each change (PEP 509), and a function points to its code. Since 3.13 most
objects keep their attributes behind themselves. Reading these words takes microseconds for all of jax; asking each
object takes milliseconds. The words are read where this interpreter was seen to keep them. Where it keeps no version
(3.14), the values are compared.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xcache.hook.structure.encoding import are_same, dictionary_of, slots_of
from xcache.hook.structure.libraries import namespace

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = object.__basicsize__
_VERSION = _HEADER + _WORD
# CPython's flag of a class whose objects have room for attributes behind them, and the byte there that says whether the
# attributes are in it.
_INLINE, _VALID = 1 << 2, 3
# By the kind of an object, the attributes beside its dictionary that decide what it does. Of other objects without a
# dictionary the slots count, too.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"), types.CellType: ("cell_contents",), dict: (),
    type: ("__bases__",), types.ModuleType: ("__class__",), functools.partial: ("func", "args", "keywords"),
    object: ("__class__",),
}  # fmt: skip


class Marks:
    """The state of some modules, classes, dictionaries, functions, closures' cells, partials and other objects.

    It keeps all of these alive.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values, objects = values, collections.defaultdict[Any, list[Any]](list)
        bases = {kind: next(base for base in _ATTRIBUTES if issubclass(kind, base)) for kind in set(map(type, values))}
        for value in values:
            objects[bases[type(value)]].append(value)
        held = objects.pop(dict, [])
        objects[object] += [each for each in held if type(each) is not dict]
        holders = [*held, *objects[type], *objects[types.ModuleType]]
        dictionaries = [*held, *map(namespace, holders[len(held) :])]
        with_attributes = [each for each in objects[object] if dictionary_of(each) is not None]
        self._inline = [each for each in with_attributes if _is_inline(each)]
        self._with_attributes = [each for each in with_attributes if not _is_inline(each)]
        self._attributes = attributes = [*map(dictionary_of, self._with_attributes)]
        for value in objects[object]:
            if dictionary_of(value) is None:
                objects[type(value)].append(value)
        # Words of memory tell whether these have changed; all else is compared.
        versions, words = list[Any](), dict[Any, list[Any]]()
        if _has_versions(types.ModuleType) and all(map(_offsets, objects)):
            kind = types.SimpleNamespace if _has_inline_attributes() else _Plain
            versions, words = [*dictionaries, *(attributes if _has_versions(kind) else ())], objects
        self._memory, self._places, self._order = _places(versions, words, self._inline)
        self._in_words, self._holders = words, [*holders, *self._with_attributes][: len(versions)]
        self._compared = [*dictionaries, *attributes][len(versions) :], {} if words else objects
        self.take()

    def have_changed(self) -> bool:
        """Return whether any of them has changed since the state was taken."""
        (words_before, values_before), (words, values) = self._state, self._read()
        return words != words_before or not are_same(values, values_before)

    def take_anew(self) -> list[Any]:
        """Take the state as it is now; return what has changed since the state before, perhaps with more."""
        (words_before, values_before), order = self._state, self._order
        self.take()
        words, values = self._state
        if self._order is not order or not are_same(values, values_before):
            return [*self.values]
        differing = np.flatnonzero(np.frombuffer(words, np.uint64) != np.frombuffer(words_before, np.uint64))
        owners = self._owners()
        ids = {id(owners[order[at]]) for at in differing}
        return [value for value in self.values if id(value) in ids]

    def _owners(self) -> list[Any]:
        """Return the object to which each word belongs, in the order before the words were sorted."""
        owners = [*self._holders]
        for kind, some in self._in_words.items():
            owners += itertools.chain.from_iterable(map(itertools.repeat, some, itertools.repeat(len(_offsets(kind)))))
        for value in self._inline:
            start, end = _inline_attributes(value)
            owners += [value] * ((end - start) // _WORD)
        return owners

    def take(self) -> None:
        """Take the state as it is now, and keep what it points to: the address of what is gone may be used again."""
        now = [*map(dictionary_of, self._with_attributes)]
        if not (all(map(_is_inline, self._inline)) and are_same(now, self._attributes)):
            # The attributes of an object are elsewhere now.
            self.__init__(self.values)  # type: ignore[misc]
            return
        self._kept = [_parts_of(kind, some) for kind, some in self._in_words.items()]
        self._kept += [[*(dictionary_of(each) or {}).values()] for each in self._inline]
        self._state = self._read()

    def _read(self) -> tuple[bytes, list[Any]]:
        dictionaries, objects = self._compared
        # An object may get another dictionary.
        values = [*map(object.__getattribute__, self._with_attributes, itertools.repeat("__dict__"))]
        values += itertools.chain.from_iterable(map(dict.values, dictionaries))
        for kind, some in objects.items():
            values += _parts_of(kind, some)
        return self._memory.take(self._places).tobytes(), values


class Versions:
    """The versions of what some modules and classes have, and how many names each has.

    A dictionary keeps its names in the order in which they came, so that the new ones are the last.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        # Whether this interpreter keeps versions.
        self.are_told = _has_versions(types.ModuleType)
        held = [*map(namespace, holders)] if self.are_told else []
        self._memory, self._places, _ = _places(held, {})
        # In the order of the places.
        self._held = sorted(zip(held, holders, strict=bool(held)), key=lambda each: id(each[0]))
        self._versions, self._sizes = self._read(), [len(each) for each, _ in self._held]

    def changed(self) -> list[tuple[Any, list[Any]]]:
        """Return those that have changed, if only for a time, each with the values that came with new names.

        The list is empty where this interpreter keeps no versions.
        """
        found = []
        for at in np.flatnonzero(self._read() != self._versions):
            held, holder = self._held[at]
            found.append((holder, list(held.values())[self._sizes[at] :]))
        return found

    def _read(self) -> Any:
        return self._memory.take(self._places)


def _parts_of(kind: Any, values: Sequence[Any]) -> list[Any]:
    names = _ATTRIBUTES.get(kind) or [name for name, _ in slots_of(kind)]
    # The cell of a variable without a value has no content.
    parts = (map(getattr, values, itertools.repeat(name), itertools.repeat(None)) for name in names)
    return [*itertools.chain.from_iterable(parts)]


def _places(
    dictionaries: Sequence[Any], objects: Mapping[Any, Sequence[Any]], inline: Sequence[Any] = ()
) -> tuple[Any, Any, Any]:
    """Return a view of memory, the places in it of dictionaries' versions and objects' parts, and how these are sorted.

    Reading places in their order takes half the time.
    """
    found = [np.fromiter(map(id, dictionaries), np.int64) + _VERSION]
    for kind, some in objects.items():
        found.append(np.add.outer(np.fromiter(map(id, some), np.int64), np.array(_offsets(kind), np.int64)).ravel())
    found += [np.arange(start, end, _WORD) for start, end in map(_inline_attributes, inline)]
    places = np.concatenate(found)
    order = np.argsort(places)
    if not len(places):
        return np.empty(0, np.uint64), places, order
    places = places[order]
    low, high = int(places[0]), int(places[-1]) + _WORD
    # Of all memory in between only the words of living objects are read.
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(((high - low) // _WORD,), np.uint64, buffer=memory), (places - low) // _WORD, order


def _word(value: Any, offset: int) -> int:
    return ctypes.c_uint64.from_address(id(value) + offset).value


class _Plain:
    """An object as most are: it has a dictionary once somebody asks for that."""


@functools.cache
def _has_versions(kind: type) -> bool:
    """Return whether a word of the dictionary of such an object changes with its values, and with nothing else."""
    if _WORD != 8 or dict.__basicsize__ < _VERSION + _WORD:
        return False
    holder = kind("holder") if kind is types.ModuleType else kind()
    tried = vars(holder)
    seen = [_word(tried, _VERSION)]
    for change in (
        lambda: setattr(holder, "name", 1),
        lambda: tried.update(name=2),
        lambda: setattr(holder, "name", 3),
        lambda: exec("name = 4", tried),  # noqa: S102 - one of the ways in which programs change a module
        lambda: tried.pop("name"),
    ):
        change()
        seen.append(_word(tried, _VERSION))
        tried.get("name")
        if _word(tried, _VERSION) != seen[-1]:
            return False
    return len(set(seen)) == len(seen)


def _inline_attributes(value: Any) -> tuple[int, int]:
    """Return where an object's attributes begin and end: a word that has their number, and then each of them."""
    start = id(value) + type(value).__basicsize__
    return start, start + _WORD * (1 + ctypes.c_ubyte.from_address(start).value)


def _is_inline(value: Any) -> bool:
    """Return whether an object's attributes stand behind it; they leave it when there are more than it has room for."""
    if not (type(value).__flags__ & _INLINE and _has_inline_attributes()):
        return False
    return ctypes.c_ubyte.from_address(id(value) + type(value).__basicsize__ + _VALID).value == 1


@functools.cache
def _has_inline_attributes() -> bool:
    """Return whether attributes stand behind an object, in words that change with them and with their number."""
    if not _Plain.__flags__ & _INLINE or not hasattr(sys, "_is_gil_enabled"):  # since 3.13
        return False
    holder: Any = _Plain()
    holder.first, holder.second = parts = object(), object()

    def words() -> list[int]:
        start, end = _inline_attributes(holder)
        return [ctypes.c_uint64.from_address(place).value for place in range(start, end, _WORD)]

    seen = [words()]
    for change in (
        lambda: setattr(holder, "third", parts[0]),
        lambda: vars(holder).update(second=parts[0]),
        lambda: delattr(holder, "first"),
        lambda: setattr(holder, "__dict__", {}),
    ):
        change()
        seen.append(words())
    ids = [*map(id, parts)]
    return (
        [each[1:3] for each in seen[:3]] == [ids, ids, [ids[0], ids[0]]]
        and seen[1][3] == ids[0]
        and all(before != after for before, after in itertools.pairwise(seen))
        and ctypes.c_ubyte.from_address(_inline_attributes(holder)[0] + _VALID).value == 0
    )


@functools.cache
def _offsets(kind: Any) -> tuple[int, ...]:
    """Return where an object of a kind points to its parts; nothing if that cannot be told."""
    if kind not in _ATTRIBUTES:
        # The list of weak references to an object is no part of it.
        return tuple(at for at in range(_HEADER, kind.__basicsize__, _WORD) if at != kind.__weakrefoffset__)

    def function(_: Any = object(), *, name: Any = object()) -> Any:  # noqa: B008
        return name, kind

    class Derived(Marks):
        pass

    examples = {
        types.FunctionType: function, type: Derived, types.CellType: types.CellType(object()), object: object(),
        types.ModuleType: types.ModuleType("example"), functools.partial: functools.partial(function, object()),
    }  # fmt: skip
    example = examples[kind]
    found = [
        [at for at in range(_WORD, kind.__basicsize__, _WORD) if _word(example, at) == id(part)]
        for part in _parts_of(kind, [example])
    ]
    return tuple(itertools.chain.from_iterable(found)) if all(len(places) == 1 for places in found) else ()
