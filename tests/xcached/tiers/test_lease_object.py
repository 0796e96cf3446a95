"""A lease in a tier is read with care: anybody may have written it."""

from __future__ import annotations

import json

import pytest

from xcache.wire import framing, protocol
from xcached.tiers.lease_object import MOST_BYTES, Held, decoded

HELD = Held("0123456789abcdef", 3, "host", 4711, "train.py", 1.5, 20.0, "a key")


def test_what_is_written_is_read():
    assert decoded(HELD.encoded()) == HELD
    assert decoded(HELD._replace(ended=True).encoded()).ended


def test_long_names_are_cut():
    content = HELD._replace(host="h" * 10_000, program="\x00\U0001f600" * 10_000).encoded()
    assert len(content) <= MOST_BYTES
    assert len(decoded(content).host) == 100


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"1", b'"x"', b"null", b"{", b"[" * 100_000])
def test_other_objects_are_none(content):
    assert decoded(content) is None


@pytest.mark.parametrize(
    "value", [None, True, -1, 1e300, float("nan"), float("inf"), 10**400, "x\ny\x1b[31m", "\ud800", [], {}]
)
def test_any_value_can_be_shown_and_sent(value):
    held = decoded(json.dumps(dict.fromkeys(Held._fields, value)).encode())
    assert held.holder.isprintable()
    assert held.program.isprintable()
    assert 0 <= held.expected <= 1e9
    framing.encode(1, protocol.Wait(held.pid, held.program, held.seconds, 1.0))
