"""Measures a put that has to evict one entry, in stores of different sizes: steps of SQLite, and time."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from xcache.wire import protocol
from xcached.store.entries import Source, Writer
from xcached.store.evictor import Evictor
from xcached.store.limits import Limits
from xcached.store.store import Store

# As many entries have one program as is usual; some programs are shared by many.
_SHARERS = 3
_SIZE = 100
_ROUNDS = 200
_STEPS_AT_ONCE = 10


def main() -> None:
    """Measure, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description="Measure a put that evicts one entry.")
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    for count in options.counts:
        with tempfile.TemporaryDirectory(prefix="xcache-room-") as folder:
            found[count] = measure(Path(folder), count)
        if not options.json:
            steps, milliseconds, opening = (found[count][name] for name in ("steps", "milliseconds", "opening"))
            print(
                f"{count:>9,} entries: {steps:,.0f} steps and {milliseconds:.2f} ms for each put that evicts one;"
                f" {opening:.0f} ms to open",
                flush=True,
            )
    if options.json:
        json.dump(found, sys.stdout)


def measure(folder: Path, count: int) -> dict[str, float]:
    """Return medians over puts into a store of so many entries, each of which evicts one."""
    fill(folder, count)
    began = time.perf_counter()
    store = Store(folder)
    opening = (time.perf_counter() - began) * 1e3
    totals = store.totals_now()
    # The store has no room for one more entry.
    store.set_limits(Limits(max_size=totals["bytes"] + totals["text_bytes"] + totals["other_bytes"] + _SIZE // 2))
    evictor = Evictor(store)
    counted, times = [], []
    for number in range(_ROUNDS):
        steps = Steps(store)
        began = time.perf_counter()
        put(store, count + number)
        # Without this, such small entries would be too many before they reach the limit of size.
        with mock.patch("xcached.store.limits.LEAST_ROOM", 1):
            freed = evictor.evict_some()
        times.append((time.perf_counter() - began) * 1e3)
        counted.append(steps.end())
        assert freed is not None and freed.entries == 1, freed
    store.close()
    return {"steps": statistics.median(counted), "milliseconds": statistics.median(times), "opening": opening}


class Steps:
    """Counts the steps of SQLite's machine, in tens."""

    def __init__(self, store: Store) -> None:
        self._count = 0
        self._database = store.database.writing
        self._database.set_progress_handler(self._step, _STEPS_AT_ONCE)

    def end(self) -> int:
        """Stop, and return how many there were."""
        self._database.set_progress_handler(None, 0)
        return self._count * _STEPS_AT_ONCE

    def _step(self) -> int:
        self._count += 1
        return 0


def fill(folder: Path, count: int) -> None:
    """Make a store of so many entries, as if each had been put, by writing its rows at once."""
    Store(folder).close()
    store = Store(folder)
    database = store.database.writing
    put(store, -1)
    columns = [name for _, name, *_ in database.execute("PRAGMA table_info(entries)")]
    (row,) = database.execute("SELECT * FROM entries").fetchall()
    like = dict(zip(columns, row, strict=True))
    places = ", ".join(f":{name}" for name in columns)

    def rows() -> object:
        for number in range(count):
            yield like | {
                "key": _digest(f"key {number}"),
                "blob": _digest(f"content {number}"),
                "program": _digest(f"program {number // _SHARERS}"),
                "used_order": number + 2,
                # The entries to go first are scattered over the whole store.
                "worth": like["worth"] - 1 + int(_digest(f"worth {number}")[:12], 16) / 2**48,
            }

    with store.transaction():
        database.executemany(
            "INSERT INTO blobs (digest, stored_size, content) VALUES (?, ?, NULL)",
            ((_digest(f"content {number}"), _SIZE) for number in range(count)),
        )
        database.executemany(
            "INSERT INTO programs (digest, writer_uid, raw_size, codec, blob) VALUES (?, 1, 0, 'none', ?)",
            ((_digest(f"program {number}"), _digest("")) for number in range((count + _SHARERS - 1) // _SHARERS)),
        )
        database.executemany(f"INSERT INTO entries ({', '.join(columns)}) VALUES ({places})", rows())  # noqa: S608
    store.close()


def put(store: Store, number: int) -> None:
    """Put one more entry, of the usual size, with a program of its own."""
    names = ("program", *protocol.DESCRIBED_COMPONENTS)
    message = protocol.Put(
        key=_digest(f"key {number}"),
        overwrite=False,
        module_name="jit_f",
        platform="cpu",
        device_kind="cpu",
        jaxlib_version="0",
        codec="none",
        raw_size=_SIZE,
        compile_seconds=1.0,
        digest=_digest(f"content {number}"),
        stored_size=_SIZE,
        program_digest=_digest(f"program of {number}"),
        program_raw_size=0,
        program_stored_digest=_digest(""),
        program_stored_size=0,
        components={name: _digest(name) for name in names},
        details={name: name for name in protocol.DESCRIBED_COMPONENTS},
        payload=None,
        program=None,
    )
    with store.transaction():
        executable = Source(message.digest, _SIZE, b"x" * _SIZE, None)
        store.put(message, executable, Source(message.program_stored_digest, 0, b"", None), Writer(1, 1, "measure"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
