"""Sums by SQL over the store: its entries, and those that have left it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from xcache.cli.store_file import StoreReader

_DEAREST = 100
_FUNCTIONS = 20
# Days since the last use, and the words for it.
_AGES = ((1, "within a day"), (7, "within a week"), (30, "within a month"), (None, "longer ago"))
_DAY = 86400.0


def compile_seconds(store: StoreReader, keys: Iterable[str]) -> dict[str, float]:
    """Return the compile time of each of these keys that the store knows, also of entries that are gone."""
    wanted = json.dumps(sorted(set(keys)))
    known: dict[str, float] = {}
    for table, column in (("compile_times", "seconds"), ("entries", "compile_seconds")):
        known |= {
            str(row["key"]): float(row["seconds"])
            for row in _rows(
                store.connection,
                f"SELECT key, max({column}) AS seconds FROM {table}"  # noqa: S608 - names of our own
                f" WHERE key IN (SELECT value FROM json_each(?)) AND {column} IS NOT NULL GROUP BY key",
                wanted,
            )
        }
    return known


def composition(store: StoreReader, now: float) -> dict[str, Any]:
    """Return sums over the entries: by function, by the compiler that made them, and by last use."""
    sums = "count(*) AS entries, sum(stored_size) AS bytes, sum(compile_seconds) AS seconds, sum(hits) AS hits"
    by_age = "CASE " + "".join(
        f"WHEN last_used_at > {now - days * _DAY:.0f} THEN {number} " for number, (days, _) in enumerate(_AGES) if days
    )
    by_age += f"ELSE {len(_AGES) - 1} END"
    ages = _rows(store.connection, f"SELECT {by_age} AS age, {sums} FROM entries GROUP BY age ORDER BY age")  # noqa: S608
    return {
        "totals": store.totals(),
        "functions": _rows(
            store.connection,
            f"SELECT module_name, {sums} FROM entries GROUP BY module_name ORDER BY bytes DESC LIMIT {_FUNCTIONS}",  # noqa: S608
        ),
        "compilers": _rows(
            store.connection,
            f"SELECT platform, device_kind, jaxlib_version, {sums} FROM entries"  # noqa: S608
            " GROUP BY platform, device_kind, jaxlib_version ORDER BY bytes DESC",
        ),
        "ages": [row | {"age": _AGES[row["age"]][1]} for row in ages],
        "unused": _rows(store.connection, f"SELECT {sums} FROM entries WHERE hits = 0")[0],  # noqa: S608
    }


def dearest(store: StoreReader) -> list[dict[str, Any]]:
    """Return the entries that took longest to compile."""
    return _rows(
        store.connection,
        "SELECT key, module_name, platform, jaxlib_version, stored_size, compile_seconds, hits,"
        " last_used_at FROM entries ORDER BY compile_seconds DESC, key LIMIT ?",
        _DEAREST,
    )


def gone(store: StoreReader) -> list[dict[str, Any]]:
    """Return what left the store and did not come back: by reason the entries and what compiling them took."""
    if not store.has_ledger:
        return []
    return _rows(
        store.connection,
        "SELECT coalesce(reason, 'not known') AS reason, count(*) AS entries, sum(seconds) AS seconds"
        " FROM compile_times WHERE NOT EXISTS (SELECT 1 FROM entries WHERE entries.key = compile_times.key"
        " AND entries.writer_uid = compile_times.writer_uid) GROUP BY reason ORDER BY seconds DESC",
    )


def _rows(connection: sqlite3.Connection, sql: str, *values: object) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
