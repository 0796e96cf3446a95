"""Parcels for tests and fuzzing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import zstandard

from support.mutation import Mutator
from support.signing import NOON, OURS, STRANGER, in_memory
from xcache.errors import DamagedError, SignatureError
from xcache.wire import parcel, protocol
from xcache.wire.hashing import digest
from xcache.wire.signatures import PrivateKey, sign

KEY, NAMESPACE = "ab" * 32, "team"
PAYLOAD, PROGRAM = b"an executable, or what passes for one " * 5, b"a program"
MOST = 1024**2
START = 14
PROOF = 72


def put(payload: bytes = PAYLOAD, program: bytes = PROGRAM, **fields: Any) -> protocol.Put:
    """Return the message of an entry."""
    details = {part: f"{part}=1\n" * 20 for part in protocol.DESCRIBED_COMPONENTS}
    made = protocol.Put(
        key=KEY,
        overwrite=True,
        module_name="jit_f",
        platform="cpu",
        device_kind="cpu",
        jaxlib_version="0.10.2",
        codec="zstd",
        raw_size=1000,
        compile_seconds=1.5,
        digest=digest(payload),
        stored_size=len(payload),
        program_digest=digest(b"raw"),
        program_raw_size=100,
        program_stored_digest=digest(program),
        program_stored_size=len(program),
        components={part: digest(text.encode()) for part, text in {"program": "program", **details}.items()},
        details=details,
        payload=payload,
        program=program,
    )
    return made._replace(**fields)


def packed(
    message: protocol.Put | None = None,
    payload: bytes = PAYLOAD,
    program: bytes | None = PROGRAM,
    *,
    namespace: str = NAMESPACE,
    signer: PrivateKey | None = OURS,
) -> bytes:
    """Return a parcel."""
    message = put(payload, program or b"") if message is None else message
    return parcel.pack(message, payload, program, namespace=namespace, writer="ci@host", stored_at=NOON, signer=signer)


def parts(content: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return start, header, key id with signature (empty if unsigned), and contents of a parcel."""
    (size,) = struct.unpack_from(">I", content, START - 4)
    ends = START + size, START + size + PROOF * content[9]
    return content[:START], content[START : ends[0]], content[ends[0] : ends[1]], content[ends[1] :]


def plain_header(content: bytes) -> bytes:
    """Return the header as msgpack."""
    return zstandard.ZstdDecompressor().decompress(parts(content)[1])


def with_header(plain: bytes, contents: bytes, signer: PrivateKey | None = OURS, frame: bytes | None = None) -> bytes:
    """Return a parcel with any header, signed by whoever would sign it."""
    header = zstandard.ZstdCompressor().compress(plain) if frame is None else frame
    start = struct.pack(">8sBBI", b"xcparcel", 1, signer is not None, len(header))
    proof = b"" if signer is None else bytes.fromhex(signer.public.id) + sign(signer, b"xcache parcel", start + header)
    return start + header + proof + contents


# For fuzzing.


def samples() -> list[bytes]:
    """Return parcels, signed and not; opening them gives one payload."""
    small = put(b"x", b"", details={}, module_name="")
    return [
        *(packed(), packed(signer=None), packed(signer=STRANGER), packed(put(), program=None)),
        *(packed(small, b"x", b""), packed(small, b"x", b"", signer=None)),
    ]


_TRUSTED, _SIGNED = in_memory(OURS.public), frozenset(each for each in samples() if parts(each)[2])


def check(content: bytes) -> bool:
    """Open a parcel: what was signed as it is, or, where no signature is needed, what is well-formed."""
    try:
        parcel.unpack(content, KEY, NAMESPACE, _TRUSTED, NOON, MOST)
    except (DamagedError, SignatureError):
        pass
    else:
        assert content in _SIGNED
    try:
        label = parcel.label(content, KEY, NAMESPACE, _TRUSTED, NOON)
    except DamagedError:
        pass
    else:
        # Only a header that was signed as it is counts.
        beginning = content[: parcel.label_bytes(content)]
        assert label.why_not or any(each.startswith(beginning) for each in _SIGNED)
    try:
        found = parcel.unpack(content, KEY, NAMESPACE, _TRUSTED, NOON, MOST, trust_unsigned=True)
    except (DamagedError, SignatureError):
        return False
    assert found.put.key == KEY
    assert digest(found.payload) == found.put.digest
    assert found.program is None or digest(found.program) == found.put.program_stored_digest
    said = {"namespace": NAMESPACE, "writer": found.writer, "stored_at": found.stored_at}
    made = parcel.pack(found.put, found.payload, found.program, signer=None, **said)
    again = parcel.unpack(made, KEY, NAMESPACE, _TRUSTED, NOON, MOST, trust_unsigned=True)
    assert again == found._replace(key_id="")
    return True


_WORDS = [bytes(8), b"xcparcel", KEY.encode(), b"\xcb" + bytes(8), b"\xc0", b"\x80", b"\x90"]


class ParcelMutator(Mutator):
    """Mutates parcels, and in every other case the header before it is compressed."""

    def __init__(self, seed: int, made: Sequence[bytes]) -> None:
        super().__init__(seed, made, _WORDS)
        self._inside = [(plain_header(each), parts(each)[3]) for each in samples()]

    def case(self) -> bytes:
        """Return a parcel."""
        if self.below(2):
            return super().case()
        plain, contents = self.one_of(self._inside)
        return with_header(self.spoiled(plain), contents, None)
