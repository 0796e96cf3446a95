"""Make the objects that leave this machine out of what the store has."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from xcache.errors import SigningKeyError
from xcache.wire import parcel, protocol
from xcache.wire.checks import proven_texts
from xcache.wire.hashing import digest
from xcache.wire.names import Names
from xcache.wire.ownership import is_signer, signer_uid
from xcache.wire.runs import Found, Run, is_worth_a_part, joined, pack
from xcache.wire.signatures import PrivateKey
from xcached.store.aliases import newest_aliases
from xcached.store.blobs import BlobFiles, read_chunks
from xcached.store.histories import newest_history
from xcached.store.store import Store
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.identity import Identity

_COMPONENTS = tuple(f"{name}_component" for name in protocol.DESCRIBED_COMPONENTS)
_COLUMNS = (
    *("key", "module_name", "platform", "device_kind", "jaxlib_version", "codec", "raw_size", "compile_seconds"),
    *("blob", "stored_size", "program", "writer_program", "created_at"),
)
_SELECT = (
    f"SELECT {', '.join(f'entries.{name}' for name in (*_COLUMNS, *_COMPONENTS))},"  # noqa: S608 - names of our own
    " programs.raw_size, programs.blob FROM entries JOIN programs"
    " ON programs.digest = entries.program AND programs.writer_uid = entries.writer_uid"
    " WHERE key = ? AND entries.writer_uid = ?"
)


# Bytes of the object that says what a program wanted, of an entry in it; aliases of one program.
MOST_RUN_BYTES, _LARGEST_IN_RUN = 64 * 1024**2, 4 * 1024**2
_MOST_ALIASES = 4
_OF_KEY = (
    "SELECT writer_uid, stored_size, program, toolchain_component, compile_seconds FROM entries"
    " WHERE key = ? AND writer_uid IN (?, ?) ORDER BY writer_uid"
)


class Outline(NamedTuple):
    """The part of a run that can be sent: entries by key and writer, the first of a key if it is still there."""

    history: protocol.Remember
    aliases: list[protocol.Alias]
    entries: list[tuple[str, int]]
    toolchain: str
    # The id of the key that signs; empty if none does.
    key_id: str

    def digest(self) -> str:
        """Return a digest that is the same for what is as good to send."""
        keys = [item["key"] for item in self.history.items]
        said = [self.key_id, self.toolchain, keys, self.entries, [alias.structure for alias in self.aliases]]
        return digest(json.dumps(said).encode())


class Outgoing:
    """Reads entries on a connection that only reads, and packs and signs them."""

    def __init__(self, files: BlobFiles, identity: Identity, names: Names, namespace: str) -> None:
        self._files = files
        self._identity = identity
        self.names = names
        self._namespace = namespace
        self._host = socket.gethostname()

    def entry(self, connection: sqlite3.Connection, key: str, uid: int, tier: GuardedTier) -> bytes | None:
        """Return the parcel of an entry for a tier; None if it has gone."""
        return self.parcel(connection, key, uid, self.signer(tier), with_program=tier.remote.programs)

    def outline(
        self, connection: sqlite3.Connection, wanted: protocol.Predict, uid: int, tier: GuardedTier
    ) -> Outline | None:
        """Return what can be sent of what a user's program wanted; None if that is nothing."""
        signer = self.signer(tier)
        key_id = signer.public.id if signer else ""
        # This key may sign again what it has signed elsewhere.
        writers = uid, signer_uid(key_id or tier.remote.id)
        items, options = newest_history(connection, [uid], wanted)
        entries: list[tuple[str, int]] = []
        programs: dict[str, None] = {}
        toolchain = ""
        for item in items:
            key = str(item["key"])
            for writer, size, program, of, seconds in connection.execute(_OF_KEY, (key, *writers)):
                programs[program] = None
                toolchain = toolchain or of
                if size <= _LARGEST_IN_RUN and seconds >= tier.remote.no_upload_below:
                    entries.append((key, writer))
        if not entries:
            return None
        found = (newest_aliases(connection, program, writers, _MOST_ALIASES) for program in programs)
        aliases = [alias for of_program in found for alias in of_program]
        return Outline(protocol.Remember(*wanted, items, options), aliases, entries, toolchain, key_id)

    def run(
        self, connection: sqlite3.Connection, outline: Outline, tier: GuardedTier, there: Sequence[Found]
    ) -> bytes | None:
        """Return the object of an outline, with the parts that are ``there``.

        None if its entries have gone, or what is there says as much.
        """
        signer = self.signer(tier)
        parcels: dict[str, parcel.Content] = {}
        room = MOST_RUN_BYTES // 2
        for key, writer in outline.entries:
            if key not in parcels and room > 0:
                made = self.parcel(connection, key, writer, signer, with_program=tier.remote.programs)
                if made is not None and len(made) <= room:
                    parcels[key], room = made, room - len(made)
        run = Run(outline.history, outline.aliases, parcels, outline.toolchain)
        if not parcels or not is_worth_a_part(run, there):
            return None
        mine = outline.key_id, outline.toolchain
        others = [each.part for each in there if (each.key_id, each.run.toolchain) != mine]
        return joined([pack(run, namespace=self._namespace, signer=signer), *others])

    def signer(self, tier: GuardedTier) -> PrivateKey | None:
        """Return the key to sign with; None if the tier itself is trusted. Raise SigningKeyError if one is missing."""
        signer = self._identity.signer()
        if signer is None and tier.remote.trust != "tier":
            raise SigningKeyError("there is no key to sign what is sent there; `xcache key new NAME` makes one")
        return signer

    def parcel(
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
            writer=self._origin(found["writer_program"], uid)[: protocol.MAX_NAME],
            stored_at=found["created_at"],
            signer=signer,
        )

    def _origin(self, program: str, uid: int) -> str:
        """Return words for who made an entry: what came from another machine says that already."""
        here = f" of uid {uid} on {self._host}"
        return program if is_signer(uid) or program.endswith(here) else program + here

    def _content(self, connection: sqlite3.Connection, digest: str) -> bytes | None:
        row = connection.execute("SELECT content, stored_size FROM blobs WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            return None
        if row[0] is not None:
            return bytes(row[0])
        place = self._files.open(digest)
        if place is None:
            return None
        with os.fdopen(place.descriptor, "rb") as file:
            return b"".join(read_chunks(file.fileno(), row[1], place.offset))


def _descriptions(connection: sqlite3.Connection, components: dict[str, str]) -> dict[str, str]:
    sql = "SELECT name, description FROM components WHERE digest IN (SELECT value FROM json_each(?))"
    # An older daemon may have kept what somebody made up, and this machine would sign it.
    return proven_texts(components, connection.execute(sql, (json.dumps([*components.values()]),)))


def reader_of(store: Store) -> sqlite3.Connection:
    """Return a connection to the store that only reads, for a thread of its own."""
    return sqlite3.connect(f"{store.database.path.as_uri()}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
