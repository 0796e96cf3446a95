"""What one process counts about its own requests."""

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
    bytes_read: int = 0
    bytes_written: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    saved_seconds: float = 0.0
    wait_seconds: float = 0.0
    prefetched: int = 0
    prefetches_dropped: int = 0

    def __str__(self) -> str:
        text = f"{self.hits} hits, {self.misses} misses, {self.saved_seconds:.1f} s saved"
        for name, counts in (("uncacheable", self.uncacheable), ("errors", self.errors)):
            if counts:
                text += f"; {name}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
        return text
