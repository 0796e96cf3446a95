"""Aliases are sealed by the client that writes them, so that the one that reads them finds any bit that changed."""

from __future__ import annotations

from collections.abc import Sequence

from xcache.errors import DamagedAliasError, ProtocolError
from xcache.wire import framing, protocol
from xcache.wire.hashing import digest


def sealed(structure: str, program: str, facts: bytes) -> protocol.Alias:
    """Return an alias with its seal."""
    return protocol.Alias(structure, program, facts, digest(f"{structure}\0{program}\0".encode() + facts))


def opened(fields: Sequence[str | bytes]) -> protocol.Alias:
    """Return the alias that has these fields; raise DamagedAliasError if a single bit has changed."""
    try:
        alias = protocol.Alias(*fields)  # type: ignore[arg-type] # checked in the next line
        framing.check(alias)
    except (TypeError, ProtocolError):
        raise DamagedAliasError("an alias is malformed") from None
    if alias != sealed(*alias[:3]):
        raise DamagedAliasError("the seal of an alias differs", alias.seal)
    return alias
