"""Keep the description of jax's code as it is in this process, and notice when that has changed.

It is made of the content of all that a program's lowering can reach, so that two processes have one digest only if
lowering does the same in both. Where that is code that is not jax's, programs are lowered.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax._src import util

from xcache.hook.structure import reach
from xcache.hook.structure.beginning import Beginning
from xcache.hook.structure.encoding import CannotSkipError, dictionary_of
from xcache.hook.structure.libraries import is_of_a_library, is_of_jax, original_of
from xcache.hook.structure.marks import Marks
from xcache.hook.structure.reach import Reach

_LOWERING = "jax._src.interpreters.mlir"
# They hand modules on, and have the classes of objects that C++ makes.
_WHOLE = ("jax._src.interpreters.pxla", "jaxlib.mlir._mlir_libs._mlir.ir")
# The content of something under names of any type.
_Part = dict[Any, Any]


class Pristine:
    """The descriptions of jax's code in this process."""

    def __init__(self) -> None:
        # Held while code is described: a thread that waits finds the work done.
        self._lock = threading.RLock()
        # The generation of jax's caches in which its code was changed: they may hold what other code has traced.
        self._changed_in: object = None
        self._change = ""
        self._beginning: Beginning | None = None
        self._has_looked = False
        self._forget()

    def _forget(self) -> None:
        reach.forget_state()
        # Another object after each change.
        self.state = object()
        # The state of all that descriptions depend on: as a whole, or only on a part of it.
        self._whole: list[Marks] = []
        self._partly = [Marks([sys.modules])]
        # By id: something of which only a part was read, and each part by the function that reads it.
        self._read: dict[int, dict[Callable[[Any], _Part], _Part]] = {}
        self._note(sys.modules, self._foreign_imports, {})
        # The parts of modules by their names.
        self._of_modules: dict[str, _Part] = {}
        # All tables by id, all keys by which they are asked, and all names that code reads.
        self._tables: dict[int, _Part] = {}
        self._keys: set[Any] = set()
        self._names: set[str] = set()
        # jax's modules that code may import, as they were at the last look; nothing before the first.
        self._importable: dict[str, list[types.ModuleType]] = {}
        self._base_digest = b""
        # Descriptions, or the reasons why there are none, as texts: an exception would hold the frames in which it
        # was raised, with all that the program has there. The key has the ids of all that was described, or only looked
        # at.
        self._described: dict[Any, Any] = {}
        # The ids of modules in which only jax's own code was found.
        self._looked_at: set[int] = set()
        self._kept: list[Any] = []
        # The tokens of primitives that were made of these; the same primitive may be in a kernel or not.
        self.tokens: dict[tuple[Any, bool], bytes] = {}
        # Encodings of abstract arrays by id and whether it is in a kernel, with the attributes of which they were made.
        self.avals: dict[tuple[int, bool], tuple[weakref.ref[Any], Any, bytes]] = {}

    def watch(self, beginning: Beginning | None) -> None:
        """Notice what is changed in jax before the program meets it, and refuse what was changed already."""
        if beginning is not None:
            if change := beginning.change():
                self._note_change(change)
            beginning.see_all()
        self._beginning = beginning

    def begin_in_child(self) -> None:
        """Forget all in a forked child if another thread of the parent was changing it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self.__init__()  # type: ignore[misc] # it is as new

    def refresh(self) -> None:
        """Forget what has changed since the last call."""
        self._has_looked = False
        if any(marks.have_changed() for marks in (*self._whole, *self._partly)):
            with self._lock:
                changed = [marks for marks in self._partly if marks.have_changed()]
                # The modules that imports bring are read last.
                values = [value for marks in reversed(changed) for value in marks.take_anew()]
                change = next(filter(None, map(self._change_of, values)), "")
                if not change and self._beginning is not None:
                    # It may have been put back, and jax may have traced meanwhile.
                    change = self._beginning.change()
                if change or any(marks.have_changed() for marks in self._whole):
                    self._note_change(change or "a function")

    def _note_change(self, change: str) -> None:
        """Describe nothing until jax's caches are cleared: they may hold what other code has traced."""
        self._changed_in, self._change = _generation(), change
        if self._beginning is not None:
            self._beginning.see_all()
        self._forget()

    def digest(self, modules: Sequence[str] = ()) -> bytes:
        """Return the digest of the code that lowers any program, and of all that these modules have.

        ``refresh`` must have been called and, where there are modules, ``check`` for all that jax has imported. Raise
        CannotSkipError if that code is not jax's own.
        """
        self.check_change()
        self._reach_of_lowering()
        return self._base_digest + (self.describe(*(sys.modules[name] for name in modules)) if modules else b"")

    def check_change(self) -> None:
        """Raise CannotSkipError if jax's caches may hold what other code has traced."""
        if self._changed_in is not None and self._changed_in is _generation():
            raise CannotSkipError(f"code of jax changed while it was in use: {self._change}")

    def _look_back(self) -> None:
        """Look, once for each program, whether something that it is the first to meet was changed before."""
        if self._beginning is not None and not self._has_looked:
            with self._lock:
                self._has_looked = True
                if change := self._beginning.change():
                    self._note_change(change)
        self.check_change()

    def describe(self, *values: Any) -> bytes:
        """Return the digest of objects in a program, or of modules with all they have, and of what they lead to."""
        key = tuple(map(id, values))
        if key not in self._described:
            self._look_back()
        made: bytes = self._once(key, self._digest_of, values)
        return made

    def check(self, *names: str) -> None:
        """Raise CannotSkipError if one of these modules of jax's, as far as they are imported, holds foreign code."""
        modules = [each for each in map(sys.modules.get, names) if isinstance(each, types.ModuleType)]
        if new := [each for each in modules if id(each) not in self._looked_at]:
            self._once(("look at", *map(id, new)), self._look_at, new)

    def _once(self, key: Any, make: Callable[[Any], Any], argument: Any) -> Any:
        """Return what is made of an argument, or raise the CannotSkipError that was the result, always the same."""
        known = self._described.get(key)
        if known is None:
            with self._lock:
                known = self._described.get(key)
                if known is None:
                    try:
                        known = make(argument)
                    except CannotSkipError as reason:
                        known = str(reason)
                    self._described[key] = known
                    self._kept.append(argument)
        if isinstance(known, str):
            raise CannotSkipError(known)
        return known

    def _reach_of_lowering(self) -> Reach:
        if () not in self._described:
            self._look_back()
        made: Reach = self._once((), self._made_of_lowering, None)
        return made

    def _made_of_lowering(self, _: Any) -> Reach:
        with self._watching(Reach(is_complete=False)) as made:
            made.write(original_of(vars(sys.modules[_LOWERING])["lower_jaxpr_to_module"]))
            made.write_modules(sys.modules[name] for name in _WHOLE)
            made.follow()
            self._check_imports(made.names, made)
            self._base_digest = made.digest()
        return made

    def _digest_of(self, values: tuple[Any, ...]) -> bytes:
        are_modules = type(values[0]) is types.ModuleType
        with self._watching(Reach(is_complete=not are_modules)) as made:
            if are_modules:
                made.write_modules(values)
            else:
                for value in values:
                    made.write(value)
            base = self._reach_of_lowering()
            made.follow(base)
            if not are_modules:
                self._check_imports(made.names, base)
            return made.digest()

    def _check_imports(self, names: set[str], base: Reach) -> None:
        """Raise CannotSkipError unless modules that code with these names may import are jax's own, where imported.

        Code imports them while it runs. Whether they are imported yet must not count.
        """
        self._importable = self._importable or reach.importable()
        if not self._importable.keys().isdisjoint(names):
            with self._watching(Reach(is_complete=False)) as made:
                made.names |= names
                made.follow(base, self._importable)

    def _look_at(self, modules: Sequence[types.ModuleType]) -> bool:
        with self._watching(Reach(is_complete=False)) as made:
            if isinstance(base := self._described.get(()), Reach):
                made.leave_out(base)
            made.write_modules(modules)
        # Under the lock: a change that is noticed meanwhile must not leave them looked at.
        self._looked_at.update(map(id, modules))
        return True

    @contextlib.contextmanager
    def _watching(self, made: Reach) -> Iterator[Reach]:
        """Have changes of what is read for a description noticed, whether it can be made or not."""
        try:
            yield made
        finally:
            self._watch(made)

    def _watch(self, made: Reach) -> None:
        """Notice changes of what a description depends on."""
        self._names |= made.names
        new = [key for key in made.keys if key not in self._keys]
        self._keys.update(new)
        # More keys may have been met; what the others had when they were is what counts.
        for number, table in self._tables.items():
            entries = self._read[number][self._entries_of]
            entries.update((key, table[key]) for key in new if key in table and key not in entries)
        for _, table in made.tables:
            if id(table) not in self._tables:
                self._tables[id(table)] = table
                self._read.setdefault(id(table), {})[self._entries_of] = self._entries_of(table)
        for value, read in made.objects:
            self._note(value, read, read(value))
            self._note(value, _place_of, _place_of(value))
        values = [table for _, table in made.tables] + [value for value, _ in made.objects]
        values += [kind for kind, _ in made.classes.values() if id(kind) not in self._read]
        for kind, content in made.classes.values():
            self._note(kind, _of_class, {None: kind.__bases__, **content})
        for name, names in made.read.items():
            if name not in self._of_modules:
                values.append(module := sys.modules[name])
                before = self._of_modules[name] = {None: type(module)}
                self._note(module, functools.partial(self._of_module, {*vars(module)}, before), before)
            self._of_modules[name].update(names)
        _add(self._whole, [*made.functions, *made.fixed])
        _add(self._partly, values)

    def _note(self, value: Any, read: Callable[[Any], _Part], part: _Part) -> None:
        self._read.setdefault(id(value), {}).setdefault(read, part)

    def _change_of(self, value: Any) -> str:
        """Return where something differs from what was read of it, or nothing; a part has no more than was read."""
        for read, before in self._read[id(value)].items():
            now = read(value)
            # xcache's own functions may have come in the place of jax's, or left it.
            for name in [*before, *now]:
                if original_of(before.get(name, self)) is not original_of(now.get(name, self)):
                    return f"{getattr(value, '__name__', type(value).__name__)}.{name}"
        return ""

    def _foreign_imports(self, _: Any) -> _Part:
        """Return why a module that was imported since is not jax's own, or nothing."""
        if not self._importable:
            return {}
        before, self._importable = self._importable, reach.importable()
        known = {*map(id, itertools.chain.from_iterable(before.values()))}
        names = self._importable.keys() & self._names
        try:
            if any(id(module) not in known for name in names for module in self._importable[name]):
                self._check_imports(self._names, self._reach_of_lowering())
        except CannotSkipError as reason:
            return {None: reason}
        return {}

    def _of_module(self, known: set[str], before: _Part, module: types.ModuleType) -> _Part:
        """Return what was read of a module, and what it has under other names that code reads, if it is new."""
        names = vars(module)
        new = [name for name in self._names & (names.keys() - known) if not reach.is_late(module, name)]
        if not is_of_jax(module.__name__):
            # Python and its libraries put names in their modules at any time.
            new = []
        return {**{name: names.get(name, self) for name in (*before, *new)}, None: type(module)}

    def _entries_of(self, table: _Part) -> _Part:
        """Return the entries of a table that count: those for keys that were met, and for libraries'."""
        return {
            key: entry
            for key, entry in table.copy().items()
            if key in self._keys or (isinstance(key, type) and is_of_a_library(key.__module__))
        }


def _add(marks: list[Marks], values: list[Any]) -> None:
    """Add the state of values; the states of few are joined, so that looking at all of them stays short."""
    while values and len(marks) > 1 and len(marks[-1].values) < 2 * len(values) and not marks[-1].have_changed():
        values = [*marks.pop().values, *values]
    if values:
        marks.append(Marks(values))


def _place_of(value: Any) -> _Part:
    return {"class": type(value), "dictionary": dictionary_of(value)}


def _of_class(kind: type) -> _Part:
    return {None: kind.__bases__, **reach.content_of(kind)}


@util.cache(max_size=1, trace_context_in_key=False)  # type: ignore[untyped-decorator]
def _generation() -> object:
    """Return an object that is another one since ``jax.clear_caches``."""
    return object()


pristine = Pristine()
os.register_at_fork(after_in_child=pristine.begin_in_child)
