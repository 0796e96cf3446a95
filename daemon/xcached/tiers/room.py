"""Bounds for the bytes of objects that are in memory at once: whoever can write to a tier can put large ones there."""

from __future__ import annotations

import asyncio

# Bytes of the largest object that is fetched, and of those of which many may come at once.
MOST_BYTES, FEW_BYTES = 1024**3, 16 * 1024**2
_FEW_AT_ONCE, _MOST_AT_ONCE = 32, 1


class Room:
    """Room for objects from all tiers of a daemon. Belongs to the loop of the tiers' thread."""

    def __init__(self) -> None:
        self.small = asyncio.Semaphore(_FEW_AT_ONCE)
        self.large = asyncio.Semaphore(_MOST_AT_ONCE)
