"""The signed form of an entry, in which it leaves the machine with all that is known of it.

    signed header (signed_header.py) | payload | program

The header names the key, the namespace, and the digests and sizes of the payload and the program, so that a signature
of it covers every byte, and nothing can be altered, left out, or passed off as something else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xcache.errors import DamagedError, ProtocolError
from xcache.wire import framing, protocol, signed_header
from xcache.wire.bounded import Shape
from xcache.wire.hashing import digest, is_digest
from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys

# The fields of a Put that say what to do with it, and its contents.
_LEFT_OUT: dict[str, Any] = {"overwrite": False, "payload": None, "program": None}
_FIELDS = tuple(name for name in protocol.Put._fields if name not in _LEFT_OUT)
# The header holds no more than a Put, which fits into a frame: an array with two maps, components and details.
_CONTAINERS = 3
_KIND = signed_header.Kind(
    "parcel", b"xcparcel", 1, protocol.MAX_FRAME, Shape(len(_FIELDS) + 4, protocol.MAX_FIELDS, _CONTAINERS)
)
_LARGEST = 2**53
_LONGEST_CODEC, _LONGEST_NAMESPACE = 32, 200

# Nearly every header ends within so many bytes of an object.
FEW_BYTES = 16 * 1024

Content = bytes | memoryview


class Label(NamedTuple):
    """The header of a parcel: its facts, and whether they count here."""

    put: protocol.Put
    # Bytes of the whole parcel.
    size: int
    # The key that should have signed it; empty if none is named.
    key_id: str
    # Why it would not be loaded here, whatever follows the header; empty if it would be.
    why_not: str


class Parcel(NamedTuple):
    """An entry from elsewhere. The contents are parts of what came, and are not copied."""

    put: protocol.Put
    payload: memoryview
    # None if the writer kept it back.
    program: memoryview | None
    writer: str
    # When it was stored there, by the writer's clock: the same entry makes the same bytes.
    stored_at: float
    # The key whose signature was checked; empty if none was.
    key_id: str


def pack(
    put: protocol.Put,
    payload: Content,
    program: Content | None,
    *,
    namespace: str,
    writer: str,
    stored_at: float,
    signer: PrivateKey | None,
) -> bytes:
    """Return the parcel of an entry; raise DamagedError rather than sign contents that are not what they should be."""
    put = put._replace(**_LEFT_OUT)
    _check(put, namespace, writer, stored_at)
    _check_contents(put, payload, program)
    values = [getattr(put, name) for name in _FIELDS]
    header = signed_header.written(_KIND, [namespace, writer, float(stored_at), program is not None, *values], signer)
    return b"".join((header, payload, program or b""))


def unpack(
    content: Content,
    key: str,
    namespace: str,
    trusted: TrustedKeys,
    now: float,
    most: int,
    *,
    trust_unsigned: bool = False,
) -> Parcel:
    """Return the entry of this key and namespace in a parcel of at most ``most`` bytes.

    Raise SignatureError unless a key signed it that is trusted now, and DamagedError if it is not as it was packed.
    ``trust_unsigned`` is for tiers whose writers are all trusted: no signature is needed, nor the key of one. A bad
    signature and a key that is no longer trusted are refused all the same.
    """
    view = memoryview(content)
    if len(view) > most:
        raise DamagedError(f"its {len(view)} bytes are more than the {most} that are accepted")
    key_id, values, rest = signed_header.read(_KIND, view, trusted, now, trust_unsigned=trust_unsigned)
    writer, stored_at, has_program, put = _read(values, key, namespace)
    size = put.stored_size + put.program_stored_size * has_program
    if len(rest) != size:
        raise DamagedError(f"its contents have {len(rest)} bytes, not {size}")
    payload, program = rest[: put.stored_size], rest[put.stored_size :] if has_program else None
    _check_contents(put, payload, program)
    return Parcel(put, payload, program, writer, stored_at, key_id)


def label(
    beginning: Content, key: str, namespace: str, trusted: TrustedKeys, now: float, *, trust_unsigned: bool = False
) -> Label:
    """Return what the beginning of a parcel says of it, whoever signed it.

    Raise DamagedError if that cannot be the beginning of the parcel of this key and namespace.
    """
    view = memoryview(beginning)
    why_not, values = signed_header.shown(_KIND, view, trusted, now, trust_unsigned=trust_unsigned)
    _, _, has_program, put = _read(values, key, namespace)
    size = label_bytes(view) + put.stored_size + put.program_stored_size * has_program
    return Label(put, size, signed_header.signer_of(view), why_not)


def label_bytes(beginning: Content) -> int:
    """Return how many bytes of a parcel ``label`` needs; raise DamagedError if this is no parcel's beginning."""
    return signed_header.bytes_before_contents(_KIND, memoryview(beginning))


def _read(values: list[Any], key: str, namespace: str) -> tuple[str, float, bool, protocol.Put]:
    """Return the writer, the time, whether a program follows, and the fields of the Put."""
    if len(values) != len(_FIELDS) + 4:
        raise DamagedError("its header is malformed")
    found, writer, stored_at, has_program, *fields = values
    if type(has_program) is not bool:
        raise DamagedError("its header is malformed")
    put = protocol.Put(**dict(zip(_FIELDS, fields, strict=True)), **_LEFT_OUT)
    _check(put, found, writer, stored_at)
    if put.key != key:
        raise DamagedError("it belongs to another key")
    if found != namespace:
        raise DamagedError(f"it belongs to the namespace {found!r}, not to {namespace!r}")
    return writer, stored_at, has_program, put


def _check(put: protocol.Put, namespace: object, writer: object, stored_at: object) -> None:
    """Raise DamagedError unless every field is of the right type and within its bounds."""
    try:
        framing.check(put)
    except ProtocolError as error:
        raise DamagedError(str(error)) from None
    for text, most in ((namespace, _LONGEST_NAMESPACE), (writer, protocol.MAX_NAME), (put.codec, _LONGEST_CODEC)):
        if type(text) is not str or len(text) > most:
            raise DamagedError("a name in its header is too long")
    named = (put.key, put.digest, put.program_digest, put.program_stored_digest, *put.components.values())
    if not all(map(is_digest, named)):
        raise DamagedError("something in its header is not a digest")
    if not set(put.components) >= set(protocol.DESCRIBED_COMPONENTS) or not set(put.details) <= set(put.components):
        raise DamagedError("a component of its key is missing")
    if len(put.components) > protocol.MAX_FIELDS:
        raise DamagedError("its key has too many components")
    numbers = (put.raw_size, put.stored_size, put.program_raw_size, put.program_stored_size, put.compile_seconds)
    # Neither is true of a NaN.
    if not all(0 <= number <= _LARGEST for number in numbers):
        raise DamagedError("a size or time in its header is out of range")
    if type(stored_at) is not float or not 0 <= stored_at <= _LARGEST:
        raise DamagedError("its time is out of range")


def _check_contents(put: protocol.Put, payload: Content, program: Content | None) -> None:
    if len(payload) != put.stored_size or digest(payload) != put.digest:
        raise DamagedError("the digest of its executable differs")
    if program is None:
        return
    if len(program) != put.program_stored_size or digest(program) != put.program_stored_digest:
        raise DamagedError("the digest of its program differs")
