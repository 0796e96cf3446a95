"""Tell whether dictionaries and functions have changed, without looking at what they hold.

CPython gives a dictionary a new version with each change (PEP 509), and a function points to its code. Reading one word
of each takes microseconds for all of jax; asking each object takes milliseconds. The words are read where this
interpreter was seen to keep them. Where it keeps no version (3.14), the values are compared.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xcache.hook.structure.encoding import are_same

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = object.__basicsize__
_VERSION = _HEADER + _WORD
# These attributes decide what a call of a function does.
_parts_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Marks:
    """The state of some dictionaries, each with what it belongs to, and functions, all of which it keeps alive."""

    def __init__(self, dictionaries: Mapping[Any, dict[Any, Any]], functions: Sequence[types.FunctionType]) -> None:
        self._dictionaries, self._functions = dictionaries, functions
        # The owner of each dictionary, and the id of each function.
        self._owners = [*dictionaries, *map(id, functions)]
        self._memory: Any = None
        if _has_versions() and _offsets():
            self._memory, self._places, self._numbers = _places([*dictionaries.values()], functions)
        self._state = self._read()

    @classmethod
    def joined(cls, some: Sequence[Marks]) -> Marks:
        """Return marks of all that some have."""
        functions = [function for each in some for function in each._functions]
        return cls({owner: held for each in some for owner, held in each._dictionaries.items()}, functions)

    def have_changed(self) -> bool:
        """Return whether any of them has changed."""
        now = self._read()
        return now != self._state if isinstance(now, bytes) else not all(map(are_same, now, self._state))

    def take_changes(self) -> set[Any]:
        """Return the owners of dictionaries, and the ids of functions, that changed since the last call."""
        before, self._state = self._state, self._read()
        now = self._state
        if isinstance(now, bytes):
            differ = np.frombuffer(now, np.uint64) != np.frombuffer(before, np.uint64)
            return {self._owners[at] for at in self._numbers[differ]}
        return {
            owner for owner, *parts in zip(self._owners, now, before, strict=True) if not are_same(parts[0], parts[1])
        }

    def _read(self) -> Any:
        if self._memory is not None:
            return self._memory.take(self._places).tobytes()
        return [*map(tuple, map(dict.values, self._dictionaries.values())), *map(_parts_of, self._functions)]


def _places(dictionaries: Sequence[Any], functions: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return a view of memory, the places in it of the versions of dictionaries and the parts of functions, and whose.

    The places are sorted, which halves the time that reading takes.
    """
    count, offsets = len(dictionaries), np.array(_offsets(), np.int64)
    versions = np.fromiter(map(id, dictionaries), np.int64) + _VERSION
    parts = np.fromiter(map(id, functions), np.int64)[:, None] + offsets
    places = np.concatenate([versions, parts.ravel()])
    numbers = np.concatenate([np.arange(count), np.repeat(np.arange(len(functions)), len(offsets)) + count])
    order = places.argsort()
    places = places[order]
    low, high = int(places[0]), int(places[-1]) + _WORD
    # Of all memory in between only the words of living objects are read.
    memory = (ctypes.c_char * (high - low)).from_address(low)
    return np.ndarray(((high - low) // _WORD,), np.uint64, buffer=memory), (places - low) // _WORD, numbers[order]


def _word(value: Any, offset: int) -> int:
    return ctypes.c_uint64.from_address(id(value) + offset).value


@functools.cache
def _has_versions() -> bool:
    """Return whether a word of each dictionary changes with its values, and with nothing else."""
    if _WORD != 8 or dict.__basicsize__ < _VERSION + _WORD:
        return False
    holder = types.ModuleType("holder")
    tried = vars(holder)
    seen = [_word(tried, _VERSION)]
    for change in (
        lambda: setattr(holder, "name", 1),
        lambda: tried.update(name=2),
        lambda: exec("name = 3", tried),  # noqa: S102 - one of the ways in which programs change a module
        lambda: tried.pop("name"),
    ):
        change()
        seen.append(_word(tried, _VERSION))
        tried.get("name")
        if _word(tried, _VERSION) != seen[-1]:
            return False
    return len(set(seen)) == len(seen)


@functools.cache
def _offsets() -> tuple[int, ...]:
    """Return where a function points to its code and defaults; nothing if that cannot be told."""

    def function(_: Any = object(), *, name: Any = object()) -> None:  # noqa: B008
        del name

    found = [
        [at for at in range(_HEADER, type(function).__basicsize__, _WORD) if _word(function, at) == id(part)]
        for part in _parts_of(function)
    ]
    return tuple(itertools.chain.from_iterable(found)) if all(len(places) == 1 for places in found) else ()
