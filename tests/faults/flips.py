"""A program that damages its own store, in one way after the other, and looks at what it gets to run.

Run as a program by ``test_byte_flips.py``; it says one JSON object for each trial, and one at the end.
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

from xcache import cache, keys, payload

STORE = Path(os.environ["XCACHE_DIR"])
HEADER = 8 + 32 + 8


def compiled_programs() -> list[Callable[[], list[Any]]]:
    """Programs as they run in earnest: three whose executables are small, and one whose is large enough for a file."""
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
        """Key, content and whether it is in a file, of all entries."""
        return self._sql(
            "SELECT key, blob, content IS NULL FROM entries JOIN blobs ON blobs.digest = entries.blob ORDER BY key"
        )

    def envelope(self, key: str, part: str) -> None:
        """One bit of a part of the sealed bytes, wherever they are kept."""
        self._alter(key, lambda content: self._flipped(content, part))

    def resealed(self, key: str, part: str) -> None:
        """The same, with a digest that fits: what is inside has to tell."""
        blob, in_file = self._blob(key)
        content = self._flipped(self._read(blob, in_file), part)
        self._replace(key, blob, in_file, content)

    def cut(self, key: str, _: str) -> None:
        """Shorter by some bytes, or by all."""
        self._alter(key, lambda content: content[: self.choose.choice((0, 1, self.choose.randrange(len(content))))])

    def lengthened(self, key: str, _: str) -> None:
        """Longer by some bytes."""
        self._alter(key, lambda content: content + self.choose.randbytes(self.choose.randrange(1, 100)))

    def swapped(self, key: str, _: str) -> None:
        """The bytes of another entry in the place of its own."""
        other = self.choose.choice([blob for name, blob, _ in self.entries() if name != key])
        content = self._read(other, self._is_in_file(other))
        self._alter(key, lambda _: content)

    def pointed_elsewhere(self, key: str, _: str) -> None:
        """Another entry's content, with its right digest: whole, and not this one's."""
        other = self.choose.choice([blob for name, blob, _ in self.entries() if name != key])
        self._sql("UPDATE entries SET blob = ? WHERE key = ?", other, key)

    def foreign(self, key: str, _: str) -> None:
        """A whole entry of another key, as from another toolchain, with its right digest."""
        blob, in_file = self._blob(key)
        raw = payload.open_sealed(key, blob, self._read(blob, in_file))
        self._replace(key, blob, in_file, payload.seal(keys.digest(f"foreign {key}".encode()), raw))

    def column(self, key: str, name: str) -> None:
        """A column of its rows."""
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
        """Other bytes with their own digest and size, in every place that names them."""
        name = keys.digest(content)
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
# The way, what it is told, and whether the entry can be whole in spite of it.
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
    # What describes an entry beside its bytes is not needed to run it.
    ("column", "stored_size", True),
    ("column", "description", True),
]


def stored(expected: int) -> bool:
    """Wait until what was compiled has been stored."""
    deadline = time.monotonic() + 20
    used = cache.current()
    while used.statistics().stores < expected and time.monotonic() < deadline:
        time.sleep(0.002)
    return used.statistics().stores >= expected


def run(programs: list[Callable[[], list[Any]]]) -> list[Any]:
    """Run everything, as a fresh process would: jax itself remembers nothing."""
    import jax

    jax.clear_caches()
    return [program() for program in programs]


def main() -> None:
    rounds, seed = int(sys.argv[1]), int(sys.argv[2])
    choose = random.Random(seed)
    programs, damager = compiled_programs(), Damager(choose)
    expected = run(programs)
    used = cache.current()
    assert stored(len(programs)), used.statistics()
    for number in range(rounds):
        way, part, may_be_whole = WAYS[number % len(WAYS)]
        entries = damager.entries()
        # In turn, so that every way meets rows and files alike.
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
