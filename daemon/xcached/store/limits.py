"""The limits of a store."""

from __future__ import annotations

from typing import NamedTuple

# A limit in bytes also limits the number of entries, as if each had this size: the smallest have rows and texts, too.
LEAST_ROOM = 4096


class Limits(NamedTuple):
    """The limits in force; 0 is no limit. Only the writer thread replaces a store's."""

    max_size: int = 0
    # Bytes of one user's entries; 0 unless users share the store.
    user_quota: int = 0
    max_entries: int = 0
    # In seconds since the last use.
    max_age: float = 0.0
    # Bytes, or a share of the disk with a percent sign.
    min_free: str = "0"
    # Bytes of the ledger; 0 keeps none.
    max_ledger: int = 0

    def most_entries(self) -> int:
        """Return how many entries there may be; 0 is no limit."""
        most = [self.max_entries, max(1, self.max_size // LEAST_ROOM) if self.max_size else 0]
        return min(filter(None, most), default=0)

    def most_entries_of_one_user(self) -> int:
        """Return how many entries the quota allows one user."""
        return max(1, self.user_quota // LEAST_ROOM)
