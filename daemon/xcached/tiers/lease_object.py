"""The object of a lease that a machine holds in a tier, signed as entries are.

Whoever can write there can make nobody wait: a machine waits only for what a key that it trusts has signed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from xcache.errors import DamagedError
from xcache.wire import signed_header
from xcache.wire.bounded import Shape
from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys

MOST_BYTES = 2048
# Characters of a name, and the largest number.
_MOST_SHOWN, _LONGEST = 100, 1e10
# The clocks of machines differ by less, or each of the two compiles by itself.
_MOST_SKEW_SECONDS = 300.0
# The name of the object, and what it says of the lease.
_FIELDS = 10
_KIND = signed_header.Kind("lease", b"xclease\0", 2, MOST_BYTES, Shape(_FIELDS, 0, 1))


class Held(NamedTuple):
    """A lease: who holds it, and how far the compile is."""

    # The daemon's; a new one at each start.
    holder: str
    # A number that changes while the holder lives.
    beats: int
    host: str
    pid: int
    program: str
    # Since the compile began, and what the holder expects it to take; 0 if unknown.
    seconds: float
    expected: float
    # The compile is over, and no entry comes of it.
    ended: bool = False
    # When this was signed, in seconds of the epoch.
    at: float = 0.0
    # The id of the key that has signed this, and will sign the entry; empty if none does.
    signer: str = ""

    def is_recent(self, now: float) -> bool:
        """Return whether this was signed a short time ago, so that nobody waits for what was signed before."""
        return abs(now - self.at) <= _MOST_SKEW_SECONDS

    def encoded(self, name: str, signer: PrivateKey | None) -> bytes:
        """Return the object of this name."""
        short = self._replace(host=_text(self.host)[:_MOST_SHOWN], program=_text(self.program)[:_MOST_SHOWN])
        return signed_header.written(_KIND, [name, *short[:-1]], signer)


class Found(NamedTuple):
    """A lease that was found, and why nobody here waits for it; empty if a trusted key has signed it."""

    held: Held
    why_not: str


def decoded(
    content: bytes, name: str, trusted: TrustedKeys, now: float, *, trust_unsigned: bool = False
) -> Found | None:
    """Return the lease that an object of this name is; None if it is none."""
    view = memoryview(content)
    try:
        whole = signed_header.bytes_before_contents(_KIND, view) == len(view)
        why_not, values = signed_header.shown(_KIND, view, trusted, now, trust_unsigned=trust_unsigned)
    except DamagedError:
        return None
    if not whole or len(values) != _FIELDS or values[0] != name:
        return None
    holder, beats, host, pid, program, seconds, expected, ended, at = values[1:]
    held = Held(
        holder=_text(holder),
        beats=int(_number(beats)),
        host=_text(host)[:_MOST_SHOWN],
        pid=int(_number(pid)),
        program=_text(program)[:_MOST_SHOWN],
        seconds=_number(seconds),
        expected=_number(expected),
        ended=ended is True,
        at=_number(at),
        signer=signed_header.signer_of(view),
    )
    return Found(held, why_not)


def _text(value: Any) -> str:
    # People see it; and half a surrogate pair, which is not printable either, could not be sent on.
    return "".join(filter(str.isprintable, value)) if isinstance(value, str) else ""


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= _LONGEST or not math.isfinite(value):
        return 0.0
    return float(value)
