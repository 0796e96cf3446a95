"""The migrations that make the tables. Names must make sense to anyone who opens the database with another tool."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from sqlite_utils import Migrations

from xcached.store import eviction, tables

migrations = Migrations("xcache")
Migration = Callable[[Any], None]
# The annotation is here because the type checker does not look at sqlite-utils.
_register: Callable[[Migration], Migration] = migrations()


def _migration(migrate: Migration) -> Migration:
    """Register a migration. It leaves its number in ``PRAGMA user_version``, which is read without sqlite-utils."""
    number = int(migrate.__name__[1:4])

    @functools.wraps(migrate)
    def numbered(db: Any) -> None:
        migrate(db)
        db.execute(f"PRAGMA user_version = {number}")

    return _register(numbered)


@_migration
def m001_first(db: Any) -> None:
    """Create the tables of entries, their contents, and statistics."""
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
        # uses: the number of entries with it, kept by triggers; a component goes with its last entry.
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
    # Kept by triggers, so that reading a total does not walk over all rows.
    db["totals"].create({"name": str, "amount": int}, pk="name", not_null={"amount"})
    db["totals"].insert_all([{"name": "entries", "amount": 0}, {"name": "bytes", "amount": 0}])
    tables.keep_total(db, "entries", "entries", "1")
    tables.keep_total(db, "blobs", "bytes", "{}.stored_size")
    tables.keep_component_uses(db)


@_migration
def m002_writers(db: Any) -> None:
    """Give each writer entries of their own; add the quarantine, strikes and compile times."""
    for table, columns in _OF_WRITERS.items():
        db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
        db.execute(f"CREATE TABLE {table} ({columns})")
    # A program had one row; now it has one for each user who wrote an entry of it.
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
    # quarantine.py describes the columns.
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
            # NULL: the bytes were gone, or could not be copied.
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
    tables.keep_total(db, "entries", "entries", "1")
    tables.keep_component_uses(db)


@_migration
def m003_worth(db: Any) -> None:
    """Rank entries by worth, and add pins."""
    for column in (
        # As of used_time, in the store's own time: eviction.py.
        "uses REAL DEFAULT 1",
        "used_time REAL DEFAULT 0",
        "worth REAL DEFAULT 0",
        # Dropped by m007.
        "used_clock REAL DEFAULT 0",
        "pinned INTEGER NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE entries ADD COLUMN {column}")
    db.execute("CREATE TABLE clocks (name TEXT PRIMARY KEY, amount REAL NOT NULL)")
    # A guess for old rows: the order of uses is known, and all history counts as one half-life.
    db.conn.create_function("worth", 4, lambda uses, time, *of: eviction.worth(eviction.Usage(uses, time), *of))
    db.execute(
        "UPDATE entries SET uses = 1 + hits,"
        " used_time = CAST(used_order AS REAL) / max(1, (SELECT max(used_order) FROM entries))"
    )
    db.execute(
        "UPDATE entries SET worth = worth(uses, used_time, coalesce(compile_seconds, 0), coalesce(footprint, 0))"
    )
    # An entry that comes back after an eviction keeps its past uses.
    db.execute("ALTER TABLE compile_times ADD COLUMN uses REAL DEFAULT 0")
    db.execute("ALTER TABLE compile_times ADD COLUMN used_time REAL DEFAULT 0")
    db.execute("DROP TRIGGER entries_delete_compile_time")
    db.execute(
        "CREATE TRIGGER entries_delete_compile_time AFTER DELETE ON entries BEGIN INSERT OR REPLACE INTO compile_times"
        " (key, seconds, uses, used_time) VALUES (OLD.key, OLD.compile_seconds, OLD.uses, OLD.used_time); END"
    )
    # Partial indexes keep pinned rows out of eviction scans.
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


@_migration
def m004_toolchains(db: Any) -> None:
    """Add toolchains, their installations, and what invalidating them removed."""
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
        # files: path, size, mtime_ns, inode and digest of each. state: here, elsewhere (hidden from the daemon), gone.
        {"toolchain": str, "uid": int, "place": str, "files": str, "state": str, "seen_at": float},
        pk=("toolchain", "uid", "place"),
        not_null={"files", "state"},
    )
    db["invalidations"].create(
        {"at": float, "toolchain": str, "reason": str, "entries": int, "bytes": int}, not_null={"at", "reason"}
    )
    db["entries"].create_index(["toolchain_component"])


@_migration
def m005_runs(db: Any) -> None:
    """Add runs: the keys that programs wanted."""
    db["runs"].create(
        # options: JSON object of digest and hexadecimal bytes of serialized compile options.
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


@_migration
def m006_by_toolchain(db: Any) -> None:
    """Index a toolchain's unpinned entries with their sizes, so that counting them reads the index alone."""
    db.execute("DROP INDEX IF EXISTS idx_entries_toolchain_component")
    db.execute("CREATE INDEX entries_by_toolchain ON entries (toolchain_component, pinned, writer_uid, stored_size)")


@_migration
def m007_judged_anew(db: Any) -> None:
    """Add the sizes and users of rows. Drop a clock, and the strikes and marks that older, laxer rules left."""
    # Entries age by the time of their last use.
    db.execute("ALTER TABLE entries DROP COLUMN used_clock")
    db.execute("DROP TABLE clocks")
    # Strikes were made without checking how the process ended, marks without checking whether the program had run.
    db.execute("DELETE FROM strikes")
    db.execute("ALTER TABLE strikes ADD COLUMN ahead INTEGER NOT NULL DEFAULT 0")
    db.execute("DELETE FROM not_cacheable WHERE reason = 'not serializable'")
    # No query searches by wanted key.
    db.execute("DROP INDEX IF EXISTS idx_wanted_key")
    db.execute("ALTER TABLE runs ADD COLUMN size INTEGER NOT NULL DEFAULT 0")
    db.execute(
        "UPDATE runs SET size = 60 + length(CAST(program || arguments || options AS BLOB))"
        " + (SELECT coalesce(sum(60 + length(CAST(key || options || devices || platform AS BLOB))), 0)"
        " FROM wanted WHERE run = runs.id)"
    )
    # Each writer has rows of its own now; old rows can be assigned only if there is a single writer.
    db.execute("ALTER TABLE compile_times RENAME TO old_compile_times")
    db.execute(
        "CREATE TABLE compile_times (key TEXT, writer_uid INTEGER, seconds REAL, uses REAL, used_time REAL,"
        " PRIMARY KEY (key, writer_uid))"
    )
    db.execute(
        "INSERT INTO compile_times SELECT key, uid, seconds, old_compile_times.uses, used_time FROM old_compile_times"
        " JOIN users WHERE (SELECT count(*) FROM users) = 1 ORDER BY old_compile_times.rowid"
    )
    db.execute("DROP TABLE old_compile_times")
    db.execute("DROP TRIGGER entries_delete_compile_time")
    db.execute(
        "CREATE TRIGGER entries_delete_compile_time AFTER DELETE ON entries BEGIN INSERT OR REPLACE INTO compile_times"
        " VALUES (OLD.key, OLD.writer_uid, OLD.compile_seconds, OLD.uses, OLD.used_time); END"
    )
    db.execute("ALTER TABLE invalidations ADD COLUMN uid INTEGER")
    for table in ("compile_times", "not_cacheable"):
        db.execute(f"CREATE INDEX {table}_by_writer ON {table} (writer_uid)")
    there = set(db.table_names())
    for total, rows in tables.ROWS.items():
        sizes = {name: size.format("") for name, size in rows.items() if name in there}
        sums = [f"(SELECT coalesce(sum({size}), 0) FROM {name})" for name, size in sizes.items()]
        db.execute(f"INSERT INTO totals (name, amount) VALUES ('{total}', {' + '.join(sums)})")
        for name in sizes:
            tables.keep_row_bytes(db, total, name)


@_migration
def m008_aliases(db: Any) -> None:
    """Add aliases: the programs that jaxprs were lowered to."""
    db["aliases"].create(
        # facts: the client's own, as msgpack. seal: a digest of structure, program and facts.
        {"structure": str, "writer_uid": int, "program": str, "facts": bytes, "seal": str, "created_at": float},
        pk=("structure", "writer_uid"),
        not_null={"program", "facts", "seal"},
    )
    db["aliases"].create_index(["program", "writer_uid"])
    db["aliases"].create_index(["writer_uid"])
    tables.keep_row_bytes(db, "other_bytes", "aliases")
    # A program has a row for each writer with an entry of it. An alias may also rest on another writer's entry.
    db.execute(
        "CREATE TRIGGER programs_delete_aliases AFTER DELETE ON programs BEGIN DELETE FROM aliases"
        " WHERE program = OLD.digest AND (writer_uid = OLD.writer_uid"
        " OR NOT EXISTS (SELECT 1 FROM programs WHERE digest = OLD.digest)); END"
    )


@_migration
def m009_ledger(db: Any) -> None:
    """Add the ledger: the processes that used the cache, and how each program came about."""
    for event in ("insert", "delete"):
        db.execute(f"DROP TRIGGER runs_{event}_bytes")
    db.execute("DROP INDEX idx_runs_uid_program")
    db.execute("ALTER TABLE runs RENAME TO histories")
    db["histories"].create_index(["uid", "program"])
    db.execute("ALTER TABLE wanted RENAME COLUMN run TO history")
    tables.keep_row_bytes(db, "other_bytes", "histories")
    db["runs"].create(
        # run: the number that the process gave itself. facts: JSON of program, versions, flags and more. ended_at NULL:
        # the process is alive, or was killed. size: bytes of this row and of those of its ledger.
        {
            "id": int,
            "run": str,
            "uid": int,
            "pid": int,
            "program": str,
            "facts": str,
            "began_at": float,
            "reported_at": float,
            "ended_at": float,
            "size": int,
        },
        pk="id",
        not_null={"run", "uid", "pid", "program", "facts", "began_at", "reported_at", "size"},
    )
    db["runs"].create_index(["uid", "run"], unique=True)
    db["ledger"].create(
        # key: empty if there is none. spans: JSON list of stage, start, seconds, thread; the start counts from the
        # process's own. nearest: the key of the entry that a miss came closest to.
        {
            "run": int,
            "position": int,
            "module_name": str,
            "site": str,
            "shapes": str,
            "key": str,
            "outcome": str,
            "cause": str,
            "stored": str,
            "nearest": str,
            "spans": str,
        },
        pk=("run", "position"),
        foreign_keys=[("run", "runs", "id")],
    )
    tables.keep_row_bytes(db, "other_bytes", "runs")
    # Why the entry of a key is gone, or was refused.
    db.execute("ALTER TABLE compile_times ADD COLUMN reason TEXT")
    db.execute("DROP TRIGGER entries_delete_compile_time")
    db.execute(
        "CREATE TRIGGER entries_delete_compile_time AFTER DELETE ON entries BEGIN INSERT OR REPLACE INTO compile_times"
        " (key, writer_uid, seconds, uses, used_time)"
        " VALUES (OLD.key, OLD.writer_uid, OLD.compile_seconds, OLD.uses, OLD.used_time); END"
    )
    # The entry that a wanted one is most like has its name.
    db["entries"].create_index(["module_name", "writer_uid"])
    db.execute(
        "CREATE TRIGGER runs_update_bytes AFTER UPDATE OF size ON runs BEGIN"
        " UPDATE totals SET amount = amount + NEW.size - OLD.size WHERE name = 'other_bytes'; END"
    )


@_migration
def m010_uploads(db: Any) -> None:
    """Add what is still to be uploaded to remote tiers."""
    db["uploads"].create(
        # kind: "entry", and name is its key; "history", and name is its program and the digest of its arguments.
        {
            "tier": str,
            "kind": str,
            "name": str,
            "writer_uid": int,
            "queued_at": float,
            "attempts": int,
            "due_at": float,
        },
        pk=("tier", "kind", "name", "writer_uid"),
        not_null={"queued_at", "attempts", "due_at"},
    )
    db["uploads"].create_index(["tier", "due_at"])
    tables.keep_row_bytes(db, "other_bytes", "uploads")


_OF_WRITERS = {
    "programs": "digest TEXT, writer_uid INTEGER, raw_size INTEGER NOT NULL, codec TEXT NOT NULL, blob TEXT NOT NULL"
    " REFERENCES blobs (digest), PRIMARY KEY (digest, writer_uid)",
    "entries": "key TEXT, writer_uid INTEGER, module_name TEXT, platform TEXT, device_kind TEXT, jaxlib_version TEXT,"
    " blob TEXT REFERENCES blobs (digest), codec TEXT, raw_size INTEGER, stored_size INTEGER, compile_seconds REAL,"
    # used_order: the order of last uses, whatever the clock said.
    " created_at REAL, last_used_at REAL, used_order INTEGER, hits INTEGER DEFAULT 0, writer_pid INTEGER,"
    # footprint: its bytes and those of its program, even if shared; a user's quota counts these.
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
