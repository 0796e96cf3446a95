"""The encoder: a table of types, each with the function that writes its values.

The encoding is injective: each piece says what it is and where it ends. An unknown type raises CannotSkipError, so a
mistake in the table costs a skipped lowering and never a wrong program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

_Handler = TypeVar("_Handler", bound=Callable[["Encoding", Any], None])


class CannotSkipError(Exception):
    """Lowering or tracing cannot be skipped. The reason is its kind and, after a colon, the part concerned."""

    @property
    def kind(self) -> str:
        """The kind of the reason, which names nothing of the program's."""
        return str(self).partition(":")[0]

    @property
    def where(self) -> str | None:
        """The primitive and parameter in which it was found, if any: the innermost of those that were noted."""
        return next(iter(getattr(self, "__notes__", ())), None)


# Each type's function, as modules register it, and those of whole families of types.
HANDLERS: dict[type, Callable[[Encoding, Any], None]] = {}
_families: dict[type, Callable[[Encoding, Any], None]] = {}
# The functions of families for types that are not in the table.
_found: dict[type, Callable[[Encoding, Any], None]] = {}


def encodes(*types: Any) -> Callable[[_Handler], _Handler]:
    """Register the function that encodes values of exactly these types; this version of jax may lack one (None)."""
    return functools.partial(_register, HANDLERS, types)


def encodes_kinds_of(*bases: Any) -> Callable[[_Handler], _Handler]:
    """Register the function for instances of these classes; the table, and what was registered before, come first."""
    return functools.partial(_register, _families, bases)


def _register(table: dict[type, Any], types: Iterable[type], handler: _Handler) -> _Handler:
    table.update(dict.fromkeys(types, handler))
    table.pop(None, None)  # type: ignore[call-overload]
    return handler


def check_honest(kind: Any) -> None:
    """Raise CannotSkipError if a class may say that it is another one, so that no table tells what it is."""
    meta: Any = type(kind)
    if meta.__eq__ is not type.__eq__ or meta.__hash__ is not type.__hash__:
        raise CannotSkipError("class that compares as it likes")


def type_name(kind: Any) -> str:
    """Return the full name of a class, or of a function."""
    return f"{kind.__module__}.{kind.__qualname__}"


def text(value: str) -> bytes:
    """Return a string's encoding."""
    content = value.encode("utf-8", "surrogatepass")
    return b"s%d:%b" % (len(content), content)


def tagged(tag: bytes, content: bytes) -> bytes:
    """Return bytes with a tag and their length."""
    return b"%b%d:%b" % (tag, len(content), content)


class Encoding:
    """The encoding of one program.

    Jaxprs and constants are numbered in the order in which they are met, because jax lowers each *object* to one
    function or constant: ``f(x) + f(x)`` gives another program than two equal functions do.
    """

    # Whether values may be written as tokens; otherwise each stands in its place.
    has_tokens = True

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.write = self._parts.append
        self._numbers: dict[int, int] = {}
        self._tokens: dict[int, bytes] = {}
        # Objects whose ids are in use here.
        self._kept: list[Any] = []
        # How deep this is within Pallas kernels, which embed names and locations.
        self.kernels = 0
        # All arrays among the constants, and constants that the program can change in place.
        self.constants: list[Any] = []
        self.changeable: list[Any] = []

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Encode the values within as parts of a kernel, with their names; tokens made outside do not hold those."""
        outer, self._tokens = self._tokens, {}
        self.kernels += 1
        try:
            yield
        finally:
            self.kernels -= 1
            self._tokens = outer

    @property
    def has_met_objects(self) -> bool:
        """Whether objects were numbered."""
        return bool(self._numbers)

    def digest(self) -> str:
        """Return the digest of all that was written."""
        return hashlib.sha256(b"".join(self._parts)).hexdigest()

    def encode(self, value: Any) -> None:
        """Write a value; raise CannotSkipError if its type is unknown."""
        kind = type(value)
        check_honest(kind)
        handler = HANDLERS.get(kind) or _found.get(kind)
        if handler is None:
            handler = next(handler for base, handler in _families.items() if isinstance(value, base))
            handler(self, value)
            # Only now, because types of the program's own are not to be kept.
            _found[kind] = handler
        else:
            handler(self, value)

    def encode_all(self, values: Iterable[Any]) -> None:
        """Write the values in order, after their number."""
        values = tuple(values)
        self.write(b"(%d" % len(values))
        for value in values:
            self.encode(value)

    def met_before(self, tag: bytes, value: Any) -> bool:
        """Write an object's number; return whether the object was met before, so that its number says it all."""
        number = self._numbers.get(id(value))
        if number is not None:
            self.write(b"%b^%d;" % (tag, number))
            return True
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        self.write(tag + b"#")
        return False

    def write_token(self, value: Any, handler: Callable[[Encoding, Any], None]) -> None:
        """Write a short token of a value's content, made once for each object; equal values have the same.

        They must not be numbered: jax's weak caches decide whether two equal ones are one object.
        """
        token = self._tokens.get(id(value))
        if token is None:
            content = self.apart(value, handler)
            token = self._tokens[id(value)] = b"@" + hashlib.blake2b(content, digest_size=20).digest()
            self._kept.append(value)
        self.write(token)

    def write_unordered(self, values: Iterable[Any], write: Callable[[Any, Any], None] | None = None) -> None:
        """Write values whose order means nothing, each with a function (``encode`` if there is none)."""
        contents = sorted(self.apart(value, write or type(self).encode) for value in values)
        self.write(b"E%d" % len(contents))
        for content in contents:
            self.write(tagged(b"e", content))

    def apart(self, value: Any, handler: Callable[[Encoding, Any], None]) -> bytes:
        """Return the encoding of a value by itself; raise CannotSkipError if it depends on what was met before."""
        outer, count = self._parts, len(self._numbers)
        self._parts = []
        self.write = self._parts.append
        try:
            handler(self, value)
            content = b"".join(self._parts)
        finally:
            self._parts, self.write = outer, outer.append
        if len(self._numbers) != count:
            raise CannotSkipError(f"shared object: {type(value).__name__}")
        return content


def check_attributes(value: Any, known: frozenset[str]) -> None:
    """Raise CannotSkipError if an object has attributes beyond these: a later jax may have added one that counts."""
    names, memos = attributes_of_class(type(value))  # type: ignore[arg-type] # a type is hashable
    if others := (names | getattr(value, "__dict__", {}).keys()) - memos - known:
        raise CannotSkipError(f"unknown attribute: {type_name(type(value))}.{min(others)}")


@functools.cache
def attributes_of_class(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a class gives its instances in slots or in C++, and those of its cached properties."""
    names, memos = {name for name, _ in slots_of(kind)}, {"__weakref__", "__dict__"}
    for base in kind.__mro__[:-1]:
        memos.update(name for name, held in vars(base).items() if isinstance(held, functools.cached_property))
        if type(base).__name__.startswith("nb_type"):
            names.update(name for name, held in vars(base).items() if not callable(held) and not name.startswith("__"))
    return frozenset(names), frozenset(memos)


@functools.cache
def slots_of(kind: Any) -> list[tuple[str, Any]]:
    """Return the slots of a class's instances, each with its name; a class may have one of the same name as its base.

    A class of C's without ``__slots__`` has members of which an object's items tell, or which are addresses.
    """
    bases = [vars(base) for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return [item for names in bases for item in names.items() if type(item[1]) is types.MemberDescriptorType]


def dictionary_of(value: Any) -> dict[str, Any] | None:
    """Return the dictionary of an object's attributes; a generic alias, if asked, would give its class's."""
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def attributes_of(value: Any, slots: Callable[[Any], list[tuple[str, Any]]] = slots_of) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes as Python keeps them, in the order in which they were set: a class may hide some."""
    yield from (dictionary_of(value) or {}).copy().items()
    for name, slot in slots(type(value)):
        with contextlib.suppress(AttributeError):
            yield name, slot.__get__(value)


def are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects: a wrapper may say that it equals the function in it."""
    return len(these) == len(those) and all(map(operator.is_, these, those))
