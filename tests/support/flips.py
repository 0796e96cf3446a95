"""A program that damages its own store in one way after another, and checks what it gets to run.

``test_byte_flips.py`` runs it; it prints a JSON object for each trial, and one at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xcache import process_cache
from xcache.wire import envelope, hashing, header

STORE = Path(os.environ["XCACHE_DIR"])
HEADER = header.SIZE


def compiled_programs() -> list[Callable[[], list[Any]]]:
    """Return real programs: three with small executables, and one large enough for a file."""
    import jax
    import numpy as np

    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    constant = np.random.RandomState(0).randn(64, 2048).astype(np.float32)
    functions = [lambda v, k=k: v * k + 1 for k in range(3)] + [lambda v: v.reshape(-1) @ constant]
    return [lambda function=function: np.asarray(jax.jit(function)(x)).tolist() for function in functions]


class Damager:
    """Alters entries behind the daemon's back."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose

    def entries(self) -> list[tuple[str, str, bool]]:
        """Return key, content and whether it is in a file, of all entries."""
        return self._sql(
            "SELECT key, blob, content IS NULL FROM entries JOIN blobs ON blobs.digest = entries.blob ORDER BY key"
        )

    def envelope(self, key: str, part: str) -> None:
        """Flip a bit in one part of the sealed bytes, in a row or a file."""
        self._alter(key, lambda content: self._flipped(content, part))

    def resealed(self, key: str, part: str) -> None:
        """Do the same and fix the digest, so that only the inner checks can find it."""
        blob, in_file = self._blob(key)
        content = self._flipped(self._read(blob, in_file), part)
        self._replace(key, blob, in_file, content)

    def cut(self, key: str, _: str) -> None:
        """Cut off some bytes, or all."""
        self._alter(key, lambda content: content[: self.choose.choice((0, 1, self.choose.randrange(len(content))))])

    def lengthened(self, key: str, _: str) -> None:
        """Append some bytes."""
        self._alter(key, lambda content: content + self.choose.randbytes(self.choose.randrange(1, 100)))

    def swapped(self, key: str, _: str) -> None:
        """Replace the bytes with another entry's."""
        other = self.choose.choice([blob for name, blob, _ in self.entries() if name != key])
        content = self._read(other, self._is_in_file(other))
        self._alter(key, lambda _: content)

    def pointed_elsewhere(self, key: str, _: str) -> None:
        """Point the row at another entry's content, with its right digest."""
        other = self.choose.choice([blob for name, blob, _ in self.entries() if name != key])
        self._sql("UPDATE entries SET blob = ? WHERE key = ?", other, key)

    def foreign(self, key: str, _: str) -> None:
        """Replace the bytes with a whole entry of another toolchain's key, with its right digest."""
        blob, in_file = self._blob(key)
        raw = envelope.open_sealed(key, blob, self._read(blob, in_file))
        self._replace(key, blob, in_file, envelope.seal(hashing.digest(f"foreign {key}".encode()), raw))

    def column(self, key: str, name: str) -> None:
        """Alter a column of the entry's rows."""
        blob, _ = self._blob(key)
        if name == "digest":
            altered = f"{int(blob, 16) ^ (1 << self.choose.randrange(256)):064x}"
            self._sql("UPDATE entries SET blob = ? WHERE key = ?", altered, key)
            self._sql("UPDATE OR IGNORE blobs SET digest = ? WHERE digest = ?", altered, blob)
        elif name == "reference":
            altered = f"{int(blob, 16) ^ (1 << self.choose.randrange(256)):064x}"
            self._sql("UPDATE entries SET blob = ? WHERE key = ?", altered, key)
        elif name == "stored_size":
            self._sql("UPDATE blobs SET stored_size = stored_size + ? WHERE digest = ?", self._amount(), blob)
        else:
            self._sql("UPDATE entries SET raw_size = raw_size + ?, codec = 'none' WHERE key = ?", self._amount(), key)

    def _amount(self) -> int:
        return self.choose.choice((-1, 1, 1 << 40))

    def _flipped(self, content: bytes, part: str) -> bytes:
        begin, end = {
            "magic": (0, 8),
            "key": (8, 40),
            "size": (40, 48),
            "frame header": (HEADER, HEADER + 9),
            "middle": (HEADER + 9, len(content) - 4),
            "checksum": (len(content) - 4, len(content)),
        }[part]
        altered = bytearray(content)
        altered[self.choose.randrange(begin, end)] ^= 1 << self.choose.randrange(8)
        return bytes(altered)

    def _alter(self, key: str, change: Callable[[bytes], bytes]) -> None:
        blob, in_file = self._blob(key)
        content = change(self._read(blob, in_file))
        if in_file:
            self._path(blob).write_bytes(content)
        else:
            self._sql("UPDATE blobs SET content = ? WHERE digest = ?", content, blob)

    def _replace(self, key: str, blob: str, in_file: bool, content: bytes) -> None:
        """Replace the bytes, and their digest and size in every place."""
        name = hashing.digest(content)
        self._sql(
            "INSERT OR REPLACE INTO blobs (digest, stored_size, content) VALUES (?, ?, ?)",
            name,
            len(content),
            None if in_file else content,
        )
        if in_file:
            self._path(name).parent.mkdir(exist_ok=True)
            self._path(name).write_bytes(content)
        self._sql("UPDATE entries SET blob = ?, stored_size = ? WHERE key = ?", name, len(content), key)

    def _blob(self, key: str) -> tuple[str, bool]:
        return next((blob, in_file) for name, blob, in_file in self.entries() if name == key)

    def _is_in_file(self, blob: str) -> bool:
        return bool(self._sql("SELECT content IS NULL FROM blobs WHERE digest = ?", blob)[0][0])

    def _read(self, blob: str, in_file: bool) -> bytes:
        if in_file:
            return self._path(blob).read_bytes()
        return self._sql("SELECT content FROM blobs WHERE digest = ?", blob)[0][0]

    @staticmethod
    def _path(blob: str) -> Path:
        return STORE / "blobs" / blob[:2] / blob

    @staticmethod
    def _sql(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(STORE / "store.db", timeout=10)) as connection, connection:
            return connection.execute(statement, values).fetchall()


PARTS = ("magic", "key", "size", "frame header", "middle", "checksum")
# A kind of damage, its argument, and whether the entry may survive it.
WAYS: list[tuple[str, str, bool]] = [
    *(("envelope", part, False) for part in PARTS),
    *(("resealed", part, False) for part in PARTS),
    ("cut", "", False),
    ("lengthened", "", False),
    ("swapped", "", False),
    ("pointed_elsewhere", "", False),
    ("foreign", "", False),
    ("column", "digest", False),
    ("column", "reference", False),
    # An entry still loads with these columns wrong.
    ("column", "stored_size", True),
    ("column", "description", True),
]


def stored(expected: int) -> bool:
    """Wait until every compiled program has been stored."""
    deadline = time.monotonic() + 20
    used = process_cache.current()
    while used.statistics().stores < expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return used.statistics().stores >= expected


def run(programs: list[Callable[[], list[Any]]]) -> list[Any]:
    """Run every program as a fresh process would: jax's own caches are cleared."""
    import jax

    jax.clear_caches()
    return [program() for program in programs]


def main() -> None:
    rounds, seed = int(sys.argv[1]), int(sys.argv[2])
    choose = random.Random(seed)
    programs, damager = compiled_programs(), Damager(choose)
    expected = run(programs)
    used = process_cache.current()
    assert stored(len(programs)), used.statistics()
    for number in range(rounds):
        way, part, may_be_whole = WAYS[number % len(WAYS)]
        entries = damager.entries()
        # Take turns, so that every kind of damage meets rows and files.
        key, _, in_file = entries[(number // len(WAYS) + number) % len(entries)]
        said = {"way": f"{way} {part}".strip(), "where": "file" if in_file else "row"}
        before = used.statistics()
        getattr(damager, way)(key, part)
        results = run(programs)
        after = used.statistics()
        found = after.hits - before.hits
        missed = len(programs) - found
        healed = stored(before.stores + missed)
        again = run(programs)
        said |= {
            "right": results == expected == again,
            "noticed": missed == 1 or (may_be_whole and missed == 0),
            "healed": healed and used.statistics().hits - after.hits == len(programs),
            "errors": {
                kind: n - before.errors.get(kind, 0)
                for kind, n in after.errors.items()
                if n != before.errors.get(kind, 0)
            },
            "missed": missed,
        }
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"over": True}) + "\n")


if __name__ == "__main__":
    main()
