"""The daemon's numbers for Prometheus, in its own text format or OpenMetrics.

They are sums over all users and programs. No label names a program, a user or a file: programs choose the reasons that
they count, so only the words before a colon are shown, and "other" for what is no short phrase.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from xcache import errors
from xcache.errors import ConfigError
from xcache.wire.ledger import CAUSES
from xcached.host.scrapes import Scrapes

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("xcached")

# From a tenth of a millisecond, a usual answer, to a compile that others wait for.
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
# Scrapes within this time get the same page, so that many of them cost little.
_FRESH_SECONDS = 1.0
# Statistics that only grow, and what they mean.
_COUNTERS = {
    "requests": ("requests", "programs that were asked for"),
    "hits": ("hits", "programs that were found"),
    "stores": ("stores", "executables that were stored"),
    "evictions": ("evictions", "entries that a limit took"),
    "quarantined": ("quarantined", "entries that were set aside"),
    "invalidated": ("invalidated", "entries whose toolchain went"),
    "bytes_read": ("read_bytes", "bytes of executables that programs got"),
    "bytes_written": ("written_bytes", "bytes of executables that programs stored"),
    "compile_seconds": ("compile_seconds", "seconds that compiling took"),
    "load_seconds": ("load_seconds", "seconds that loading took"),
    "wait_seconds": ("wait_seconds", "seconds that programs waited for others"),
}
# Statistics of which each has a label.
_LABELED = {
    "causes": ("misses", "cause", "programs that were compiled"),
    "uncacheable": ("uncacheable", "reason", "programs that cannot be cached"),
    "errors": ("errors", "kind", "errors that programs reported"),
    "lowerings": ("lowerings", "outcome", "lowerings: skipped, or why not"),
    "calls": ("calls", "outcome", "calls of xcache.jit: skipped, or why not"),
}
_UNKNOWN_CAUSE = "causes:unknown"
# A reason names a file, a type or a function after its colon.
_PHRASE, _OTHER = re.compile(r"[A-Za-z][A-Za-z0-9 ,()'_-]{0,59}"), "other"
# Labels of one kind: more than xcache has reasons.
_MOST_LABELS = 100
# Labels that are there from the start: Prometheus sees no increase in a series that begins with its first count.
_KNOWN = dict.fromkeys(
    (
        *(f"causes:{cause}" for cause in CAUSES),
        *(f"errors:{each.kind}" for each in vars(errors).values() if isinstance(getattr(each, "kind", None), str)),
    ),
    0.0,
)
_GAUGES = {
    "entries": ("store_entries", "entries in the store"),
    "bytes": ("store_bytes", "bytes of the contents in the store"),
    "max_size": ("store_limit_bytes", "bytes that the store may hold; 0 is no limit"),
    "connections": ("connections", "connected clients"),
    "compiles": ("leases", "compiles in progress"),
    "waiting": ("waiting", "requests that wait for another process's compile"),
    "saved_seconds": ("saved_seconds", "seconds that programs saved; a hit may cost more than it saves"),
}


class Metrics:
    """The metrics of one daemon, and the server of them."""

    def __init__(self, address: str, database: Path, state: Callable[[], Mapping[str, float]]) -> None:
        """``state`` returns numbers of this moment; any thread may call it."""
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError("metrics need prometheus_client: install jax-xcache[metrics]") from None
        self._database = database
        self._state = state
        self._counted: dict[str, float] = {}
        # By type: when each page was made, and the page.
        self._pages: dict[str, tuple[float, bytes]] = {}
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        prometheus_client.ProcessCollector(registry=self._registry)
        self._seconds = prometheus_client.Histogram(
            "xcache_request_seconds", "time to answer a request", ["request"], registry=self._registry, buckets=_BUCKETS
        )
        self._scrapes = Scrapes(address, self._page)
        logger.info("serves metrics on %s", address)

    def observe(self, request: str, seconds: float) -> None:
        """Count a request that was answered."""
        self._seconds.labels(request).observe(seconds)

    def close(self) -> None:
        """Stop serving."""
        self._scrapes.close()

    def collect(self) -> Iterator[Metric]:
        """Yield what the store's statistics say now; prometheus_client calls this for each page."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._update()
        for name, (metric, meaning) in _COUNTERS.items():
            yield CounterMetricFamily(f"xcache_{metric}", meaning, value=self._counted.get(name, 0.0))
        for group, (metric, label, meaning) in _LABELED.items():
            family = CounterMetricFamily(f"xcache_{metric}", meaning, labels=[label])
            for name, amount in _labels(group, _KNOWN | self._counted).items():
                family.add_metric([name], amount)
            yield family
        now = {**self._counted, **self._state()}
        for name, (metric, meaning) in _GAUGES.items():
            yield GaugeMetricFamily(f"xcache_{metric}", meaning, value=now.get(name, 0.0))

    def _page(self, accepted: str) -> tuple[bytes, str]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accepted)
        made_at, page = self._pages.get(kind, (0.0, b""))
        if not page or time.monotonic() - made_at >= _FRESH_SECONDS:
            page = encode(self._registry)
            self._pages[kind] = time.monotonic(), page
        return page, kind

    def _update(self) -> None:
        """Read the statistics; a counter does not get less, as Prometheus would take the daemon for a new one.

        Programs take counts back: of a miss that turned out not to be cacheable, say.
        """
        try:
            with contextlib.closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT name, amount FROM statistics UNION SELECT name, amount FROM totals")
                found = {str(name): float(amount) for name, amount in rows}
        except sqlite3.Error as error:
            logger.warning("the statistics cannot be read for metrics: %s", error)
            return
        causes = sum(amount for name, amount in found.items() if name.startswith("causes:"))
        found[_UNKNOWN_CAUSE] = found.get("misses", 0.0) - causes
        # `xcache stats --zero` begins anew.
        before = self._counted if found.get("since") == self._counted.get("since") else {}
        only_grow = (name for name in found if name in _COUNTERS or ":" in name)
        self._counted = found | {name: max(0.0, found[name], before.get(name, 0.0)) for name in only_grow}


def _labels(group: str, counted: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of a group's counts by what is shown of their reasons."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, amount in counted.items():
        of, _, reason = name.partition(":")
        if of != group:
            continue
        phrase = reason.partition(":")[0]
        is_shown = _PHRASE.fullmatch(phrase) and (phrase in sums or len(sums) < _MOST_LABELS)
        sums[phrase if is_shown else _OTHER] += amount
    return dict(sums)
