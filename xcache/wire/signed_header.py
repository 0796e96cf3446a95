"""The beginning of every object that leaves the machine: a header, and the signature of it.

    magic (8) | version (1) | signed or not (1) | bytes of the header (4) | header | key id (8) | signature (64)

The header is a zstd frame of a msgpack array, and has the digests of all that follows it. The signature is checked
before anything of the header is read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import zstandard

from xcache.errors import DamagedError, SignatureError, UnknownKeyError
from xcache.wire import bounded
from xcache.wire.signatures import ID_BYTES, SIGNATURE_BYTES, PrivateKey, sign, verify
from xcache.wire.trusted_keys import TrustedKeys

_START = struct.Struct(">8sBBI")
_UNSIGNED, _SIGNED = 0, 1
_LEVEL = 3


class Kind(NamedTuple):
    """A kind of object: a signature for one is worth nothing for another."""

    name: str
    magic: bytes
    version: int
    # Bytes of the header when it is decompressed.
    most: int
    shape: bounded.Shape

    @property
    def domain(self) -> bytes:
        """The purpose that a signature names."""
        return f"xcache {self.name}".encode()


def written(kind: Kind, values: list[Any], signer: PrivateKey | None) -> bytes:
    """Return the beginning of an object with this header."""
    # Where nobody signs, only the checksum finds a header that was damaged on its way.
    header = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(_encoded(kind, values))
    start = _START.pack(kind.magic, kind.version, _UNSIGNED if signer is None else _SIGNED, len(header))
    proof = b""
    if signer is not None:
        proof = bytes.fromhex(signer.public.id) + sign(signer, kind.domain, start + header)
    return start + header + proof


def read(
    kind: Kind, view: memoryview, trusted: TrustedKeys, now: float, *, trust_unsigned: bool
) -> tuple[str, list[Any], memoryview]:
    """Return the id of the key that signed it (empty if no signature was checked), the header, and what follows it.

    Raise SignatureError unless a key signed it that is trusted now, and DamagedError if it is not as it was written.
    ``trust_unsigned`` is for tiers whose writers are all trusted: no signature is needed, nor the key of one. A bad
    signature and a key that is no longer trusted are refused all the same.
    """
    is_signed, header, proof, rest = _parts(kind, view)
    key_id = ""
    if is_signed:
        key_id = _proven(kind, view[: _START.size], header, proof, trusted, now, trust_unsigned=trust_unsigned)
    elif not trust_unsigned:
        raise SignatureError("nobody has signed it")
    return key_id, _decoded(kind, header), rest


def shown(
    kind: Kind, view: memoryview, trusted: TrustedKeys, now: float, *, trust_unsigned: bool
) -> tuple[str, list[Any]]:
    """Return why the header of an object's beginning does not count here (empty if it does), and the header.

    For people: nobody may have signed what it says. Raise DamagedError if it is not as it was written.
    """
    is_signed, header, proof, _ = _parts(kind, view)
    why_not = "" if is_signed or trust_unsigned else "nobody has signed it"
    if is_signed:
        try:
            _proven(kind, view[: _START.size], header, proof, trusted, now, trust_unsigned=trust_unsigned)
        except SignatureError as error:
            why_not = str(error)
    return why_not, _decoded(kind, header)


def bytes_before_contents(kind: Kind, view: memoryview) -> int:
    """Return how many bytes the header and its signature have; raise DamagedError if the object is none of the kind."""
    return _places(kind, view)[2]


def signer_of(view: memoryview) -> str:
    """Return the id of the key that should have signed an object, which is not checked; empty if none is named."""
    if len(view) < _START.size:
        return ""
    _, _, signed, size = _START.unpack_from(view)
    begin = _START.size + size
    return bytes(view[begin : begin + ID_BYTES]).hex() if signed == _SIGNED else ""


def _parts(kind: Kind, view: memoryview) -> tuple[bool, memoryview, memoryview, memoryview]:
    """Return whether it is signed, the header, the key id with the signature, and the rest."""
    is_signed, end, begins = _places(kind, view)
    if len(view) < begins:
        raise DamagedError("it is cut off")
    return is_signed, view[_START.size : end], view[end:begins], view[begins:]


def _places(kind: Kind, view: memoryview) -> tuple[bool, int, int]:
    """Return whether it is signed, where the header ends, and where the contents begin."""
    if len(view) < _START.size:
        raise DamagedError("it is cut off")
    magic, version, signed, size = _START.unpack_from(view)
    if magic != kind.magic:
        raise DamagedError(f"it is no {kind.name} of xcache")
    if version != kind.version:
        raise DamagedError(f"it is of version {version}, and this xcache reads version {kind.version}")
    if signed not in (_UNSIGNED, _SIGNED) or not 0 < size <= kind.most:
        raise DamagedError("its beginning is malformed")
    end = _START.size + size
    return signed == _SIGNED, end, end + (ID_BYTES + SIGNATURE_BYTES) * signed


def _proven(
    kind: Kind,
    start: memoryview,
    header: memoryview,
    proof: memoryview,
    trusted: TrustedKeys,
    now: float,
    *,
    trust_unsigned: bool,
) -> str:
    """Return the id of the trusted key that made the signature; empty if the key is unknown and need not be known."""
    key_id = bytes(proof[:ID_BYTES]).hex()
    public = trusted.public(key_id, now)
    if public is None:
        # Whoever could put this here could have left the signature out.
        if trust_unsigned and not trusted.knows(key_id):
            return ""
        raise (SignatureError if trusted.knows(key_id) else UnknownKeyError)(trusted.why_not(key_id, now))
    if not verify(public, kind.domain, bytes(start) + bytes(header), bytes(proof[ID_BYTES:])):
        raise SignatureError(f"its signature is not one of the key {key_id} ({public.name}), or it was altered")
    return key_id


def _decoded(kind: Kind, header: memoryview) -> list[Any]:
    try:
        plain = bounded.decompressed(header, kind.most)
        values = bounded.unpacked(plain, kind.shape)
    except bounded.UnreadableError as error:
        raise DamagedError(f"its header is malformed ({error})") from None
    if type(values) is not list:
        raise DamagedError("its header is malformed")
    # One spelling, so that equal things have equal headers.
    if _encoded(kind, values) != plain:
        raise DamagedError("its header is not written as xcache writes it")
    return values


def _encoded(kind: Kind, values: list[Any]) -> bytes:
    try:
        made: bytes = msgpack.packb(_ordered(values), use_bin_type=True)
    # A text with lone surrogates, a number of more than 64 bits, keys that cannot be compared.
    except (ValueError, OverflowError, TypeError) as error:
        raise DamagedError(f"its header cannot be written ({type(error).__name__})") from None
    if len(made) > kind.most:
        raise DamagedError(f"its header of {len(made)} bytes is too large")
    return made


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _ordered(each) for name, each in sorted(value.items())}
    return [*map(_ordered, value)] if isinstance(value, list) else value
