"""Tell whether dictionaries, functions, classes, closures and objects' classes have changed, without looking inside.

CPython gives a dictionary a new version with each change (PEP 509), and a function points to its code. Reading one word
of each takes microseconds for all of jax; asking each object takes milliseconds. The words are read where this
interpreter was seen to keep them. Where it keeps no version (3.14, and of attributes 3.13), the values are compared.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xcache.hook.structure.encoding import are_same, slots_of

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = object.__basicsize__
_VERSION = _HEADER + _WORD
# By the kind of an object, the attributes beside its dictionary that decide what it does; for other classes, the slots.
_ATTRIBUTES = {
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__"), type: ("__bases__",),
    types.CellType: ("cell_contents",), functools.partial: ("func", "args", "keywords"), object: ("__class__",),
}  # fmt: skip


class Marks:
    """The state of some dictionaries, each with what it belongs to, and of functions, classes, cells and objects.

    It keeps all of these alive.
    """

    def __init__(
        self,
        dictionaries: Mapping[Any, dict[Any, Any]],
        objects: Mapping[Any, Sequence[Any]],
        owners: Sequence[Any] = (),
    ) -> None:
        """``objects`` are listed by their kind; the ``owners`` have dictionaries."""
        self._dictionaries, self._objects, self._with_attributes = dictionaries, objects, owners
        attributes = {id(held): held for held in _dictionaries_of(owners)}
        # Words of memory tell whether these have changed; all else is compared.
        versions, words = dict[Any, Any](), dict[Any, Sequence[Any]]()
        if _has_versions(types.ModuleType) and all(map(_offsets, objects)):
            versions.update(dictionaries)
            words.update(objects)
            if _has_versions(_Plain):
                versions.update(attributes)
        self._memory, self._places, self._numbers = _places([*versions.values()], words)
        self._owners = _owners(versions, words)
        others = {owner: each for owner, each in {**dictionaries, **attributes}.items() if owner not in versions}
        self._compared = others, {} if words else objects
        self._state = self._read()

    @classmethod
    def joined(cls, some: Sequence[Marks]) -> Marks:
        """Return marks of all that some have."""
        dictionaries = {owner: held for each in some for owner, held in each._dictionaries.items()}
        owners = [held for each in some for held in each._with_attributes]
        objects: dict[Any, list[Any]] = collections.defaultdict(list)
        for kind, more in (item for each in some for item in each._objects.items()):
            objects[kind] += more
        return cls(dictionaries, objects, owners)

    def have_changed(self) -> bool:
        """Return whether any of them has changed."""
        words, values = self._read()
        return words != self._state[0] or not are_same(values, self._state[1])

    def take_changes(self) -> set[Any]:
        """Return the owners of dictionaries, and the ids of objects, that may have changed since the last call."""
        (words_before, values_before), self._state = self._state, self._read()
        words, values = self._state
        differ = np.frombuffer(words, np.uint64) != np.frombuffer(words_before, np.uint64)
        changed = {self._owners[at] for at in self._numbers[differ]}
        if not are_same(values, values_before):
            changed.update(_owners(*self._compared), map(id, self._with_attributes))
        return changed

    def _read(self) -> tuple[bytes, list[Any]]:
        dictionaries, objects = self._compared
        # An object may get another dictionary.
        values = [*_dictionaries_of(self._with_attributes)]
        values += itertools.chain.from_iterable(map(dict.values, dictionaries.values()))
        for kind, some in objects.items():
            values += itertools.chain.from_iterable(_parts_of(kind, each) for each in some)
        return self._memory.take(self._places).tobytes(), values


def _dictionaries_of(owners: Sequence[Any]) -> Iterator[dict[str, Any]]:
    return map(object.__getattribute__, owners, itertools.repeat("__dict__"))


def _owners(dictionaries: Mapping[Any, Any], objects: Mapping[Any, Sequence[Any]]) -> list[Any]:
    return [*dictionaries, *(id(each) for some in objects.values() for each in some)]


def _parts_of(kind: Any, value: Any) -> list[Any]:
    # The cell of a variable without a value has no content.
    return [getattr(value, name, None) for name in _ATTRIBUTES.get(kind) or slots_of(kind)]


def _places(dictionaries: Sequence[Any], objects: Mapping[Any, Sequence[Any]]) -> tuple[Any, Any, Any]:
    """Return a view of memory, the places in it of the versions of dictionaries and the parts of objects, and whose.

    The places are sorted, which halves the time that reading takes.
    """
    places = np.fromiter(map(id, dictionaries), np.int64) + _VERSION
    numbers, count = np.arange(len(dictionaries)), len(dictionaries)
    for kind, some in objects.items():
        parts = np.fromiter(map(id, some), np.int64)[:, None] + np.array(_offsets(kind), np.int64)
        places = np.concatenate([places, parts.ravel()])
        numbers = np.concatenate([numbers, np.repeat(np.arange(len(some)) + count, parts.shape[1])])
        count += len(some)
    if not len(places):
        return np.empty(0, np.uint64), places, numbers
    order = places.argsort()
    places = places[order]
    low, high = int(places[0]), int(places[-1]) + _WORD
    # Of all memory in between only the words of living objects are read.
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(((high - low) // _WORD,), np.uint64, buffer=memory), (places - low) // _WORD, numbers[order]


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
        functools.partial: functools.partial(function, object()),
    }  # fmt: skip
    example = examples[kind]
    found = [
        [at for at in range(_WORD, kind.__basicsize__, _WORD) if _word(example, at) == id(part)]
        for part in _parts_of(kind, example)
    ]
    return tuple(itertools.chain.from_iterable(found)) if all(len(places) == 1 for places in found) else ()
