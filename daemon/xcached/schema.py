"""The tables, as migrations. Names explain themselves to whoever opens the database with another tool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlite_utils import Migrations

from xcached import eviction

# The number of migrations below. It stands in ``PRAGMA user_version``, where it can be read without sqlite-utils.
VERSION = 6

migrations = Migrations("xcache")
# Typed here: sqlite-utils itself is not looked at by the type checker.
_migration: Callable[[Callable[[Any], None]], Callable[[Any], None]] = migrations()


@_migration
def m001_first(db: Any) -> None:
    """Entries, what they consist of, and what was counted."""
    db["blobs"].create(
        {
            "digest": str,
            "stored_size": int,
            # NULL: the bytes are in the file blobs/<first two digits>/<digest>.
            "content": bytes,
        },
        pk="digest",
        not_null={"stored_size"},
    )
    db["programs"].create(
        {"digest": str, "raw_size": int, "codec": str, "blob": str},
        pk="digest",
        not_null={"raw_size", "codec", "blob"},
        foreign_keys=[("blob", "blobs", "digest")],
    )
    db["components"].create(
        # uses: how many entries have it, kept by triggers; a component goes with its last entry.
        {"digest": str, "name": str, "description": str, "uses": int},
        pk="digest",
        not_null={"name"},
        defaults={"uses": 0},
    )
    db["entries"].create(
        {
            "key": str,
            "module_name": str,
            "platform": str,
            "device_kind": str,
            "jaxlib_version": str,
            "blob": str,
            "codec": str,
            "raw_size": int,
            "stored_size": int,
            "compile_seconds": float,
            "created_at": float,
            "last_used_at": float,
            "hits": int,
            "writer_uid": int,
            "writer_pid": int,
            "writer_program": str,
            "program": str,
            "options_component": str,
            "flags_component": str,
            "platform_component": str,
            "toolchain_component": str,
        },
        pk="key",
        foreign_keys=[("blob", "blobs", "digest"), ("program", "programs", "digest")],
        defaults={"hits": 0},
    )
    db["entries"].create_index(["last_used_at"])
    db["entries"].create_index(["program"])
    db["entries"].create_index(["blob"])
    db["programs"].create_index(["blob"])
    db["not_cacheable"].create(
        {"key": str, "module_name": str, "reason": str, "created_at": float}, pk="key", not_null={"reason"}
    )
    db["statistics"].create({"name": str, "amount": float}, pk="name", not_null={"amount"})
    db["statistics"].insert({"name": "since", "amount": time.time()})
    # Kept by triggers: asking for them must not cost a walk over everything.
    db["totals"].create({"name": str, "amount": int}, pk="name", not_null={"amount"})
    db["totals"].insert_all([{"name": "entries", "amount": 0}, {"name": "bytes", "amount": 0}])
    _keep_total(db, "entries", "entries", "1")
    _keep_total(db, "blobs", "bytes", "{}.stored_size")
    _keep_component_uses(db)
    db.execute("PRAGMA user_version = 1")


@_migration
def m002_writers(db: Any) -> None:
    """Each writer has entries of their own; what was set aside, what ended programs, what compiling took."""
    for table, columns in _OF_WRITERS.items():
        db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        db.execute(f"CREATE TABLE {table} ({columns})")
    # A program was kept once for all, and now once for each who wrote an entry of it.
    db.execute(
        "INSERT INTO programs SELECT DISTINCT old_programs.digest, writer_uid, old_programs.raw_size,"
        " old_programs.codec, old_programs.blob FROM old_programs JOIN old_entries"
        " ON old_entries.program = old_programs.digest"
    )
    db.execute(
        "INSERT INTO entries SELECT key, writer_uid, module_name, platform, device_kind, jaxlib_version,"
        " old_entries.blob, old_entries.codec, old_entries.raw_size, old_entries.stored_size, compile_seconds,"
        " created_at, last_used_at, row_number() OVER (ORDER BY last_used_at), hits, writer_pid, writer_program,"
        " program, old_entries.stored_size + blobs.stored_size, options_component, flags_component, platform_component,"
        " toolchain_component FROM old_entries JOIN old_programs ON old_programs.digest = program"
        " JOIN blobs ON blobs.digest = old_programs.blob"
    )
    db.execute(
        "INSERT INTO not_cacheable SELECT key, (SELECT coalesce(max(writer_uid), 0) FROM old_entries), module_name,"
        " reason, created_at FROM old_not_cacheable"
    )
    for table in _OF_WRITERS:
        db.execute(f"DROP TABLE old_{table}")
    for table, indexed in _INDEXED:
        db[table].create_index(indexed)
    # What is written into each is said in quarantine.py.
    db["quarantined"].create(
        {
            "id": int,
            "key": str,
            "writer_uid": int,
            "module_name": str,
            "platform": str,
            "device_kind": str,
            "jaxlib_version": str,
            "compile_seconds": float,
            "created_at": float,
            "stored_size": int,
            "blob": str,
            "reason": str,
            "set_aside_at": float,
            # NULL: its bytes were gone, or others still need them.
            "file": str,
        },
        pk="id",
    )
    db["strikes"].create(
        {"blob": str, "reader_uid": int, "key": str, "count": int},
        pk=("blob", "reader_uid"),
    )
    db["compile_times"].create({"key": str, "seconds": float}, pk="key")
    db.execute(
        "CREATE TRIGGER entries_delete_compile_time AFTER DELETE ON entries BEGIN "
        "INSERT OR REPLACE INTO compile_times VALUES (OLD.key, OLD.compile_seconds); END"
    )
    db["users"].create({"uid": int, "entries": int, "bytes": int}, pk="uid")
    db.execute("INSERT INTO users SELECT writer_uid, count(*), sum(footprint) FROM entries GROUP BY writer_uid")
    db.execute(
        "CREATE TRIGGER entries_insert_user AFTER INSERT ON entries BEGIN "
        "INSERT INTO users VALUES (NEW.writer_uid, 1, NEW.footprint) ON CONFLICT (uid) DO "
        "UPDATE SET entries = entries + 1, bytes = bytes + NEW.footprint; END"
    )
    db.execute(
        "CREATE TRIGGER entries_delete_user AFTER DELETE ON entries BEGIN "
        "UPDATE users SET entries = entries - 1, bytes = bytes - OLD.footprint WHERE uid = OLD.writer_uid; "
        "DELETE FROM users WHERE uid = OLD.writer_uid AND entries <= 0; END"
    )
    _keep_total(db, "entries", "entries", "1")
    _keep_component_uses(db)
    db.execute("PRAGMA user_version = 2")


@_migration
def m003_worth(db: Any) -> None:
    """Who is worth least goes first, and what is pinned stays."""
    for column in (
        # As of used_time, in the store's own time: eviction.py.
        "uses REAL DEFAULT 1",
        "used_time REAL DEFAULT 0",
        "worth REAL DEFAULT 0",
        # When it was last used, by a clock that does not jump: ageing.py.
        "used_clock REAL DEFAULT 0",
        "pinned INTEGER NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE entries ADD COLUMN {column}")
    db.execute("CREATE TABLE clocks (name TEXT PRIMARY KEY, amount REAL NOT NULL)")
    # What is known of it: what was used last is the most recent, and all that happened is one half-life.
    db.conn.create_function("worth", 4, lambda uses, time, *of: eviction.worth(eviction.Usage(uses, time), *of))
    db.execute(
        "UPDATE entries SET uses = 1 + hits,"
        " used_time = CAST(used_order AS REAL) / max(1, (SELECT max(used_order) FROM entries))"
    )
    db.execute(
        "UPDATE entries SET worth = worth(uses, used_time, coalesce(compile_seconds, 0), coalesce(footprint, 0))"
    )
    # What was used often, and went, is as dear as before when it comes back.
    db.execute("ALTER TABLE compile_times ADD COLUMN uses REAL DEFAULT 0")
    db.execute("ALTER TABLE compile_times ADD COLUMN used_time REAL DEFAULT 0")
    db.execute("DROP TRIGGER entries_delete_compile_time")
    db.execute(
        "CREATE TRIGGER entries_delete_compile_time AFTER DELETE ON entries BEGIN INSERT OR REPLACE INTO compile_times"
        " (key, seconds, uses, used_time) VALUES (OLD.key, OLD.compile_seconds, OLD.uses, OLD.used_time); END"
    )
    # Each row is in one or the other, so that who looks for what may go never meets what may not.
    for columns, pinned in (
        ("worth, used_order", 0),
        ("writer_uid, worth, used_order", 0),
        ("used_order", 0),
        ("writer_uid, footprint, used_order", 1),
    ):
        name = "pinned" if pinned else f"by_{columns.partition(',')[0]}"
        db.execute(f"CREATE INDEX entries_{name} ON entries ({columns}) WHERE pinned = {pinned}")
    db.execute("DROP INDEX idx_entries_used_order")
    db.execute("DROP INDEX idx_entries_writer_uid_used_order")
    db.execute("PRAGMA user_version = 3")


@_migration
def m004_toolchains(db: Any) -> None:
    """Where toolchains are installed, since when they are not, and what that cost."""
    db["toolchains"].create(
        # digest: as in entries.toolchain_component. stale_since NULL: it is installed somewhere.
        {
            "digest": str,
            "platform": str,
            "jaxlib_version": str,
            "description": str,
            "first_seen": float,
            "stale_since": float,
        },
        pk="digest",
    )
    db["installations"].create(
        # files: path, size, mtime_ns, inode and digest of each. state: here, elsewhere (not to be seen), gone.
        {"toolchain": str, "uid": int, "place": str, "files": str, "state": str, "seen_at": float},
        pk=("toolchain", "uid", "place"),
        not_null={"files", "state"},
    )
    db["invalidations"].create(
        {"at": float, "toolchain": str, "reason": str, "entries": int, "bytes": int}, not_null={"at", "reason"}
    )
    db["entries"].create_index(["toolchain_component"])
    db.execute("PRAGMA user_version = 4")


@_migration
def m005_runs(db: Any) -> None:
    """What programs wanted, run by run."""
    db["runs"].create(
        # options: JSON of digest and hexadecimal bytes of serialized compile options.
        {"id": int, "uid": int, "program": str, "arguments": str, "options": str, "ended_at": float},
        pk="id",
        not_null={"uid", "program", "arguments"},
    )
    db["runs"].create_index(["uid", "program"])
    db["wanted"].create(
        {
            "run": int,
            "position": int,
            "key": str,
            "options": str,
            "devices": str,
            "platform": str,
            "seconds": float,
        },
        pk=("run", "position"),
    )
    db["wanted"].create_index(["key"])
    db.execute("PRAGMA user_version = 5")


@_migration
def m006_by_toolchain(db: Any) -> None:
    """What a toolchain made that may go, of all or of one user, and how much it is: from the index alone."""
    db.execute("DROP INDEX IF EXISTS idx_entries_toolchain_component")
    db.execute("CREATE INDEX entries_by_toolchain ON entries (toolchain_component, pinned, writer_uid, stored_size)")
    db.execute("PRAGMA user_version = 6")


_OF_WRITERS = {
    "programs": "digest TEXT, writer_uid INTEGER, raw_size INTEGER NOT NULL, codec TEXT NOT NULL, blob TEXT NOT NULL"
    " REFERENCES blobs (digest), PRIMARY KEY (digest, writer_uid)",
    "entries": "key TEXT, writer_uid INTEGER, module_name TEXT, platform TEXT, device_kind TEXT, jaxlib_version TEXT,"
    " blob TEXT REFERENCES blobs (digest), codec TEXT, raw_size INTEGER, stored_size INTEGER, compile_seconds REAL,"
    # used_order: which was used before which, whatever the clock said.
    " created_at REAL, last_used_at REAL, used_order INTEGER, hits INTEGER DEFAULT 0, writer_pid INTEGER,"
    # footprint: its bytes and those of its program, which others may share; a user's quota counts these.
    " writer_program TEXT, program TEXT, footprint INTEGER, options_component TEXT, flags_component TEXT,"
    " platform_component TEXT, toolchain_component TEXT, PRIMARY KEY (key, writer_uid),"
    " FOREIGN KEY (program, writer_uid) REFERENCES programs (digest, writer_uid)",
    "not_cacheable": "key TEXT, writer_uid INTEGER, module_name TEXT, reason TEXT NOT NULL, created_at REAL,"
    " PRIMARY KEY (key, writer_uid)",
}
_INDEXED = (
    ("entries", ["used_order"]),
    ("entries", ["writer_uid", "used_order"]),
    ("entries", ["program", "writer_uid"]),
    ("entries", ["blob"]),
    ("programs", ["blob"]),
)


def _keep_total(db: Any, table: str, name: str, amount: str) -> None:
    for event, row, sign in (("INSERT", "NEW", "+"), ("DELETE", "OLD", "-")):
        db.execute(
            f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN "
            f"UPDATE totals SET amount = amount {sign} {amount.format(row)} WHERE name = '{name}'; END"
        )


def _keep_component_uses(db: Any) -> None:
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
