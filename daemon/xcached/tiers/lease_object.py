"""The object of a lease that a machine holds in a tier.

It is not signed. Whoever writes there can make others wait, no longer than for a compile on their own machine, but not
load anything.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from xcache.wire.bounded import parsed_json

MOST_BYTES = 2048
# Characters of a name, and the largest number.
_MOST_SHOWN, _LONGEST = 100, 1e9


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
    # The id of the key that will sign the entry; empty if none does.
    signer: str
    # The compile is over, and no entry comes of it.
    ended: bool = False

    def encoded(self) -> bytes:
        """Return the object."""
        short = self._replace(host=self.host[:_MOST_SHOWN], program=self.program[:_MOST_SHOWN])
        return json.dumps(short._asdict(), ensure_ascii=False).encode(errors="replace")


def decoded(content: bytes) -> Held | None:
    """Return the lease that an object is; None if it is none."""
    try:
        said = parsed_json(content, MOST_BYTES)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    return Held(
        holder=_text(said.get("holder")),
        beats=int(_number(said.get("beats"))),
        host=_text(said.get("host"))[:_MOST_SHOWN],
        pid=int(_number(said.get("pid"))),
        program=_text(said.get("program"))[:_MOST_SHOWN],
        seconds=_number(said.get("seconds")),
        expected=_number(said.get("expected")),
        signer=_text(said.get("signer"))[:_MOST_SHOWN],
        ended=said.get("ended") is True,
    )


def _text(value: Any) -> str:
    # People see it; and half a surrogate pair, which is not printable either, could not be sent on.
    return "".join(filter(str.isprintable, value)) if isinstance(value, str) else ""


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= _LONGEST or not math.isfinite(value):
        return 0.0
    return float(value)
