"""Runs: the keys a program wanted, so that the next run of the same name gets them ahead of time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from xcache.wire import protocol
from xcached.store.store import Store

_MOST_RUNS_OF_ONE_USER = 200
# Runs with the same arguments. One is not enough: a script may do different things at different times.
_MOST_RUNS_OF_ONE_PROGRAM = 8
# Limit for the runs of all users together; a small store allows less.
_MOST_BYTES = 256 * 1024**2
_MOST_OPTIONS_BYTES = 1 << 18
# A row's bytes beside its texts, roughly; m007 in schema.py uses the same number.
_ROW_BYTES = 60
_FIELDS = {"key": str, "options": str, "devices": str, "platform": str, "seconds": float}

# An item of Remember or Prediction.
Wanted = dict[str, protocol.Scalar]


class Runs:
    """The rows of runs. The serving thread calls ``predict``; the rest belongs to the writer thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._reading = store.database.reading

    def predict(self, uid: int, message: protocol.Predict, most: int) -> tuple[list[Wanted], dict[str, bytes]]:
        """Return the first ``most`` items of this program's latest run, and the compile options by digest.

        A run with the same arguments is preferred.
        """
        row = self._reading.execute(
            "SELECT id, options FROM runs WHERE uid = ? AND program = ? ORDER BY arguments = ? DESC, id DESC LIMIT 1",
            (uid, message.program, message.arguments),
        ).fetchone()
        if row is None:
            return [], {}
        run, options = row
        rows = self._reading.execute(
            "SELECT key, options, devices, platform, seconds FROM wanted WHERE run = ? ORDER BY position LIMIT ?",
            (run, most),
        )
        return [dict(zip(_FIELDS, fields, strict=True)) for fields in rows], {
            name: bytes.fromhex(text) for name, text in json.loads(options).items()
        }

    def remember(self, uid: int, message: protocol.Remember) -> None:
        """Store a run in place of similar runs of the same program, and forget the oldest."""
        same = "uid = ? AND program = ? AND arguments = ?"
        # Similar: the new run wants at least half of the old run's keys. One that ended early spares longer ones.
        alike = (
            "(SELECT 2 * total(key IN (SELECT value FROM json_each(?))) >= count(*) FROM wanted WHERE run = runs.id)"
        )
        program = uid, message.program, message.arguments
        options = json.dumps({name: content.hex() for name, content in message.options.items()})
        rows = [tuple(item[name] for name in _FIELDS) for item in message.items]
        texts = [message.program, message.arguments, options, *(text for *some, _ in rows for text in some)]
        size = sum(len(str(text).encode()) for text in texts) + _ROW_BYTES * (1 + len(rows))
        with self._store.transaction():
            self._forget(f"{same} AND {alike}", *program, json.dumps([item["key"] for item in message.items]))
            (run,) = self._db.execute(
                "INSERT INTO runs (uid, program, arguments, options, ended_at, size) VALUES (?, ?, ?, ?, ?, ?)"
                " RETURNING id",
                (*program, options, time.time(), size),
            ).fetchone()
            self._db.executemany(
                "INSERT INTO wanted (run, position, key, options, devices, platform, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(run, position, *row) for position, row in enumerate(rows)],
            )
            of_all = "id IN (SELECT id FROM runs WHERE {} ORDER BY id DESC LIMIT -1 OFFSET ?)"
            self._forget(of_all.format(same), *program, _MOST_RUNS_OF_ONE_PROGRAM)
            self._forget(of_all.format("uid = ?"), uid, _MOST_RUNS_OF_ONE_USER)
            self._forget_what_is_too_large()

    def clear(self, uid: int | None) -> None:
        """Forget the runs of one user (None: of all)."""
        with self._store.transaction():
            self._forget("uid = coalesce(?, uid)", uid)

    def trim(self) -> None:
        """Forget the oldest runs until the rest fits."""
        with self._store.transaction():
            self._forget_what_is_too_large()

    def _forget_what_is_too_large(self) -> None:
        """Within a transaction: forget the oldest runs of the user with the most bytes, until the rest fits."""
        most = self._store.most_other_data(_MOST_BYTES)
        while True:
            sizes = self._db.execute("SELECT uid, sum(size) FROM runs GROUP BY uid ORDER BY 2 DESC").fetchall()
            excess = sum(size for _, size in sizes) - most
            if excess <= 0:
                return
            uid, largest = sizes[0]
            # Go down to the bytes of the next user, who then has the most.
            following = sizes[1][1] if len(sizes) > 1 else 0
            enough = min(excess, max(1, largest - following))
            self._forget(
                "id IN (SELECT id FROM (SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM runs"
                " WHERE uid = ?) WHERE before < ?)",
                uid,
                enough,
            )

    def _forget(self, which: str, *values: Any) -> None:
        ids = self._db.execute(f"SELECT id FROM runs WHERE {which}", values).fetchall()  # noqa: S608 - our own words
        self._db.executemany("DELETE FROM wanted WHERE run = ?", ids)
        self._db.executemany("DELETE FROM runs WHERE id = ?", ids)


def is_sound(message: protocol.Remember) -> bool:
    """Return whether a client's list is within the limits and well formed."""
    return (
        len(message.items) <= protocol.MAX_WANTED
        and sum(map(len, message.options.values())) <= _MOST_OPTIONS_BYTES
        and all(_is_item(item, message.options) for item in message.items)
    )


def _is_item(item: dict[str, Any], options: Sequence[str] | dict[str, bytes]) -> bool:
    types = {name: type(value) for name, value in item.items()}
    return types == _FIELDS and item["options"] in options and all(len(str(value)) < 5000 for value in item.values())
