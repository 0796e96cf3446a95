"""Entries that leave the machine and come back: nothing that a trusted key did not sign is taken in."""

from __future__ import annotations

import math
import os
import struct
import tracemalloc

import msgpack
import pytest
import zstandard
from support.parcels import (
    KEY,
    MOST,
    NAMESPACE,
    PAYLOAD,
    PROGRAM,
    START,
    packed,
    parts,
    plain_header,
    put,
    with_header,
)
from support.signing import DAY, NOON, OURS, SECOND, STRANGER, listing

from xcache.errors import DamagedError, SignatureError
from xcache.wire import parcel, protocol
from xcache.wire.hashing import digest
from xcache.wire.signatures import sign

BAD = (DamagedError, SignatureError)


@pytest.fixture
def trusted(tmp_path):
    return listing(tmp_path, OURS.public)


@pytest.fixture
def nobody(tmp_path):
    """A list of keys without any."""
    (tmp_path / "empty").mkdir()
    return listing(tmp_path / "empty")


def opened(content, trusted, *, key=KEY, namespace=NAMESPACE, now=NOON, most=MOST, **options):
    return parcel.unpack(content, key, namespace, trusted, now, most, **options)


def test_what_was_packed_comes_back(trusted):
    found = opened(packed(), trusted)
    assert (bytes(found.payload), bytes(found.program)) == (PAYLOAD, PROGRAM)
    assert found.put == put()._replace(overwrite=False, payload=None, program=None)
    assert (found.writer, found.stored_at, found.key_id) == ("ci@host", NOON, OURS.public.id)


def test_the_program_may_be_kept_back(trusted):
    found = opened(packed(put(), program=None), trusted)
    assert found.program is None
    assert found.put.program_stored_size == len(PROGRAM)
    # It cannot be left out, or added, behind the signer's back.
    for content in (packed()[: -len(PROGRAM)], packed(put(), program=None) + PROGRAM):
        with pytest.raises(DamagedError, match="its contents have"):
            opened(content, trusted)


def test_the_same_entry_is_packed_alike():
    message = put()
    shuffled = message._replace(
        components=dict(reversed(message.components.items())), details=dict(reversed(message.details.items()))
    )
    assert packed(message) == packed(shuffled) == packed(message._replace(overwrite=False, payload=None))


def test_empty_and_large_contents(trusted):
    for payload, program in ((b"", b""), (os.urandom(500_000), b""), (b"x", os.urandom(100_000))):
        found = opened(packed(put(payload, program), payload, program), trusted)
        assert (bytes(found.payload), bytes(found.program)) == (payload, program)


# Who signed it.


def test_a_planted_object_is_not_taken(trusted):
    with pytest.raises(SignatureError, match=f"the key {STRANGER.public.id} is not in"):
        opened(packed(signer=STRANGER), trusted)


def test_a_stranger_who_names_a_trusted_key_is_not_believed(trusted):
    start, header, proof, contents = parts(packed(signer=STRANGER))
    forged = start + header + bytes.fromhex(OURS.public.id) + proof[8:] + contents
    with pytest.raises(SignatureError, match="is not one of the key"):
        opened(forged, trusted)


def test_a_signature_of_something_else_is_not_believed(trusted):
    """Signatures that a trusted key made for another purpose, or without saying for which."""
    start, header, _, contents = parts(packed())
    for signature in (
        sign(OURS, b"xcache bundle", start + header),
        OURS.sign(start + header),
        sign(OURS, b"xcache parcel", header),
    ):
        with pytest.raises(SignatureError):
            opened(start + header + bytes.fromhex(OURS.public.id) + signature + contents, trusted)


def test_the_signature_of_another_entry_is_not_believed(trusted):
    other = put(b"evil", PROGRAM)
    start, header, _, contents = parts(packed(other, b"evil"))
    with pytest.raises(SignatureError):
        opened(start + header + parts(packed())[2] + contents, trusted)


def test_a_replayed_object_is_not_taken_under_another_key_or_namespace(trusted):
    with pytest.raises(DamagedError, match="belongs to another key"):
        opened(packed(), trusted, key="cd" * 32)
    with pytest.raises(DamagedError, match="belongs to the namespace 'team', not to ''"):
        opened(packed(), trusted, namespace="")
    with pytest.raises(DamagedError, match="belongs to the namespace '', not to 'team'"):
        opened(packed(namespace=""), trusted)


def stripped(content: bytes) -> bytes:
    """Return a parcel that says it was never signed."""
    start, header, _, contents = parts(content)
    return start[:9] + b"\0" + start[10:] + header + contents


def test_a_stripped_signature_is_not_taken(trusted, nobody):
    for content in (stripped(packed()), packed(signer=None)):
        for each in (trusted, nobody):
            with pytest.raises(SignatureError, match="nobody has signed it"):
                opened(content, each)
    # The mark alone, with the signature still there, or without one.
    flipped = packed()[:9] + b"\0" + packed()[10:]
    for content in (flipped, packed(signer=None)[:9] + b"\1" + packed(signer=None)[10:]):
        with pytest.raises(BAD):
            opened(content, trusted, trust_unsigned=True)


def test_without_signatures_a_tier_is_used_only_if_the_setting_says_so(trusted, nobody):
    for each in (trusted, nobody):
        for content in (packed(signer=None), stripped(packed()), packed(signer=STRANGER)):
            found = opened(content, each, trust_unsigned=True)
            assert (bytes(found.payload), found.key_id) == (PAYLOAD, "")
    assert opened(packed(), trusted, trust_unsigned=True).key_id == OURS.public.id
    # All else is checked all the same.
    with pytest.raises(DamagedError, match="another key"):
        opened(packed(signer=None), trusted, key="cd" * 32, trust_unsigned=True)


def test_what_is_signed_badly_is_refused_where_no_signature_is_needed(trusted, tmp_path):
    start, header, proof, contents = parts(packed())
    with pytest.raises(SignatureError, match="or it was altered"):
        opened(start + header + proof[:-1] + bytes([proof[-1] ^ 1]) + contents, trusted, trust_unsigned=True)
    revoked = listing(tmp_path, f"{OURS.public} revoked=2026-11-27")
    with pytest.raises(SignatureError, match="was revoked"):
        opened(packed(), revoked, trust_unsigned=True)


def test_an_expired_and_a_revoked_key_are_not_trusted(tmp_path):
    expiring = listing(tmp_path, f"{OURS.public} expires=2026-11-27")
    assert opened(packed(), expiring)
    with pytest.raises(SignatureError, match="expired on 2026-11-27"):
        opened(packed(), expiring, now=NOON + DAY)
    # Between two objects.
    revoked = listing(tmp_path, f"{OURS.public} revoked=2026-11-27")
    with pytest.raises(SignatureError, match="was revoked on 2026-11-27"):
        opened(packed(), expiring.fresh())
    with pytest.raises(SignatureError, match="was revoked"):
        opened(packed(), revoked)


def test_two_keys_during_rotation(tmp_path):
    both = listing(tmp_path, OURS.public, SECOND.public)
    assert opened(packed(), both).key_id == OURS.public.id
    assert opened(packed(signer=SECOND), both).key_id == SECOND.public.id
    later = listing(tmp_path, f"{OURS.public} revoked=2026-11-27", SECOND.public)
    assert opened(packed(signer=SECOND), later)
    with pytest.raises(SignatureError):
        opened(packed(), later)


def test_a_list_that_is_not_used_trusts_nobody(trusted):
    trusted.path.chmod(0o666)
    with pytest.raises(SignatureError, match="others may write it"):
        opened(packed(), trusted.fresh())


# What was altered.


def test_every_byte_counts(trusted):
    content = packed()
    for at in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            altered = bytearray(content)
            altered[at] ^= mask
            with pytest.raises(BAD):
                opened(bytes(altered), trusted)


def test_every_byte_counts_without_a_signature(trusted):
    """Without one, only what no digest covers can be altered, and then it is still well-formed."""
    content = packed(signer=None)
    taken = 0
    for at in range(len(content)):
        altered = bytearray(content)
        altered[at] ^= 0x01
        try:
            found = opened(bytes(altered), trusted, trust_unsigned=True)
        except BAD:
            continue
        taken += 1
        assert at >= START
        assert (bytes(found.payload), bytes(found.program), found.put.key) == (PAYLOAD, PROGRAM, KEY)
    assert taken < len(parts(content)[1])


def test_whatever_is_cut_off_is_noticed(trusted):
    for content, options in ((packed(), {}), (packed(signer=None), {"trust_unsigned": True})):
        for length in range(len(content)):
            with pytest.raises(BAD):
                opened(content[:length], trusted, **options)
        for tail in (b"\0", PROGRAM, content):
            with pytest.raises(DamagedError, match="its contents have"):
                opened(content + tail, trusted, **options)


def test_an_unknown_format_is_told_from_damage(trusted):
    with pytest.raises(DamagedError, match="no parcel of xcache"):
        opened(b"<html>404 not found</html>", trusted)
    with pytest.raises(DamagedError, match="version 2, and this xcache reads version 1"):
        opened(packed()[:8] + b"\2" + packed()[9:], trusted)


def test_what_is_too_large_is_not_looked_at(trusted):
    with pytest.raises(DamagedError, match="are more than the 100"):
        opened(packed(), trusted, most=100)
    assert opened(packed(), trusted, most=len(packed()))


# What a trusted key, or anybody where no signature is needed, could have signed.


def frame_of(size: int) -> bytes:
    """Return a zstd frame that declares this size."""
    frame = zstandard.ZstdCompressor().compress(bytes(100))
    return frame[:4] + bytes([0xE0]) + struct.pack("<Q", size) + frame[zstandard.frame_header_size(frame) :]


@pytest.mark.parametrize("size", [0, protocol.MAX_FRAME + 1, 2**33, 2**62, 2**64 - 1])
def test_a_huge_declared_size_takes_no_memory(trusted, size):
    content = with_header(b"", PAYLOAD, frame=frame_of(size))
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            opened(content, trusted)
        assert tracemalloc.get_traced_memory()[1] < 10 * 1024**2
    finally:
        tracemalloc.stop()


def test_a_bomb_of_zeros_is_not_unpacked(trusted):
    for frame in (
        zstandard.ZstdCompressor().compress(bytes(64 * 1024**2)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * 1024**2)),
        zstandard.ZstdCompressor().compress(plain_header(packed())) * 2,
        b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8),
    ):
        with pytest.raises(DamagedError):
            opened(with_header(b"", PAYLOAD + PROGRAM, frame=frame), trusted)


@pytest.mark.parametrize("size", [0, protocol.MAX_FRAME + 1, 2**32 - 1])
def test_a_header_of_a_size_that_is_not_accepted(trusted, size):
    content = bytearray(packed())
    struct.pack_into(">I", content, START - 4, size)
    with pytest.raises(DamagedError, match="beginning is malformed"):
        opened(bytes(content), trusted)


def header_values(**changes: object) -> bytes:
    """Return the header of a parcel in which fields were changed by somebody who can sign."""
    names = ["namespace", "writer", "stored_at", "has_program", *parcel._FIELDS]
    values = dict(zip(names, msgpack.unpackb(plain_header(packed())), strict=True))
    return msgpack.packb([*(values | changes).values()])


DEEP: object = []
for _ in range(600):
    DEEP = [DEEP]
WRONG = {
    "key of another type": {"key": 5},
    "key in upper case": {"key": KEY.upper()},
    "short key": {"key": KEY[:-2]},
    "digest": {"digest": "x" * 64},
    "program digest": {"program_digest": ""},
    "negative size": {"stored_size": -1},
    "huge size": {"stored_size": 2**60},
    "size as float": {"stored_size": float(len(PAYLOAD))},
    "size as bool": {"raw_size": True},
    "sizes that add up otherwise": {"stored_size": len(PAYLOAD) + 1, "program_stored_size": len(PROGRAM) - 1},
    "huge raw size": {"raw_size": 2**63},
    "not a number": {"compile_seconds": math.nan},
    "infinite": {"compile_seconds": math.inf},
    "negative time": {"compile_seconds": -1.0},
    "huge time": {"compile_seconds": 1e300},
    "signed at no time": {"stored_at": math.nan},
    "signed at a whole number": {"stored_at": 5},
    "long name": {"module_name": "x" * (protocol.MAX_TEXT + 1)},
    "long writer": {"writer": "x" * (protocol.MAX_NAME + 1)},
    "long namespace": {"namespace": "x" * 201},
    "long codec": {"codec": "x" * 33},
    "writer of another type": {"writer": None},
    "namespace as bytes": {"namespace": b"team"},
    "a flag that is none": {"has_program": 1},
    "no components": {"components": {}},
    "a component too few": {"components": {"options": KEY, "flags": KEY, "platform": KEY}},
    "too many components": {"components": {f"{n}": KEY for n in range(16)} | put().components},
    "a component that is no digest": {"components": put().components | {"flags": "x"}},
    "components as a list": {"components": []},
    "a description of nothing": {"details": {"nothing": "x"}},
    "a long description": {"details": {"flags": "x" * (protocol.MAX_TEXT + 1)}},
    "a description as bytes": {"details": {"flags": b"x"}},
    "deep": {"details": DEEP},
    "an extension": {"details": msgpack.ExtType(5, b"x")},
    "a time of msgpack": {"stored_at": msgpack.Timestamp(5)},
}


@pytest.mark.parametrize("case", WRONG)
def test_a_header_that_means_nothing_is_refused(trusted, case):
    for signer in (OURS, None):
        with pytest.raises(DamagedError):
            opened(with_header(header_values(**WRONG[case]), PAYLOAD + PROGRAM, signer), trusted, trust_unsigned=True)


def test_a_header_has_one_spelling(trusted):
    plain = plain_header(packed())
    assert opened(with_header(header_values(), PAYLOAD + PROGRAM), trusted)
    unordered = dict(reversed(put().components.items()))
    for other in (
        header_values(components=unordered),
        plain + b"\0",
        plain[:-1],
        b"\xdd" + struct.pack(">I", plain[2] + (plain[1] << 8)) + plain[3:],
        b"",
        b"\xc0",
        b"\xff" * 50,
        msgpack.packb([]),
        msgpack.packb({}),
        msgpack.packb([*msgpack.unpackb(plain), 1]),
    ):
        with pytest.raises(DamagedError):
            opened(with_header(other, PAYLOAD + PROGRAM), trusted)


def test_what_is_damaged_here_is_not_signed():
    for message, payload, program in (
        (put(), PAYLOAD[:-1], PROGRAM),
        (put(), b"x" * len(PAYLOAD), PROGRAM),
        (put(), PAYLOAD, PROGRAM + b"x"),
        (put(digest=digest(b"")), PAYLOAD, PROGRAM),
        (put(key="x"), PAYLOAD, PROGRAM),
        (put(module_name="\udcff"), PAYLOAD, PROGRAM),
        (put(compile_seconds=math.nan), PAYLOAD, PROGRAM),
    ):
        with pytest.raises(DamagedError):
            packed(message, payload, program)


# The beginning alone.


def labelled(content, trusted, *, key=KEY, namespace=NAMESPACE, now=NOON, **options):
    return parcel.label(content, key, namespace, trusted, now, **options)


def test_the_beginning_says_what_a_parcel_is(trusted):
    for content in (packed(), packed(put(), program=None)):
        needed = parcel.label_bytes(content[: parcel.FEW_BYTES])
        found = labelled(content[:needed], trusted)
        assert (found.put.module_name, found.put.jaxlib_version) == ("jit_f", "0.10.2")
        assert (found.size, found.key_id, found.why_not) == (len(content), OURS.public.id, "")
        with pytest.raises(DamagedError, match="cut off"):
            labelled(content[: needed - 1], trusted)


def test_a_beginning_that_nobody_trusted_signed_is_shown_and_does_not_count(trusted, tmp_path):
    start, header, proof, _ = parts(packed(signer=STRANGER))
    forged = start + header + bytes.fromhex(OURS.public.id) + proof[8:]
    for content, signer, why_not in (
        (packed(signer=STRANGER), STRANGER.public.id, f"the key {STRANGER.public.id} is not in"),
        (forged, OURS.public.id, "its signature is not one of the key"),
        (packed(signer=None), "", "nobody has signed it"),
    ):
        found = labelled(content, trusted)
        assert (found.put.module_name, found.key_id) == ("jit_f", signer)
        assert why_not in found.why_not
        # Where the writers of the tier are trusted, a bad signature is refused all the same.
        assert bool(labelled(content, trusted, trust_unsigned=True).why_not) == (content is forged)
    (tmp_path / "revoked").mkdir()
    revoked = listing(tmp_path / "revoked", f"{OURS.public} revoked=2026-11-01")
    assert "was revoked" in labelled(packed(), revoked, trust_unsigned=True).why_not


def test_a_beginning_of_something_else_is_damaged(trusted):
    for content in (b"", b"x" * 100, packed()[:13], b"xcachrun" + packed()[8:], packed()[:8] + b"\2" + packed()[9:]):
        with pytest.raises(DamagedError):
            labelled(content, trusted)
        with pytest.raises(DamagedError):
            parcel.label_bytes(content)
    with pytest.raises(DamagedError, match="another key"):
        labelled(packed(), trusted, key="cd" * 32)
    with pytest.raises(DamagedError, match="namespace"):
        labelled(packed(), trusted, namespace="")
    # A stranger decides how long the header is, and what is in it.
    with pytest.raises(DamagedError, match="malformed"):
        parcel.label_bytes(packed()[:10] + b"\xff\xff\xff\xff" + packed()[14:])
    with pytest.raises(DamagedError):
        labelled(with_header(msgpack.packb([1] * 30), b"", STRANGER), trusted)
    with pytest.raises(DamagedError, match="a size that is not accepted"):
        frame = zstandard.ZstdCompressor().compress(bytes(protocol.MAX_FRAME + 1))
        labelled(with_header(b"", b"", STRANGER, frame), trusted)


def test_a_header_of_a_million_parts_takes_no_memory(trusted):
    """A few hundred bytes decompress to a megabyte, and each byte of that is an empty map."""
    plain = b"\x80"
    for width in (20, 20, 20, 20, 5):
        plain = bytes([0x90 | width]) + plain * width if width < 16 else b"\xdc\0\x14" + plain * width
    content = with_header(plain, b"", STRANGER)
    assert len(plain) > 900_000
    assert len(content) < parcel.FEW_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="more than 3 lists and maps"):
            labelled(content, trusted)
        assert tracemalloc.get_traced_memory()[1] < 4 * protocol.MAX_FRAME
    finally:
        tracemalloc.stop()
