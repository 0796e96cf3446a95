"""Lists entries for a user who has no access to the store's files, as on a machine-wide daemon."""

from __future__ import annotations

from xcache.wire import commands, protocol
from xcached.store.store import Store

# Names are cut so that a full page of entries fits into a message.
_LISTED = (
    "SELECT key, substr(module_name, 1, 250) AS module_name, substr(platform, 1, 50) AS platform,"
    " substr(device_kind, 1, 100) AS device_kind, substr(jaxlib_version, 1, 50) AS jaxlib_version, raw_size,"
    " stored_size, compile_seconds, created_at, last_used_at, hits, writer_uid, pinned, EXISTS (SELECT 1 FROM"
    " toolchains WHERE toolchains.digest = toolchain_component AND stale_since IS NOT NULL) AS stale FROM entries"
    # "g" sorts after every hexadecimal digit.
    " WHERE writer_uid = coalesce(?, writer_uid) AND key >= ? AND key < ? AND (key, writer_uid) > (?, ?)"
    " ORDER BY key, writer_uid LIMIT ?"
)

_LARGEST_UID = 2**32 - 1


def entries_by(store: Store, uid: int | None, asked: commands.AskEntries) -> commands.Entries:
    """Return a page of a user's entries (None: everybody's), in the order of their keys."""
    # A message may hold any number; SQLite takes 64 bits.
    behind = asked.after, max(0, min(asked.writer, _LARGEST_UID))
    limits = max(asked.prefix, asked.after), f"{asked.prefix}g", *behind, protocol.MAX_LISTED
    cursor = store.database.writing.execute(_LISTED, (uid, *limits))
    names = [column[0] for column in cursor.description]
    return commands.Entries([dict(zip(names, row, strict=True)) for row in cursor])
