"""Why the cache had nothing: from the daemon's answer, and a comparison with the entry that is most like it."""

from __future__ import annotations

from xcache.client.contents import Absent
from xcache.keys import Key
from xcache.wire import protocol

# The components of an entry in ``Absent.nearest``, after its key.
_COMPARED = protocol.DESCRIBED_COMPONENTS


def cause_of(key: Key, absent: Absent) -> str:
    """Return the cause of a miss, one of ``ledger.CAUSES``, perhaps with details after a colon."""
    if absent.cause:
        return absent.cause
    if absent.nearest is not None:
        return "; ".join(f"other {name}" for name in differences(key, absent.nearest)) or "other version of xcache"
    return "waited in vain" if absent.waited else "no daemon"


def differences(key: Key, nearest: list[str]) -> list[str]:
    """Return the names of the components in which a key differs from an entry of the same program."""
    return [name for name, digest in zip(_COMPARED, nearest[1:], strict=False) if key.components.get(name) != digest]
