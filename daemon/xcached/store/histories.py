"""Histories: the keys a program wanted, so that the next one of the same name gets them ahead of time."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence

from xcache.wire import protocol
from xcache.wire.bounded import parsed_json
from xcache.wire.checks import FIELDS_OF_ITEM
from xcached.store.row_groups import RowGroups
from xcached.store.store import Store

_MOST_OF_ONE_USER = 200
# Histories with the same arguments. One is not enough: a script may do different things at different times.
_MOST_OF_ONE_PROGRAM = 8
# Limit for the histories of all users together; a small store allows less.
_MOST_BYTES = 256 * 1024**2
# This bounds the options of one history: hexadecimal digits in JSON, which a message brought.
_MOST_OPTIONS = 2 * protocol.MAX_FRAME
# A row's bytes beside its texts, roughly; m007 in schema.py uses the same number.
_ROW_BYTES = 60

# An item of Remember or Prediction.
Wanted = dict[str, protocol.Scalar]


class Histories:
    """The rows of histories. The serving thread calls ``predict``; the rest belongs to the writer thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._groups = RowGroups(store, "histories", "wanted", "history", lambda: _MOST_BYTES)
        self.clear, self.trim = self._groups.clear, self._groups.trim
        self.after_remember: Callable[[int, protocol.Remember], object] = lambda *_: None
        """Called within the transaction of each history."""
        self._reading = store.database.reading

    def predict(
        self, uid: int, others: Sequence[int], message: protocol.Predict, most: int
    ) -> tuple[list[Wanted], dict[str, bytes]]:
        """Return the first ``most`` items that this program wanted last time, and the compile options by digest.

        A history of the user's own counts first, then the newest of the ``others``.
        """
        found = newest_history(self._reading, [uid], message, most)
        return found if found[0] or not others else newest_history(self._reading, others, message, most)

    def remember(self, uid: int, message: protocol.Remember) -> None:
        """Store a history in place of similar ones of the same program, and forget the oldest."""
        same = "uid = ? AND program = ? AND arguments = ?"
        # Similar: it has at least half of the old one's keys. The history of a run that ended early spares longer ones.
        alike = (
            "(SELECT 2 * total(key IN (SELECT value FROM json_each(?))) >= count(*) FROM wanted"
            " WHERE history = histories.id)"
        )
        program = uid, message.program, message.arguments
        options = json.dumps({name: content.hex() for name, content in message.options.items()})
        rows = [tuple(item[name] for name in FIELDS_OF_ITEM) for item in message.items]
        texts = [message.program, message.arguments, options, *(text for *some, _ in rows for text in some)]
        size = sum(len(str(text).encode()) for text in texts) + _ROW_BYTES * (1 + len(rows))
        with self._store.transaction():
            self._groups.forget(f"{same} AND {alike}", *program, json.dumps([item["key"] for item in message.items]))
            (history,) = self._db.execute(
                "INSERT INTO histories (uid, program, arguments, options, ended_at, size) VALUES (?, ?, ?, ?, ?, ?)"
                " RETURNING id",
                (*program, options, time.time(), size),
            ).fetchone()
            self._db.executemany(
                "INSERT INTO wanted (history, position, key, options, devices, platform, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(history, position, *row) for position, row in enumerate(rows)],
            )
            self._groups.forget_older(_MOST_OF_ONE_PROGRAM, same, *program)
            self._groups.forget_older(_MOST_OF_ONE_USER, "uid = ?", uid)
            self._groups.forget_what_is_too_large()
            self.after_remember(uid, message)


def history_at(connection: sqlite3.Connection, uids: Sequence[int], position: int) -> tuple[str, str] | None:
    """Return the program and the arguments of a history of these users, in a fixed order; None after the last."""
    found: tuple[str, str] | None = connection.execute(
        "SELECT DISTINCT program, arguments FROM histories WHERE uid IN (SELECT value FROM json_each(?))"
        " ORDER BY program, arguments LIMIT 1 OFFSET ?",
        (json.dumps([*uids]), position),
    ).fetchone()
    return found


def keys_of_history(connection: sqlite3.Connection, uids: Sequence[int], program: str, arguments: str) -> list[str]:
    """Return the keys that a program of these users wanted last time."""
    sql = (
        "SELECT key FROM wanted WHERE history = (SELECT max(id) FROM histories"
        " WHERE uid IN (SELECT value FROM json_each(?)) AND program = ? AND arguments = ?) ORDER BY position"
    )
    return [str(key) for (key,) in connection.execute(sql, (json.dumps([*uids]), program, arguments))]


def newest_history(
    connection: sqlite3.Connection, uids: Sequence[int], wanted: protocol.Predict, most: int = protocol.MAX_WANTED
) -> tuple[list[Wanted], dict[str, bytes]]:
    """Return the first ``most`` items that a program of these users wanted last time, and the options by digest.

    A history with the same arguments is preferred.
    """
    row = connection.execute(
        "SELECT id, options FROM histories WHERE uid IN (SELECT value FROM json_each(?)) AND program = ?"
        " ORDER BY arguments = ? DESC, id DESC LIMIT 1",
        (json.dumps([*uids]), wanted.program, wanted.arguments),
    ).fetchone()
    if row is None:
        return [], {}
    history, options = row
    rows = connection.execute(
        "SELECT key, options, devices, platform, seconds FROM wanted WHERE history = ? ORDER BY position LIMIT ?",
        (history, most),
    )
    return [dict(zip(FIELDS_OF_ITEM, fields, strict=True)) for fields in rows], {
        name: bytes.fromhex(text) for name, text in parsed_json(options, _MOST_OPTIONS).items()
    }
