"""The serving thread's queries: they never wait for the writer thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection
from typing import NamedTuple

from xcache.errors import ProtocolError
from xcache.wire import commands, framing, protocol
from xcache.wire.checks import proven_texts

# A program may have been stored with ten thousand different options.
_MOST_ROWS_COMPARED = 500
# More than one writer keeps of one program.
_MOST_ALIASES_COMPARED = 500
# The content itself is read only when it is handed over.
_FIND = (
    "SELECT entries.blob, blobs.stored_size, entries.compile_seconds,"
    # CASE and CAST, because any program that may write the file can alter the values.
    " CASE typeof(blobs.content) WHEN 'null' THEN NULL WHEN 'blob' THEN length(blobs.content) ELSE -1 END,"
    " entries.writer_uid, entries.flags_component, entries.platform_component, entries.toolchain_component,"
    " CAST(entries.program AS TEXT) FROM entries JOIN blobs ON blobs.digest = entries.blob WHERE entries.key = ?"
)
# A minimum or maximum of an index's second column is one seek.
_TRACES = (
    "SELECT EXISTS(SELECT 1 FROM entries WHERE key = ?1), EXISTS(SELECT 1 FROM not_cacheable WHERE key = ?1),"
    " EXISTS(SELECT 1 FROM compile_times WHERE key = ?1 AND reason IS NOT NULL),"
    " (SELECT min(writer_uid) FROM entries WHERE program = ?2),"
    " (SELECT max(writer_uid) FROM entries WHERE program = ?2),"
    " (SELECT min(writer_uid) FROM entries WHERE module_name = ?3),"
    " (SELECT max(writer_uid) FROM entries WHERE module_name = ?3)"
)
_ALIAS_ROWS = "SELECT writer_uid, rowid, structure FROM aliases"

# The writers whose rows a client may read, or None for all. Filtered by index: rows of others cost nothing.
Writers = Collection[int] | None


class Hit(NamedTuple):
    """An entry found under a key, without its content."""

    digest: str
    stored_size: int
    compile_seconds: float
    # None if the content is in a file.
    inline_bytes: int | None
    writer_uid: int
    flags: str
    platform: str
    toolchain: str
    program: str

    def answer(self, payload: bytes | None) -> protocol.Found:
        """Return the answer for the client."""
        return protocol.Found(self.digest, self.stored_size, self.compile_seconds, payload)

    @property
    def is_sound(self) -> bool:
        """Whether the row's values are well formed: any program that may write the file can alter them."""
        return (self.inline_bytes is None or self.inline_bytes >= 0) and _is_sound(self.answer(None))


class AliasRow(NamedTuple):
    """Where an alias is."""

    writer_uid: int
    rowid: int
    structure: str


class Traces(NamedTuple):
    """Traces of a wanted entry in the store, by all writers: each is 0 or None where there is nothing."""

    of_key: int
    # A mark that the key cannot be cached.
    of_mark: int
    # A note of why the key's entry went.
    of_end: int
    # The least and the greatest uid that has an entry of the program, and of the name.
    of_program: tuple[int, int] | None
    of_name: tuple[int, int] | None


class Reader:
    """Queries over a connection that only reads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def find(self, key: str) -> list[Hit]:
        """Return the entries under ``key``, one for each writer."""
        return [Hit(*row) for row in self._db.execute(_FIND, (key,))]

    def content(self, digest: str) -> bytes | None:
        """Return a content that is inline; None if it is gone."""
        row = self._db.execute("SELECT content FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row and isinstance(row[0], bytes) else None

    def module_name(self, key: str, digest: str) -> str:
        """Return the name in the entry of these bytes; empty if there is none."""
        row = self._db.execute("SELECT module_name FROM entries WHERE key = ? AND blob = ?", (key, digest)).fetchone()
        return str(row[0]) if row else ""

    def alias_rows(self, structure: str) -> list[AliasRow]:
        """Return the aliases of a structure, one for each writer."""
        return [AliasRow(*row) for row in self._db.execute(f"{_ALIAS_ROWS} WHERE structure = ?", (structure,))]

    def alias_rows_of(self, program: str, writers: Writers) -> list[AliasRow]:
        """Return the aliases of a program, the newest first."""
        allowed, values = _by(writers)
        sql = f"{_ALIAS_ROWS} WHERE program = ?{allowed} ORDER BY rowid DESC LIMIT ?"
        return [AliasRow(*row) for row in self._db.execute(sql, (program, *values, _MOST_ALIASES_COMPARED))]

    def alias(self, rowid: int) -> protocol.Alias | None:
        """Return an alias; None if it is gone or malformed."""
        sql = "SELECT structure, program, facts, seal FROM aliases WHERE rowid = ?"
        row = self._db.execute(sql, (rowid,)).fetchone()
        alias = row and protocol.Alias(*row)
        return alias if alias and _is_sound(alias) and len(alias.facts) <= protocol.MAX_RECORD else None

    def structures(self, writers: Writers, most: int) -> list[str]:
        """Return the structures of up to ``most`` aliases."""
        allowed, values = _by(writers)
        sql = f"SELECT structure FROM aliases WHERE true{allowed} LIMIT ?"  # noqa: S608 - our own words
        return [structure for (structure,) in self._db.execute(sql, (*values, most))]

    def toolchains_of(self, program: str, writers: Writers) -> list[str]:
        """Return the toolchains of some entries that were compiled from a program."""
        allowed, values = _by(writers)
        sql = f"SELECT toolchain_component FROM entries WHERE program = ?{allowed} LIMIT ?"  # noqa: S608 - our own words
        return [found for (found,) in self._db.execute(sql, (program, *values, _MOST_ROWS_COMPARED))]

    def why_not(self, key: str, trusts: Callable[[int], bool]) -> str | None:
        """Return why ``key`` cannot be cached, if a trusted writer has marked it so."""
        rows = self._db.execute("SELECT reason, writer_uid FROM not_cacheable WHERE key = ?", (key,))
        return next((str(reason) for reason, writer in rows if trusts(writer)), None)

    def expected_seconds(self, key: str, program_digest: str, writers: Writers) -> float | None:
        """Return the seconds that the last compile of this key took, or else of the same program with other options."""
        allowed, values = _by(writers)
        for sql, about in (
            ("SELECT seconds FROM compile_times WHERE key = ?", key),
            ("SELECT compile_seconds FROM entries WHERE program = ?", program_digest),
        ):
            rows = self._db.execute(f"{sql}{allowed} LIMIT ?", (about, *values, _MOST_ROWS_COMPARED))
            if times := [float(seconds) for (seconds,) in rows]:
                return max(times)
        return None

    def traces_of(self, key: str, program: str, module_name: str) -> Traces:
        """Return what the store has of a key, a program and a name, in one query: most misses have nothing."""
        row = self._db.execute(_TRACES, (key, program, module_name)).fetchone()
        of_key, of_mark, of_end, least, most, least_named, most_named = row
        of_program = None if least is None else (least, most)
        of_name = None if least_named is None else (least_named, most_named)
        return Traces(of_key, of_mark, of_end, of_program, of_name)

    def newest_number(self) -> int:
        """Return the number of the newest entry; later ones have larger numbers."""
        ((number,),) = self._db.execute("SELECT max(rowid) FROM entries")
        return number or 0

    def newest_entry(
        self, columns: str, present: tuple[int, int], writers: Writers, newest: int, **where: str
    ) -> list[str] | None:
        """Return columns of the newest entry with a certain value, a program or a module's name.

        ``present`` are the least and the greatest writer of such entries; those after the number ``newest`` do not
        count.
        """
        ((column, value),) = where.items()
        least, most = present
        # One seek for each writer: a user may have stored a program with ten thousand options.
        sql = (
            f"SELECT rowid, {columns} FROM entries WHERE {column} = ? AND writer_uid = ? AND rowid <= ?"  # noqa: S608 - our own words
            " ORDER BY rowid DESC LIMIT 1"
        )
        each = [least] if least == most else self.writers("entries", **where)
        allowed = (uid for uid in each if writers is None or uid in writers)
        rows = [row for uid in allowed if (row := self._db.execute(sql, (value, uid, newest)).fetchone())]
        return [str(part) for part in max(rows)[1:]] if rows else None

    def program_of(self, key: str, writer: int) -> commands.StoredProgram | None:
        """Return an entry's program and components, without a content that is in a file; None for damaged rows."""
        components = [f"{name}_component" for name in protocol.DESCRIBED_COMPONENTS]
        columns = ("key", "entries.writer_uid", "module_name", "program", *components)
        sql = (
            f"SELECT {', '.join(columns)}, programs.raw_size, programs.blob, content FROM entries"  # noqa: S608 - our own words
            " JOIN programs ON programs.digest = program AND programs.writer_uid = entries.writer_uid"
            " JOIN blobs ON blobs.digest = programs.blob WHERE key = ? AND entries.writer_uid = ?"
        )
        row = self._db.execute(sql, (key, writer)).fetchone()
        if row is None:
            return None
        *values, raw_size, blob, content = row
        entry = dict(zip((column.rpartition(".")[2] for column in columns), values, strict=True))
        sql = "SELECT name, description FROM components WHERE digest IN (SELECT value FROM json_each(?))"
        texts = self._db.execute(sql, (json.dumps([entry[name] for name in components]),))
        proven = proven_texts({name.removesuffix("_component"): entry[name] for name in components}, texts)
        found = commands.StoredProgram(entry, proven, blob, {"raw_size": raw_size}, content)
        return found if _is_sound(found) else None

    def why_gone(self, key: str, writers: Writers) -> str:
        """Return why the entry of a key is gone; empty if that is not known."""
        allowed, values = _by(writers)
        sql = f"SELECT reason FROM compile_times WHERE key = ?{allowed} AND reason IS NOT NULL LIMIT 1"  # noqa: S608 - our own words
        row = self._db.execute(sql, (key, *values)).fetchone()
        return str(row[0]) if row else ""

    def writers(self, table: str, **where: str) -> list[int]:
        """Return the writers of a table's rows with certain values, by one seek in an index for each."""
        matches = "".join(f" AND {column} = :{column}" for column in where)
        least = f"SELECT min(writer_uid) FROM {table} WHERE writer_uid > {{}}{matches}"  # noqa: S608 - our own words
        following = f"SELECT ({least.format('uid')}) FROM found WHERE uid IS NOT NULL"  # noqa: S608 - our own words
        found = f"WITH RECURSIVE found (uid) AS ({least.format(-1)} UNION ALL {following})"
        sql = f"{found} SELECT uid FROM found WHERE uid IS NOT NULL"  # noqa: S608 - our own words
        return [uid for (uid,) in self._db.execute(sql, where)]

    def totals(self) -> dict[str, int]:
        """Return the totals by name: entries, bytes, and the bytes of texts."""
        return dict(self._db.execute("SELECT name, amount FROM totals").fetchall())


def _by(writers: Writers) -> tuple[str, tuple[str, ...]]:
    """Return the condition that a row is by one of these writers, and its values."""
    if writers is None:
        return "", ()
    return " AND writer_uid IN (SELECT value FROM json_each(?))", (json.dumps([*writers]),)


def _is_sound(message: protocol.Message) -> bool:
    try:
        framing.check(message)
    except ProtocolError:
        return False
    return True
