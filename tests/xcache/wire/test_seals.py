"""An alias is read as it was written, or it is damaged."""

from __future__ import annotations

import pytest
from support.places import digest

from xcache.errors import DamagedAliasError
from xcache.wire import framing, protocol, seals

ALIAS = seals.sealed(digest(b"structure"), digest(b"program"), b"\x93facts\0")


def test_an_alias_is_read_as_it_was_written():
    assert seals.opened(ALIAS) == seals.opened([*ALIAS]) == ALIAS


def test_any_changed_bit_is_found():
    for at, field in enumerate(ALIAS):
        content = field if isinstance(field, bytes) else field.encode()
        for bit in range(8 * len(content)):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            value = bytes(changed) if isinstance(field, bytes) else changed.decode("utf-8", "replace")
            with pytest.raises(DamagedAliasError):
                seals.opened([*ALIAS[:at], value, *ALIAS[at + 1 :]])


@pytest.mark.parametrize("field", range(3))
def test_fields_of_two_aliases_make_none(field):
    other = seals.sealed(digest(b"other structure"), digest(b"other program"), b"other facts")
    with pytest.raises(DamagedAliasError):
        seals.opened([*ALIAS[:field], other[field], *ALIAS[field + 1 :]])


def test_no_field_runs_into_the_next():
    assert seals.sealed("ab", "c", b"d").seal != seals.sealed("a", "bc", b"d").seal
    assert seals.sealed("a", "bc", b"d").seal != seals.sealed("a", "b", b"cd").seal


@pytest.mark.parametrize(
    "fields",
    [[], [*ALIAS[:3]], [*ALIAS, "more"], [*map(str, ALIAS)], [ALIAS.facts, *ALIAS[1:]], [*ALIAS[:3], None]],
    ids=lambda fields: repr(fields)[:30],
)
def test_what_is_no_alias_is_damaged(fields):
    with pytest.raises(DamagedAliasError):
        seals.opened(fields)


def test_the_most_that_may_be_remembered_at_once_fits_into_a_frame():
    for size in (protocol.MAX_FACTS, protocol.MAX_RECORD):
        largest, count = (
            [*ALIAS._replace(facts=b"f" * size)],
            min(protocol.MAX_ALIASES, protocol.MAX_ALIAS_BYTES // size),
        )
        assert len(framing.encode(2**31, protocol.RememberAliases([largest] * count))) < protocol.MAX_FRAME
