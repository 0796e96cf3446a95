"""The tables, as migrations. Names explain themselves to whoever opens the database with another tool."""

from __future__ import annotations

import time
from typing import Any

from sqlite_utils import Migrations

# The number of migrations below. It stands in ``PRAGMA user_version``, where it can be read without sqlite-utils.
VERSION = 1

migrations = Migrations("xcache")


@migrations()  # type: ignore[untyped-decorator]  # sqlite-utils is skipped: its annotations need plugins to check
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
    for table, name, amount in (("entries", "entries", "1"), ("blobs", "bytes", "{}.stored_size")):
        for event, row, sign in (("INSERT", "NEW", "+"), ("DELETE", "OLD", "-")):
            db.execute(
                f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN "
                f"UPDATE totals SET amount = amount {sign} {amount.format(row)} WHERE name = '{name}'; END"
            )
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
    db.execute("PRAGMA user_version = 1")
