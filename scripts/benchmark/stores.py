"""Stores with many entries, written by SQL: putting a million of them through the daemon would take an hour."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from xcache.wire.protocol import DESCRIBED_COMPONENTS
from xcache.wire.schema import SCHEMA_VERSION
from xcached.store.store import Store

# Bytes of an executable and of its program: small, because only the number of rows matters here.
SIZE, PROGRAM_SIZE = 400, 200


def key(number: int) -> str:
    """Return the key of an entry; those of ``number`` from 0 on are there, others are not."""
    return hashlib.sha256(b"%d" % number).hexdigest()


def fill(store: Path, count: int) -> float:
    """Make a store of so many entries, as if they had been put one after the other; returns the seconds it took."""
    started = time.perf_counter()
    Store(store).close()
    with closing(sqlite3.connect(store / "store.db", isolation_level=None)) as db:
        for pragma in ("synchronous = OFF", "journal_mode = MEMORY", "cache_size = -500000"):
            db.execute(f"PRAGMA {pragma}")
        # Indexes and triggers come back afterwards: sorting once is quicker than a million insertions.
        later = db.execute(
            "SELECT type, name, sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
        ).fetchall()
        for kind, name, _ in later:
            db.execute(f'DROP {kind} "{name}"')
        db.execute("BEGIN")
        _insert(db, count)
        for _, _, sql in later:
            db.execute(sql)
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
    return time.perf_counter() - started


def _insert(db: sqlite3.Connection, count: int) -> None:
    uid, now, chance = os.getuid(), time.time(), random.Random(0)  # noqa: S311 - nothing secret
    components = {name: hashlib.sha256(name.encode()).hexdigest() for name in DESCRIBED_COMPONENTS}
    rows = [(digest, name, name, count) for name, digest in components.items()]
    db.executemany("INSERT INTO components (digest, name, description, uses) VALUES (?, ?, ?, ?)", rows)
    order = list(range(1, count + 1))
    chance.shuffle(order)

    def blobs() -> Iterator[tuple[str, int, bytes]]:
        # In the order of their digests, so that the table's own index grows at its end.
        for digest, size in sorted(
            (_digest(kind, number), size)
            for kind, size in (("executable", SIZE), ("program", PROGRAM_SIZE))
            for number in range(count)
        ):
            yield digest, size, chance.randbytes(size)

    db.executemany("INSERT INTO blobs (digest, stored_size, content) VALUES (?, ?, ?)", blobs())
    db.executemany(
        "INSERT INTO programs (digest, writer_uid, raw_size, codec, blob) VALUES (?, ?, ?, 'zstd', ?)",
        ((key(-1 - n), uid, 3 * PROGRAM_SIZE, _digest("program", n)) for n in range(count)),
    )
    db.executemany(
        "INSERT INTO entries (key, writer_uid, module_name, platform, device_kind, jaxlib_version, blob, codec,"
        " raw_size, stored_size, compile_seconds, created_at, last_used_at, used_order, hits, writer_pid,"
        " writer_program, program, footprint, options_component, flags_component, platform_component,"
        " toolchain_component) VALUES (?, ?, 'jit_filler', 'cpu', 'cpu', '0.10.2', ?, 'zstd', ?, ?, 0.5, ?, ?, ?, 1, 1,"
        " 'filler', ?, ?, ?, ?, ?, ?)",
        (
            (
                *(key(n), uid, _digest("executable", n), 3 * SIZE, SIZE, now, now, order[n], key(-1 - n)),
                *(SIZE + PROGRAM_SIZE, *components.values()),
            )
            for n in range(count)
        ),
    )
    stored = count * (SIZE + PROGRAM_SIZE)
    for name, amount in (("entries", count), ("bytes", stored)):
        db.execute("UPDATE totals SET amount = ? WHERE name = ?", (amount, name))
    db.execute("INSERT INTO users VALUES (?, ?, ?)", (uid, count, stored))


def _digest(kind: str, number: int) -> str:
    return hashlib.sha256(f"{kind} {number}".encode()).hexdigest()


def copy_of_template(templates: Path, count: int, target: Path) -> None:
    """Copy a store of so many entries; it is made once and kept, since making a million takes minutes."""
    template = templates / f"{SCHEMA_VERSION}-{SIZE}-{PROGRAM_SIZE}-{count}"
    if not template.exists():
        aside = template.with_suffix(f".{os.getpid()}")
        aside.mkdir(parents=True, mode=0o700)
        fill(aside, count)
        aside.rename(template)
    shutil.copytree(template, target)
    target.chmod(0o700)
    # The writing to disk is over before the measurement begins.
    os.sync()


def settle(store: Path) -> None:
    """Read the whole store, so that it is in the page cache, as if just written."""
    for path in store.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass
