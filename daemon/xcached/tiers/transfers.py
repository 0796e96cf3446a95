"""Entries and histories in their signed form, for a file that leaves this machine or came from another one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
import time
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from xcache.errors import ConfigError, DamagedError, RefusedError, SignatureError, SigningKeyError
from xcache.wire import commands, parcel, protocol, runs
from xcache.wire.names import Names
from xcache.wire.ownership import signer_uid
from xcache.wire.signatures import PrivateKey
from xcached.caller import Caller
from xcached.host.reload import LiveSettings
from xcached.store.aliases import AliasRows
from xcached.store.disk import usage_of
from xcached.store.histories import Histories
from xcached.store.intake import Intake
from xcached.store.store import Store
from xcached.store.writer import WriterThread
from xcached.tiers.identity import Identity
from xcached.tiers.keeping import Keeper
from xcached.tiers.outgoing import Outgoing, reader_of
from xcached.tiers.staging import Staged, require_room

NOT_SIGNED, NOT_TRUSTED, DAMAGED = "not signed", "not trusted", "damaged"


class Came(NamedTuple):
    """An object from a file, and whose it becomes if no known key signed it; None: then it is refused."""

    content: memoryview
    vouching_uid: int | None
    # A file that has the content, if it is large.
    file: int | None = None


class Transfers:
    """Its methods wait, and are not for the serving thread."""

    def __init__(
        self,
        store: Store,
        settings: LiveSettings,
        writer: WriterThread,
        intake: Intake,
        aliases: AliasRows,
        histories: Histories,
        is_barred: Callable[[str], bool],
        to_stay_free: Callable[[], int],
    ) -> None:
        """``to_stay_free`` returns how many bytes of the disk must stay free."""
        self._store = store
        self._to_stay_free = to_stay_free
        self._writer = writer
        self._intake = intake
        self._aliases = aliases
        self._histories = histories
        self._is_barred = is_barred
        self._identity = Identity(settings)
        # A daemon keeps its namespace, whatever the settings say later.
        self._namespace = settings.now.namespace
        names = Names(self._namespace)
        self._outgoing = Outgoing(store.files, self._identity, names, self._namespace)
        self._staged: dict[Caller, Staged] = {}
        self._keeper = Keeper(self._identity, names, self._namespace, writer, intake, aliases, histories, is_barred)

    def entry(self, key: str, uid: int, *, with_program: bool, unsigned: bool) -> bytes:
        """Return the signed form of a writer's entry; raise RefusedError if it cannot be had."""
        signer = self._signer(unsigned=unsigned)
        with contextlib.closing(reader_of(self._store)) as connection:
            try:
                made = self._outgoing.parcel(connection, key, uid, signer, with_program=with_program)
            except (DamagedError, sqlite3.Error) as error:
                raise RefusedError(DAMAGED, f"the entry {key[:12]} is left out: {error}") from None
        if made is None:
            raise RefusedError("no entry", f"the entry {key[:12]} has gone")
        return made

    def history(self, run: runs.Run, *, unsigned: bool) -> bytes:
        """Return the signed form of what a program wanted."""
        return runs.joined([runs.pack(run, namespace=self._namespace, signer=self._signer(unsigned=unsigned))])

    def stage_entry(self, importer: Caller, came: Came, key: str, here: Container[str]) -> protocol.Message:
        """Have an entry wait to be stored, unless its digest is ``here``; return the answer. Raise RefusedError."""
        staged = self._staged_with_room(importer, len(came.content))
        with _translated():
            found = parcel.unpack(
                came.content,
                key,
                self._namespace,
                self._identity.trusted(),
                time.time(),
                len(came.content),
                trust_unsigned=came.vouching_uid is not None,
            )
        if self._is_barred(found.put.digest):
            raise RefusedError(protocol.SET_ASIDE, "processes ended here while they loaded exactly these bytes")
        # An executable that is in place in a bundle is copied now, and stays if the bundle goes.
        files, digest = self._store.files, found.put.digest
        is_large = found.put.stored_size > protocol.INLINE_LIMIT
        overwrite = is_large and not files.path(digest).exists() and files.is_elsewhere(digest)
        if digest in here and not overwrite:
            return protocol.Stored(kept=False)
        found = found._replace(put=found.put._replace(overwrite=overwrite))
        job = asyncio.run(self._keeper.job(found, _writer(found.key_id, came), file=came.file))
        texts = sum(map(len, found.put.details.values()))
        staged.add(self._intake.copied(job), len(came.content) + texts)
        return protocol.Done()

    def stage_history(self, importer: Caller, came: Came, wanted: protocol.Predict) -> protocol.Message:
        """Have what a program wanted wait with the entries; return the answer. Raise RefusedError."""
        staged = self._staged_with_room(importer, len(came.content))
        trusted, now, trust_unsigned = self._identity.trusted(), time.time(), came.vouching_uid is not None
        content = bytes(came.content)

        def notes() -> Iterator[Callable[[], None]]:
            for part in reversed(runs.parts_of(content)):
                found = runs.unpack(part, wanted, self._namespace, trusted, now, trust_unsigned=trust_unsigned)
                yield functools.partial(self._remember, _writer(found.key_id, came), found.run)

        with _translated():
            # It is checked, and waits as it came: decoded it may be a hundred times as large.
            for _ in notes():
                pass
        staged.add_notes(notes, len(came.content))
        return protocol.Done()

    def _remember(self, uid: int, run: runs.Run) -> None:
        self._aliases.remember(uid, run.aliases)
        self._histories.remember(uid, run.history)

    def end_import(self, importer: Caller) -> protocol.Message:
        """Store all that a client had wait, or nothing of it; return the answer. Raise RefusedError."""
        return self._staged[importer].store(self._writer) if importer in self._staged else commands.Imported(0, 0, 0)

    def discard(self, importer: Caller) -> None:
        """Give up all that a client had wait: its connection has ended."""
        if (staged := self._staged.pop(importer, None)) is not None:
            staged.discard(self._store.files)

    def discard_all(self) -> None:
        """Give up all that clients had wait."""
        for importer in [*self._staged]:
            self.discard(importer)

    def _staged_with_room(self, importer: Caller, size: int) -> Staged:
        """Return where so many bytes more of a client may wait; raise RefusedError if they may not."""
        staged = self._staged.setdefault(importer, Staged(importer.uid))
        waiting = require_room(staged, self._staged.values())
        if self._store.shared:
            # Nobody knows how long they wait, and other users must not run short meanwhile.
            quota, free = self._store.limits.user_quota, usage_of(self._store.directory).free
            if quota and waiting + size > quota:
                raise RefusedError("quota", f"{waiting + size} bytes are more than one user's entries may hold")
            if free - size < self._to_stay_free():
                raise RefusedError("disk full", f"{size} bytes more would leave less free than min_free demands")
        return staged

    def _signer(self, *, unsigned: bool) -> PrivateKey | None:
        if unsigned:
            return None
        try:
            signer = self._identity.signer()
        except (SigningKeyError, ConfigError) as error:
            raise RefusedError(NOT_SIGNED, str(error)) from None
        if signer is None:
            raise RefusedError(NOT_SIGNED, "there is no key to sign with; `xcache key new NAME` makes one")
        return signer


def _writer(key_id: str, came: Came) -> int:
    """Return whose an object is that was checked: of the key that signed it, or else of who vouches for it."""
    if key_id or came.vouching_uid is None:
        return signer_uid(key_id)
    return came.vouching_uid


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise RefusedError(DAMAGED, str(error)) from None
    except SignatureError as error:
        raise RefusedError(NOT_TRUSTED, str(error)) from None
