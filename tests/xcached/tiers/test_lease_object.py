"""A lease in a tier is read with care: anybody may have written it."""

from __future__ import annotations

import pytest
from support.signing import NOON, OURS, STRANGER, in_memory

from xcache.wire import framing, protocol, signed_header
from xcached.tiers import lease_object
from xcached.tiers.lease_object import MOST_BYTES, Held, decoded

NAME = "leases/ab/abcd"
HELD = Held("0123456789abcdef", 3, "host", 4711, "train.py", 1.5, 20.0, at=NOON)
TRUSTED = in_memory(OURS.public)


def read(content: bytes, name: str = NAME, **options: bool) -> lease_object.Found | None:
    return decoded(content, name, TRUSTED, NOON, **options)


def test_what_is_written_is_read():
    signed = HELD._replace(signer=OURS.public.id)
    assert read(HELD.encoded(NAME, OURS)) == (signed, "")
    assert read(HELD._replace(ended=True).encoded(NAME, OURS)).held.ended


def test_only_what_a_trusted_key_signed_counts():
    assert "not in" in read(HELD.encoded(NAME, STRANGER)).why_not
    assert read(HELD.encoded(NAME, None)).why_not == "nobody has signed it"
    assert read(HELD.encoded(NAME, None), trust_unsigned=True).why_not == ""
    altered = bytearray(HELD.encoded(NAME, OURS))
    altered[-1] ^= 1
    assert read(bytes(altered)).why_not


@pytest.mark.parametrize(("seconds", "is_recent"), [(0, True), (-299, True), (299, True), (301, False), (-9999, False)])
def test_a_lease_is_of_the_time_at_which_it_was_signed(seconds, is_recent):
    held = read(HELD._replace(at=NOON + seconds).encoded(NAME, OURS)).held
    assert held.at == NOON + seconds
    assert held.is_recent(NOON) is is_recent


def test_a_lease_is_of_one_key():
    assert read(HELD.encoded("leases/ab/other", OURS)) is None


def test_long_names_are_cut():
    content = HELD._replace(host="h" * 10_000, program="\x00\U0001f600" * 10_000).encoded(NAME, OURS)
    assert len(content) <= MOST_BYTES
    assert len(read(content).held.host) == 100


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"1", b"{", b"[" * 100_000, HELD.encoded(NAME, OURS) + b"x"])
def test_other_objects_are_none(content):
    assert read(content) is None


@pytest.mark.parametrize("value", [None, True, -1, 1e300, float("nan"), float("inf"), 2**60, "x\ny\x1b[31m", b"\xff"])
def test_any_value_can_be_shown_and_sent(value):
    held = read(signed_header.written(lease_object._KIND, [NAME, *[value] * 9], OURS)).held
    assert held.holder.isprintable()
    assert held.program.isprintable()
    assert 0 <= held.expected <= 1e10
    framing.encode(1, protocol.Wait(held.pid, held.program, held.seconds, 1.0))
