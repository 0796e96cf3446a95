"""Serves the daemon's numbers to Prometheus, in its own text format or OpenMetrics, on threads of their own."""

from __future__ import annotations

import contextlib
import http.server
import logging
import socketserver
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcache.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("xcached")

# From a tenth of a millisecond, a usual answer, to a compile that others wait for.
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
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
_GAUGES = {
    "entries": ("store_entries", "entries in the store"),
    "bytes": ("store_bytes", "bytes of the contents in the store"),
    "max_size": ("store_limit_bytes", "bytes that the store may hold; 0 is no limit"),
    "connections": ("connections", "connected clients"),
    "compiles": ("leases", "compiles in progress"),
    "waiting": ("waiting", "requests that wait for another process's compile"),
    "saved_seconds": ("saved_seconds", "seconds that programs saved"),
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
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._seconds = prometheus_client.Histogram(
            "xcache_request_seconds", "time to answer a request", ["request"], registry=self._registry, buckets=_BUCKETS
        )
        handler = prometheus_client.MetricsHandler.factory(self._registry)
        self._path, self._server = _listening(address, handler)
        threading.Thread(target=self._server.serve_forever, name="xcached-metrics", daemon=True).start()
        logger.info("serves metrics on %s", address)

    def observe(self, request: str, seconds: float) -> None:
        """Count a request that was answered."""
        self._seconds.labels(request).observe(seconds)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def collect(self) -> Iterator[Metric]:
        """Yield what the store's statistics say now; prometheus_client calls this for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counted = self._statistics()
        for name, (metric, meaning) in _COUNTERS.items():
            yield CounterMetricFamily(f"xcache_{metric}", meaning, value=max(0.0, counted.get(name, 0.0)))
        for group, (metric, label, meaning) in _LABELED.items():
            family = CounterMetricFamily(f"xcache_{metric}", meaning, labels=[label])
            of_group = {
                name.partition(":")[2]: value for name, value in counted.items() if name.startswith(f"{group}:")
            }
            if group == "causes":
                of_group["unknown"] = counted.get("misses", 0.0) - sum(of_group.values())
            for value_of_label, amount in of_group.items():
                family.add_metric([value_of_label], max(0.0, amount))
            yield family
        now = {**counted, **self._state()}
        for name, (metric, meaning) in _GAUGES.items():
            yield GaugeMetricFamily(f"xcache_{metric}", meaning, value=now.get(name, 0.0))

    def _statistics(self) -> dict[str, float]:
        try:
            with contextlib.closing(sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT name, amount FROM statistics UNION SELECT name, amount FROM totals")
                return {str(name): float(amount) for name, amount in rows}
        except sqlite3.Error as error:
            logger.warning("the statistics cannot be read for metrics: %s", error)
            return {}


def _listening(address: str, handler: Any) -> tuple[Path | None, socketserver.BaseServer]:
    """Return a server at ``host:port``, or at the path of a socket, which is returned, too."""
    try:
        if "/" in address:
            path = Path(address)
            path.unlink(missing_ok=True)
            return path, _UnixServer(address, handler)
        host, _, port = address.rpartition(":")
        return None, _TcpServer((host.strip("[]"), int(port)), handler)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served on {address}: {error.strerror or error}") from None


class _TcpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
