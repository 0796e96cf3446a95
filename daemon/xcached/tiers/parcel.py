"""What leaves the machine: an entry with all that is known of it, signed.

    magic (8) | version (1) | signed or not (1) | bytes of the header (4) | header | key id (8) | signature (64)
    | payload | program

The header is a zstd frame of a msgpack array. It names the key, the namespace, and the digests and sizes of the payload
and the program, so that a signature of it covers every byte, and nothing can be altered, left out, or passed off as
something else. The signature is checked before anything of the header is read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import zstandard

from xcache.errors import DamagedError, ProtocolError, SignatureError
from xcache.wire import framing, protocol
from xcache.wire.hashing import digest, is_digest
from xcache.wire.signatures import ID_BYTES, SIGNATURE_BYTES, PrivateKey, sign, verify
from xcache.wire.trusted_keys import TrustedKeys

_START = struct.Struct(">8sBBI")
_MAGIC, _VERSION = b"xcparcel", 1
_UNSIGNED, _SIGNED = 0, 1
_DOMAIN = b"xcache parcel"
# It holds no more than a Put, which fits into a frame.
_MOST_HEADER = protocol.MAX_FRAME
_LEVEL = 3
# The fields of a Put that say what to do with it, and its contents.
_LEFT_OUT: dict[str, Any] = {"overwrite": False, "payload": None, "program": None}
_FIELDS = tuple(name for name in protocol.Put._fields if name not in _LEFT_OUT)
_LARGEST = 2**53
_LONGEST_CODEC, _LONGEST_NAMESPACE = 32, 200

Content = bytes | memoryview


class Parcel(NamedTuple):
    """An entry from elsewhere. The contents are parts of what came, and are not copied."""

    put: protocol.Put
    payload: memoryview
    # None if the writer kept it back.
    program: memoryview | None
    writer: str
    # When it was signed, by the writer's clock.
    signed_at: float
    # Whose signature was checked; empty if none was.
    key_id: str


def pack(
    put: protocol.Put,
    payload: Content,
    program: Content | None,
    *,
    namespace: str,
    writer: str,
    now: float,
    signer: PrivateKey | None,
) -> bytes:
    """Return the parcel of an entry; raise DamagedError rather than sign contents that are not what they should be."""
    put = put._replace(**_LEFT_OUT)
    _check(put, namespace, writer, now)
    _check_contents(put, payload, program)
    values = [_ordered(getattr(put, name)) for name in _FIELDS]
    header = _compressed(_encoded([namespace, writer, float(now), program is not None, *values]))
    start = _START.pack(_MAGIC, _VERSION, _UNSIGNED if signer is None else _SIGNED, len(header))
    proof = b""
    if signer is not None:
        proof = bytes.fromhex(signer.public.id) + sign(signer, _DOMAIN, start + header)
    return b"".join((start, header, proof, payload, program or b""))


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
    is_signed, header, proof, rest = _parts(view)
    key_id = ""
    if is_signed:
        key_id = _proven(view[: _START.size], header, proof, trusted, now, trust_unsigned=trust_unsigned)
    elif not trust_unsigned:
        raise SignatureError("nobody has signed it")
    found, writer, signed_at, has_program, put = _read(header)
    if put.key != key:
        raise DamagedError("it belongs to another key")
    if found != namespace:
        raise DamagedError(f"it belongs to the namespace {found!r}, not to {namespace!r}")
    size = put.stored_size + put.program_stored_size * has_program
    if len(rest) != size:
        raise DamagedError(f"its contents have {len(rest)} bytes, not {size}")
    payload, program = rest[: put.stored_size], rest[put.stored_size :] if has_program else None
    _check_contents(put, payload, program)
    return Parcel(put, payload, program, writer, signed_at, key_id)


def _parts(view: memoryview) -> tuple[bool, memoryview, memoryview, memoryview]:
    """Return whether it is signed, the header, the key id with the signature, and the rest."""
    if len(view) < _START.size:
        raise DamagedError("it is cut off")
    magic, version, signed, size = _START.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedError("it is no parcel of xcache")
    if version != _VERSION:
        raise DamagedError(f"it is of version {version}, and this xcache reads version {_VERSION}")
    if signed not in (_UNSIGNED, _SIGNED) or not 0 < size <= _MOST_HEADER:
        raise DamagedError("its beginning is malformed")
    end = _START.size + size
    begins = end + (ID_BYTES + SIGNATURE_BYTES) * signed
    if len(view) < begins:
        raise DamagedError("it is cut off")
    return signed == _SIGNED, view[_START.size : end], view[end:begins], view[begins:]


def _proven(
    start: memoryview, header: memoryview, proof: memoryview, trusted: TrustedKeys, now: float, *, trust_unsigned: bool
) -> str:
    """Return the id of the trusted key that made the signature; empty if the key is unknown and need not be known."""
    key_id = bytes(proof[:ID_BYTES]).hex()
    public = trusted.public(key_id, now)
    if public is None:
        # Whoever could put this here could have left the signature out.
        if trust_unsigned and not trusted.knows(key_id):
            return ""
        raise SignatureError(trusted.why_not(key_id, now))
    if not verify(public, _DOMAIN, bytes(start) + bytes(header), bytes(proof[ID_BYTES:])):
        raise SignatureError(f"its signature is not one of the key {key_id} ({public.name}), or it was altered")
    return key_id


def _read(header: memoryview) -> tuple[str, str, float, bool, protocol.Put]:
    """Return the namespace, the writer, the time, whether a program follows, and the fields of the Put."""
    plain = _decompressed(bytes(header))
    try:
        values = msgpack.unpackb(
            plain,
            raw=False,
            strict_map_key=True,
            max_array_len=len(_FIELDS) + 4,
            max_map_len=protocol.MAX_FIELDS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise DamagedError(f"its header is malformed ({type(error).__name__})") from None
    if type(values) is not list or len(values) != len(_FIELDS) + 4:
        raise DamagedError("its header is malformed")
    namespace, writer, signed_at, has_program, *fields = values
    if type(has_program) is not bool:
        raise DamagedError("its header is malformed")
    put = protocol.Put(**dict(zip(_FIELDS, fields, strict=True)), **_LEFT_OUT)
    _check(put, namespace, writer, signed_at)
    # One spelling, so that equal entries have equal parcels.
    if _encoded([*values[:4], *map(_ordered, fields)]) != plain:
        raise DamagedError("its header is not written as xcache writes it")
    return namespace, writer, signed_at, has_program, put


def _check(put: protocol.Put, namespace: object, writer: object, signed_at: object) -> None:
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
    if type(signed_at) is not float or not 0 <= signed_at <= _LARGEST:
        raise DamagedError("its time is out of range")


def _check_contents(put: protocol.Put, payload: Content, program: Content | None) -> None:
    if len(payload) != put.stored_size or digest(payload) != put.digest:
        raise DamagedError("the digest of its executable differs")
    if program is None:
        return
    if len(program) != put.program_stored_size or digest(program) != put.program_stored_digest:
        raise DamagedError("the digest of its program differs")


def _ordered(value: Any) -> Any:
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


def _encoded(values: list[Any]) -> bytes:
    try:
        made: bytes = msgpack.packb(values, use_bin_type=True)
    # A text with lone surrogates, a number of more than 64 bits.
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"its header cannot be written ({type(error).__name__})") from None
    if len(made) > _MOST_HEADER:
        raise DamagedError(f"its header of {len(made)} bytes is too large")
    return made


def _compressed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(plain)


def _decompressed(header: bytes) -> bytes:
    try:
        # Memory is taken for what the frame declares, so that is looked at first.
        if not 0 < zstandard.get_frame_parameters(header).content_size <= _MOST_HEADER:
            raise DamagedError("its header declares a size that is not accepted")
        return zstandard.ZstdDecompressor().decompress(header, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"its header cannot be decompressed ({error})") from None
