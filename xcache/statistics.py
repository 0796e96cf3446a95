"""The statistics of one process's requests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A snapshot: every request ends as a hit, a miss or uncacheable; errors are counted beside them."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    stores: int = 0
    uncacheable: dict[str, int] = dataclasses.field(default_factory=dict)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    lowerings: dict[str, int] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    # Misses by cause.
    causes: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    wait_seconds: float = 0.0
    prefetched: int = 0
    prefetches_dropped: int = 0
    # Time lost waiting for the daemon; XCACHE_TIMEOUT bounds it.
    lost_seconds: float = 0.0

    def __str__(self) -> str:
        hits, misses = f"{self.hits} hit{'s' * (self.hits != 1)}", f"{self.misses} miss{'es' * (self.misses != 1)}"
        text = f"{hits}, {misses}, {round(self.saved_seconds, 1) + 0.0:.1f} s saved"
        groups = ("lowerings", self.lowerings), ("uncacheable", self.uncacheable), ("errors", self.errors)
        for name, counts in groups:
            if counts:
                text += f"; {name}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        return text
