"""Every operation of a tier, and what it says where something is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.engines import SECRET
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import Tier, TierError

_TIMEOUT = 1.0
_MOST = 2**20
_OPERATIONS: dict[str, Callable[[Tier], Any]] = {
    "get": lambda tier: tier.get("a", _MOST),
    "contains": lambda tier: tier.contains("a"),
    "put": lambda tier: tier.put("a", b"content"),
    "put of much": lambda tier: tier.put("a", b"c" * 2**20),
    "create": lambda tier: tier.create("b", b"content"),
    "remove": lambda tier: tier.remove("a"),
    "list": lambda tier: _listed(tier),
}


async def _listed(tier: Tier) -> None:
    async for _ in tier.listed(""):
        pass


async def kinds(url: str, timeout: float = _TIMEOUT) -> dict[str, str]:
    """Return the kind of error of each operation, "" for none; check its time, and that it tells no secrets."""
    tier = open_tier(url, timeout)
    found = {}
    for name, operation in _OPERATIONS.items():
        if (name == "create" and not tier.can_create) or (name == "list" and not tier.can_list):
            continue
        begin = time.monotonic()
        try:
            await operation(tier)
        except TierError as error:
            found[name] = error.kind
            told = f"{error} {error!r} {error.__cause__!r}" + ("" if error.__suppress_context__ else repr(error))
            assert SECRET not in told
            assert len(str(error)) < 300
        else:
            found[name] = ""
        assert time.monotonic() - begin < timeout + 1.0, name
    await tier.close()
    return found
