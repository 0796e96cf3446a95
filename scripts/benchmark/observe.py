"""Runs one program in this process and says, in a line of JSON, where its time went and what it computed.

``PROGRAM=NAME python observe.py [--phases]``. It measures the same with every cache: the time of jax's compile path,
by jax's own events. The program's name is in the environment, so that for xcache's predictions all programs are one
script.
"""

from __future__ import annotations

import time

FIRST_LINE = time.perf_counter()

import atexit  # noqa: E402  # the clock runs from the first line
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, ClassVar  # noqa: E402

import programs  # noqa: E402

# xcache leaves all compiles to a jax with functions of others in it, so that its runs measure functions of xcache.
IS_XCACHE = os.environ.get("XCACHE") == "1"
_OF_JAX = (
    ("jax._src.cache_key", "", "get", "key"),
    ("jax._src.compilation_cache", "", "_get_cache", "wait for the store"),
    ("jax._src.compilation_cache", "", "get_executable_and_time", "load from a file"),
    ("jax._src.compilation_cache", "", "decompress_executable", "verify and decompress"),
    ("jaxlib.xla_client", "Client", "deserialize_executable", "deserialize"),
    ("jax._src.compilation_cache", "", "compress_executable", "compress"),
    ("jax._src.lru_cache", "LRUCache", "put", "write the file"),
    ("jax._src.lru_cache", "LRUCache", "get", "wait for the store"),
    ("jax._src.compiler", "", "backend_compile_and_load", "compile"),
)
_OF_XCACHE = (
    ("xcache.keys.describe", "Surroundings", "components", "key"),
    ("xcache.client.client", "Client", "get", "wait for the store"),
    ("xcache.client.client", "Client", "announce", "announce the toolchain"),
    ("xcache.client.pool", "Pool", "note", "notes to the daemon"),
    ("xcache.client.client", "Client", "put", "send to the daemon"),
    ("xcache.wire.envelope", "", "open_sealed", "verify and decompress"),
    ("xcache.wire.envelope", "", "compress", "compress"),
    ("xcache.hook.wrapper", "", "deserialize", "deserialize"),
    ("xcache.hook.ahead", "", "deserialize", "deserialize"),
    ("xcache.hook.wrapper", "_Compiling", "_compile_now", "compile"),
)


class Watch:
    """Adds up the time inside some functions, on the main thread and on others, less that of timed ones inside."""

    def __init__(self) -> None:
        self.main: dict[str, float] = defaultdict(float)
        self.behind: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside = threading.local()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function, where there is such a function, by one that counts its time."""
        original = getattr(owner, attribute, None)
        if original is not None:
            setattr(owner, attribute, self.timed(original, name))

    def timed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that does the same and counts its own time, without that of timed functions inside it."""

        def measured(*arguments: Any, **named: Any) -> Any:
            stack = self._inside.__dict__.setdefault("stack", [])
            stack.append(0.0)
            start = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                took = time.perf_counter() - start
                inside = stack.pop()
                if stack:
                    stack[-1] += took
                here = self.main if threading.current_thread() is threading.main_thread() else self.behind
                here[name] += took - inside
                self.calls[name] += 1

        return measured


def watch_serializing(watch: Watch) -> None:
    """Measure, in every run, serialize(), and beside jax's own cache the import of scipy for its LAPACK."""
    if IS_XCACHE:
        watch.wrap(importlib.import_module("xcache.hook.wrapper"), "serialize", "serialize")
        return
    from jax._src.lib import lapack
    from jaxlib import xla_client

    watch.wrap(xla_client.LoadedExecutable, "serialize", "serialize")
    watch.wrap(lapack._lapack, "initialize", "lapack")


def watch_phases(watch: Watch) -> None:
    """Measure, for a profile, the parts of the compile path, in xcache and in jax's cache."""
    for module, owner_name, attribute, name in _OF_XCACHE if IS_XCACHE else _OF_JAX:
        found = importlib.import_module(module)
        watch.wrap(getattr(found, owner_name) if owner_name else found, attribute, name)


class Phases:
    """The main thread's times of tracing, lowering and compiling, by jax's events; nested ones count once."""

    EVENTS: ClassVar = {
        "jaxpr_trace_duration": "trace",
        "jaxpr_to_mlir_module_duration": "lower",
        "backend_compile_duration": "compile path",
    }

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = {name: [] for name in self.EVENTS.values()}
        self.asked = self.hits = 0

    def __call__(self, event: str, seconds: float, **_: Any) -> None:
        name = self.EVENTS.get(event.rpartition("/")[2])
        self.asked += name == "compile path"
        if name and threading.current_thread() is threading.main_thread():
            now = time.perf_counter()
            self.spans[name].append((now - seconds, now))

    def note_hit(self, event: str, **_: Any) -> None:
        """Count what came from a cache: both give the event of jax's own."""
        self.hits += event == "/jax/compilation_cache/cache_hits"

    def seconds(self, name: str) -> float:
        """Return the length of all spans of a name together."""
        total, reached = 0.0, 0.0
        for start, end in sorted(self.spans[name]):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


def digest_of(result: Any) -> str:
    """Return a digest of all arrays in a result."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for leaf in jax.tree.leaves(result):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def main() -> None:
    """Run the named program; report at exit, after everything else that happens there."""
    name, phases = os.environ["PROGRAM"], "--phases" in sys.argv
    report: dict[str, Any] = {"first line": FIRST_LINE}
    watch, told = Watch(), Phases()
    atexit.register(tell, report, watch, told, phases)
    for module in ("jax", *programs.IMPORTS.get(name, ())):
        importlib.import_module(module)
    imported = time.perf_counter()
    import jax

    jax.devices()
    ready = time.perf_counter()
    # Innermost first: the outer function measures the inner one as well.
    if phases:
        watch_phases(watch)
    jax.monitoring.register_event_duration_secs_listener(told)
    jax.monitoring.register_event_listener(told.note_hit)
    watch_serializing(watch)
    began = time.perf_counter()
    report["digest"] = digest_of(programs.PROGRAMS[name]())
    ended = time.perf_counter()
    report |= {"import": imported - FIRST_LINE, "backend": ready - imported, "program": ended - began, "ended": ended}


def tell(report: dict[str, Any], watch: Watch, told: Phases, phases: bool) -> None:
    """Print the report, with the work that went on after the program."""
    report |= {
        **{name: told.seconds(name) for name in told.spans},
        "asked": told.asked,
        "compiled": told.asked - told.hits,
        "lapack": watch.main["lapack"],
        "serialize": watch.main["serialize"] + watch.behind["serialize"],
    }
    if phases:
        report["main thread"] = dict(watch.main) | {name: report[name] for name in ("trace", "lower")}
        report["behind"] = dict(watch.behind)
        report["calls"] = dict(watch.calls)
    if IS_XCACHE:
        import xcache

        counted = xcache.stats()
        report["stats"] = {"hits": counted.hits, "misses": counted.misses, "uncacheable": dict(counted.uncacheable)}
        report["stats"]["errors"] = dict(counted.errors)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
