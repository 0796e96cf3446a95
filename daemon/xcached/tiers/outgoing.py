"""Make the objects that leave this machine out of what the store has."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time

from xcache.errors import SigningKeyError
from xcache.wire import protocol
from xcache.wire.signatures import PrivateKey
from xcached.store.blobs import BlobFiles
from xcached.store.uploads import Upload
from xcached.tiers import parcel
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.identity import Identity
from xcached.tiers.names import Names

_COMPONENTS = tuple(f"{name}_component" for name in protocol.DESCRIBED_COMPONENTS)
_COLUMNS = (
    *("key", "module_name", "platform", "device_kind", "jaxlib_version", "codec", "raw_size", "compile_seconds"),
    *("blob", "stored_size", "program", "writer_program"),
)
_SELECT = (
    f"SELECT {', '.join(f'entries.{name}' for name in (*_COLUMNS, *_COMPONENTS))},"  # noqa: S608 - names of our own
    " programs.raw_size, programs.blob FROM entries JOIN programs"
    " ON programs.digest = entries.program AND programs.writer_uid = entries.writer_uid"
    " WHERE key = ? AND entries.writer_uid = ?"
)


class Outgoing:
    """Reads entries on a connection that only reads, and packs and signs them."""

    def __init__(self, files: BlobFiles, identity: Identity, names: Names, namespace: str) -> None:
        self._files = files
        self._identity = identity
        self._names = names
        self._namespace = namespace
        self._host = socket.gethostname()

    def make(self, connection: sqlite3.Connection, row: Upload, tier: GuardedTier) -> tuple[str, bytes] | None:
        """Return the name and the content of what is to be uploaded; None if it has gone."""
        signer = self._identity.signer()
        if signer is None and tier.remote.trust != "tier":
            raise SigningKeyError("there is no key to sign what is sent there; `xcache key new NAME` makes one")
        made = self.entry(connection, row.name, row.writer_uid, signer, with_program=tier.remote.programs)
        return None if made is None else (self._names.entry(row.name), made)

    def entry(
        self, connection: sqlite3.Connection, key: str, uid: int, signer: PrivateKey | None, *, with_program: bool
    ) -> bytes | None:
        """Return the parcel of an entry; None if it has gone."""
        row = connection.execute(_SELECT, (key, uid)).fetchone()
        if row is None:
            return None
        found = dict(zip((*_COLUMNS, *_COMPONENTS, "program_raw_size", "program_blob"), row, strict=True))
        payload = self._content(connection, found["blob"])
        program = self._content(connection, found["program_blob"])
        if payload is None or program is None:
            return None
        components = {name: found[f"{name}_component"] for name in protocol.DESCRIBED_COMPONENTS}
        put = protocol.Put(
            **{name: found[name] for name in _COLUMNS[:8]},
            overwrite=False,
            digest=found["blob"],
            stored_size=len(payload),
            program_digest=found["program"],
            program_raw_size=found["program_raw_size"],
            program_stored_digest=found["program_blob"],
            program_stored_size=len(program),
            components=components,
            details=_descriptions(connection, components),
            payload=None,
            program=None,
        )
        return parcel.pack(
            put,
            payload,
            program if with_program else None,
            namespace=self._namespace,
            writer=f"{found['writer_program']} of uid {uid} on {self._host}"[: protocol.MAX_NAME],
            now=time.time(),
            signer=signer,
        )

    def _content(self, connection: sqlite3.Connection, digest: str) -> bytes | None:
        row = connection.execute("SELECT content FROM blobs WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        if row[0] is not None:
            return bytes(row[0])
        file = self._files.open(digest)
        if file is None:
            return None
        with os.fdopen(file, "rb") as content:
            return content.read()


def _descriptions(connection: sqlite3.Connection, components: dict[str, str]) -> dict[str, str]:
    sql = "SELECT name, description FROM components WHERE digest IN (SELECT value FROM json_each(?))"
    rows = connection.execute(sql, (json.dumps([*components.values()]),))
    return {name: text for name, text in rows if text is not None}
