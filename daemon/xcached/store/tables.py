"""The tables: their meanings, the sizes of their rows, and the triggers that keep totals."""

from __future__ import annotations

from typing import Any

# The tables that the migrations make; the reference of the documents shows them in these words.
MEANINGS = {
    "aliases": "The program that each structure was lowered to, one row for each structure and writer.",
    "blobs": "Contents by digest. `content` is NULL where the bytes are in the file `blobs/<two digits>/<digest>`.",
    "compile_times": "Compile time and past uses of keys whose entries are gone or were refused, and why, by writer.",
    "components": "Parts of keys (options, flags, platform, toolchain) with their readable texts.",
    "entries": "The executables: one row for each key and writer.",
    "histories": "The last times that each program ran, which say what to load ahead.",
    "installations": "The places where toolchains are installed, as each user announced them.",
    "invalidations": "How many entries went when their toolchain changed, or by `xcache invalidate`, and why.",
    "ledger": "The programs that a run asked for, and how it got each.",
    "not_cacheable": "Keys whose executables cannot be stored, with the reason.",
    "programs": "The StableHLO that entries were compiled from, one row for each digest and writer.",
    "quarantined": "Entries that were set aside, with the reason; `file` holds a copy of the bytes.",
    "runs": "Processes that used the cache, of which the ledger tells.",
    "statistics": "Counters of all programs since they were last set to zero.",
    "strikes": "Entries that a reader's processes may have crashed on.",
    "toolchains": "The jaxlibs, plugins and tools that compiled entries; `stale_since` is NULL while one is installed.",
    "uploads": "What is still to be uploaded to each remote store, and when it is due.",
    "totals": "Sums over other tables, kept by triggers.",
    "users": "The number of entries and bytes of each user, kept by triggers.",
    "wanted": "The keys that a program of a history asked for, in order.",
}


def _bytes_of(*columns: str) -> str:
    return " + ".join(f"coalesce(length(CAST({{0}}{column} AS BLOB)), 0)" for column in columns)


# Two totals: the texts of entries, and the texts of all other tables with the quarantine's files. The rest of a row
# has a fixed size, and the number of rows is limited. ARCHITECTURE.md has the bounds of all tables.
ROWS = {
    "text_bytes": {
        "entries": _bytes_of("module_name", "platform", "device_kind", "jaxlib_version", "writer_program"),
        "components": _bytes_of("description"),
    },
    "other_bytes": {
        "not_cacheable": _bytes_of("module_name", "reason"),
        "histories": "{0}size",
        "runs": "{0}size",
        "toolchains": _bytes_of("platform", "jaxlib_version", "description"),
        "installations": _bytes_of("place", "files"),
        "invalidations": _bytes_of("reason"),
        "aliases": _bytes_of("structure", "program", "facts", "seal"),
        "statistics": _bytes_of("name"),
        "uploads": _bytes_of("tier", "kind", "name"),
        "quarantined": "CASE WHEN {0}file IS NULL THEN 0 ELSE {0}stored_size END + "
        + _bytes_of("module_name", "reason"),
    },
}


def keep_total(db: Any, table: str, name: str, amount: str) -> None:
    """Have a total follow the rows of a table."""
    for event, row, sign in (("INSERT", "NEW", "+"), ("DELETE", "OLD", "-")):
        db.execute(
            f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN "
            f"UPDATE totals SET amount = amount {sign} {amount.format(row)} WHERE name = '{name}'; END"
        )


def keep_row_bytes(db: Any, total: str, name: str) -> None:
    """Have the total follow the rows of a table in ROWS."""
    for event, row, sign in (("INSERT", "NEW.", "+"), ("DELETE", "OLD.", "-")):
        db.execute(
            f"CREATE TRIGGER {name}_{event.lower()}_bytes AFTER {event} ON {name} BEGIN UPDATE totals"
            f" SET amount = amount {sign} ({ROWS[total][name].format(row)}) WHERE name = '{total}'; END"
        )


def keep_component_uses(db: Any) -> None:
    """Have the uses of components follow the entries."""
    for name in ("options", "flags", "platform", "toolchain"):
        db.execute(
            f"CREATE TRIGGER entries_insert_{name} AFTER INSERT ON entries BEGIN "
            f"UPDATE components SET uses = uses + 1 WHERE digest = NEW.{name}_component; END"
        )
        db.execute(
            f"CREATE TRIGGER entries_delete_{name} AFTER DELETE ON entries BEGIN "
            f"UPDATE components SET uses = uses - 1 WHERE digest = OLD.{name}_component; "
            f"DELETE FROM components WHERE digest = OLD.{name}_component AND uses <= 0; END"
        )
