"""One object that says what a program wanted when it ran elsewhere, with its entries: a fresh machine starts warm.

The object is a sequence of parts, each after its length. Each part is of one signer and one toolchain, and whoever
adds a part leaves the others as they are:

    signed header (signed_header.py) | parcels of the entries, one after the other

The header has the history, the aliases of its programs, and the keys and sizes of the parcels, which are signed
themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from xcache.errors import DamagedError
from xcache.wire import parcel, protocol, signed_header
from xcache.wire.bounded import Shape
from xcache.wire.checks import alias_of, is_sound
from xcache.wire.hashing import is_digest
from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys

_LENGTH = struct.Struct(">Q")
_MOST_PARTS = 4
_FIELDS = 7
_MOST_HEADER = 8 * 1024**2
# A history may have as many items; an alias has four fields, an item five.
# An array or map for each item, alias and parcel, and those around them.
_MOST_CONTAINERS = 3 * protocol.MAX_WANTED + 6
_KIND = signed_header.Kind(
    "run", b"xcachrun", 1, _MOST_HEADER, Shape(protocol.MAX_WANTED, protocol.MAX_DICTIONARY, _MOST_CONTAINERS)
)


class Run(NamedTuple):
    """One part: what a program wanted, the aliases, and the parcels of entries by key."""

    history: protocol.Remember
    aliases: list[protocol.Alias]
    parcels: dict[str, parcel.Content]
    # The digest of the toolchain that made the entries.
    toolchain: str


class Found(NamedTuple):
    """A part that came from a tier, and the id of the key that signed it; empty if no signature was checked."""

    run: Run
    key_id: str
    # As it came.
    part: parcel.Content


def pack(run: Run, *, namespace: str, signer: PrivateKey | None) -> bytes:
    """Return a part."""
    history = run.history
    sizes = [[key, len(content)] for key, content in run.parcels.items()]
    values: list[Any] = [
        *(namespace, history.program, history.arguments, run.toolchain),
        *([history.items, history.options], [[*alias] for alias in run.aliases], sizes),
    ]
    return b"".join((signed_header.written(_KIND, values, signer), *run.parcels.values()))


def joined(parts: Iterable[parcel.Content]) -> bytes:
    """Return the object of these parts, the newest first; those that are too many are left out."""
    some = [*parts][:_MOST_PARTS]
    return b"".join(each for part in some for each in (_LENGTH.pack(len(part)), part))


def parts_of(content: parcel.Content) -> list[memoryview]:
    """Return the parts of an object; raise DamagedError if there can be no such parts."""
    view = memoryview(content)
    parts: list[memoryview] = []
    while view:
        if len(view) < _LENGTH.size or len(parts) == _MOST_PARTS:
            raise DamagedError("it is cut off, or has too many parts")
        (size,) = _LENGTH.unpack_from(view)
        view = view[_LENGTH.size :]
        if size > len(view):
            raise DamagedError("it is cut off")
        parts.append(view[:size])
        view = view[size:]
    return parts


def unpack(
    part: parcel.Content,
    wanted: protocol.Predict | None,
    namespace: str,
    trusted: TrustedKeys,
    now: float,
    *,
    trust_unsigned: bool = False,
) -> Found:
    """Return what a part says of a program (None: of any); raise as ``parcel.unpack`` does."""
    key_id, values, rest = signed_header.read(_KIND, memoryview(part), trusted, now, trust_unsigned=trust_unsigned)
    if len(values) != _FIELDS:
        raise DamagedError("its header is malformed")
    said, program, arguments, toolchain, listed, aliases, sizes = values
    if said != namespace:
        raise DamagedError(f"it belongs to the namespace {said!r:.100}, not to {namespace!r}")
    if wanted not in (None, (program, arguments)):
        raise DamagedError("it belongs to another program")
    try:
        items, options = listed
        history = protocol.Remember(program, arguments, items, options)
        if not is_sound(history) or not is_digest(toolchain) or len(aliases) > protocol.MAX_WANTED:
            raise ValueError(program)
        found = [alias_of(fields) for fields in aliases]
        parcels: dict[str, parcel.Content] = dict(_cut(rest, sizes))
    except (TypeError, ValueError, AttributeError, KeyError):
        raise DamagedError("its header is malformed") from None
    return Found(Run(history, [alias for alias in found if alias is not None], parcels, toolchain), key_id, part)


def is_worth_a_part(run: Run, others: Sequence[Found]) -> bool:
    """Return whether no other part says the same."""
    keys, structures = {*run.parcels}, {alias.structure for alias in run.aliases}
    return not any(
        [item["key"] for item in other.run.history.items] == [item["key"] for item in run.history.items]
        and keys <= {*other.run.parcels}
        and structures <= {alias.structure for alias in other.run.aliases}
        for other in others
    )


def _cut(rest: memoryview, sizes: Any) -> Iterable[tuple[str, memoryview]]:
    for key, size in sizes:
        if not is_digest(key) or type(size) is not int or not 0 <= size <= len(rest):
            raise DamagedError("its header is malformed")
        yield key, rest[:size]
        rest = rest[size:]
    if rest:
        raise DamagedError("more follows than its header says")
