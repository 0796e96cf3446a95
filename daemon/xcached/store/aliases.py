"""Aliases: which programs jaxprs were lowered to, so that the next run need not lower. Belongs to the writer thread.

``schema.py`` has the trigger that deletes aliases with the last entry of their program.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence

from xcache.wire import protocol
from xcache.wire.checks import alias_of
from xcached.store.store import Store

# One program's aliases, and records of calls, of one user. More means that something in them changes with every run.
# Many functions may have the same program, each with a record.
_MOST_ALIASES, _MOST_RECORDS = 16, 200
# Bytes of all records of calls of one user.
_MOST_RECORD_BYTES = 32 * 1024**2


class AliasRows:
    """The rows of aliases; ``store/reader.py`` reads them."""

    def __init__(self, store: Store, reads: Callable[[int, int], bool]) -> None:
        """``reads`` says whether a reader may load a writer's entries."""
        self._store = store
        self._db = store.database.writing
        self._reads = reads

    def remember(self, uid: int, aliases: Sequence[protocol.Alias]) -> None:
        """Write a user's aliases of programs of which it could get an entry; its oldest are forgotten."""
        with self._store.transaction():
            for alias in aliases:
                if not self._has_entry(alias.program, uid):
                    continue
                self._db.execute(
                    "INSERT OR REPLACE INTO aliases (structure, writer_uid, program, facts, seal, created_at)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    (alias.structure, uid, alias.program, alias.facts, alias.seal, time.time()),
                )
                is_record = len(alias.facts) > protocol.MAX_FACTS
                most = _MOST_RECORDS if is_record else _MOST_ALIASES
                self._db.execute(
                    "DELETE FROM aliases WHERE rowid IN (SELECT rowid FROM aliases WHERE program = ? AND writer_uid = ?"
                    " AND (length(facts) > ?) = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                    (alias.program, uid, protocol.MAX_FACTS, is_record, most),
                )
            self._store.forget_oldest("aliases", uid, self._store.most_rows(uid))
            if any(len(alias.facts) > protocol.MAX_FACTS for alias in aliases):
                self._db.execute(
                    "DELETE FROM aliases WHERE rowid IN (SELECT rowid FROM (SELECT rowid, sum(length(facts))"
                    " OVER (ORDER BY rowid DESC) AS bytes FROM aliases WHERE writer_uid = ? AND length(facts) > ?)"
                    " WHERE bytes > ?)",
                    (uid, protocol.MAX_FACTS, _MOST_RECORD_BYTES),
                )

    def drop(self, uid: int, structure: str) -> None:
        """Forget a user's own alias of a structure."""
        with self._store.transaction(frees=True):
            self._db.execute("DELETE FROM aliases WHERE structure = ? AND writer_uid = ?", (structure, uid))

    def clear(self, uid: int | None) -> None:
        """Forget the aliases of one user (None: of all)."""
        sql = "DELETE FROM aliases WHERE writer_uid = coalesce(?, writer_uid)"
        self._store.free(lambda: self._db.execute(sql, (uid,)))

    def _has_entry(self, program: str, uid: int) -> bool:
        rows = self._db.execute("SELECT writer_uid FROM programs WHERE digest = ?", (program,)).fetchall()
        return any(self._reads(uid, writer) for (writer,) in rows)


def newest_aliases(
    connection: sqlite3.Connection, program: str, writers: Sequence[int], most: int
) -> list[protocol.Alias]:
    """Return the newest aliases of a program by these writers."""
    marks = ", ".join("?" * len(writers))
    rows = connection.execute(
        f"SELECT structure, program, facts, seal FROM aliases WHERE program = ? AND writer_uid IN ({marks})"  # noqa: S608
        " ORDER BY rowid DESC LIMIT ?",
        (program, *writers, most),
    )
    return [alias for row in rows if (alias := alias_of([*row])) is not None]
