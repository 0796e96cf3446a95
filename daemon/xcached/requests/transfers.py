"""The requests of ``xcache export`` and ``xcache import``: entries and histories in their signed form."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from xcache.errors import RefusedError
from xcache.wire import commands, protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply, Work
from xcached.fair_queue import SharedFairQueue
from xcached.host.reload import LiveSettings
from xcached.requests.lookup import Lookup
from xcached.requests.trust import NOT_PERMITTED, Trust
from xcached.store.histories import history_at, keys_of_history, newest_history
from xcached.store.memory_files import check, close_files, content_of, memory_file
from xcached.store.store import Store
from xcached.store.writer import refusal

if TYPE_CHECKING:
    from xcached.tiers.transfers import Transfers

# Aliases of one program that go along.
_MOST_ALIASES = 4
_MOST_HISTORIES = 10**6
# Bytes of what one program wanted: it waits in memory, and has no executables.
_MOST_HISTORY_BYTES = 64 * 1024**2
# Seconds after which the thread of transfers looks for a job without being told.
_PATIENCE_SECONDS = 60.0
_NOT_A_KEY = Reply(protocol.Refused("protocol error", "that is not a key"))
_NONE = Reply(protocol.Refused("no entry", "there is no such entry that you may load"))


class TransferRequests:
    """Finds on the serving thread what a client may have; a thread of its own packs, signs and checks."""

    def __init__(
        self,
        store: Store,
        settings: LiveSettings,
        lookup: Lookup,
        trust: Trust,
        transfers: Callable[[], Transfers],
        on_import: Callable[[], None],
    ) -> None:
        """``transfers`` is called once, when it is needed; ``on_import`` before anything signed is stored."""
        self._store = store
        self._settings = settings
        self._lookup = lookup
        self._trust = trust
        self._make_transfers = transfers
        self._on_import = on_import
        self._transfers: Transfers | None = None
        self._jobs: SharedFairQueue[Callable[[], None]] = SharedFairQueue()
        self._thread: threading.Thread | None = None
        self.handlers: Handlers = {
            commands.AskHistory: self._history,
            commands.ExportEntry: self._export_entry,
            commands.ExportHistory: self._export_history,
            commands.ImportEntry: self._import_entry,
            commands.ImportHistory: self._import_history,
            commands.EndImport: self._end_import,
        }

    def close(self, seconds: float) -> bool:
        """Finish the request in progress and refuse the others; return whether that worked within ``seconds``.

        The writer thread still runs meanwhile: a request that waited for it after its end would wait for ever.
        """
        self._jobs.close()
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _history(self, caller: Caller, message: commands.AskHistory) -> Answer:
        reading, position, uids = self._store.database.reading, message.position, self._writers_of_histories(caller)
        found = history_at(reading, uids, position) if 0 <= position < _MOST_HISTORIES else None
        if found is None:
            return Reply(commands.WantedBefore("", "", [], 0))
        keys = keys_of_history(reading, uids, *found)
        return Reply(commands.WantedBefore(*found, keys, position + 1))

    def _writers_of_histories(self, caller: Caller) -> list[int]:
        """Return whose histories go along.

        A program that wants what a bundle said has nothing to add, so that the history stays that of its signer.
        """
        return [caller.uid, *self._trust.signer_uids()]

    def _export_entry(self, caller: Caller, message: commands.ExportEntry) -> Answer:
        if not self._trust.administers(caller.uid):
            # It would be signed with the daemon's key.
            return Reply(NOT_PERMITTED)
        hits = self._lookup.readable(caller, message.key) if is_digest(message.key) else []
        if not hits:
            return _NONE
        uid, key = hits[0].writer_uid, message.key
        return self._begin(
            caller,
            lambda transfers: _exported(
                transfers.entry(key, uid, with_program=message.programs, unsigned=message.unsigned)
            ),
        )

    def _export_history(self, caller: Caller, message: commands.ExportHistory) -> Work:
        if not self._trust.administers(caller.uid):
            return Reply(NOT_PERMITTED)
        from xcache.wire.runs import Run

        wanted = protocol.Predict(message.program, message.arguments)
        uids = self._writers_of_histories(caller)
        items, options = newest_history(self._store.database.reading, uids, wanted)
        hits = []
        for item in items:
            hits += self._lookup.readable(caller, str(item["key"]))[:1]
            yield
        if not hits:
            return _NONE
        aliases: list[protocol.Alias] = []
        for program in dict.fromkeys(hit.program for hit in hits):
            aliases += self._lookup.aliases_of(caller, [program], _MOST_ALIASES)
            yield
        run = Run(protocol.Remember(*wanted, items, options), aliases[: protocol.MAX_WANTED], {}, hits[0].toolchain)
        return self._begin(caller, lambda transfers: _exported(transfers.history(run, unsigned=message.unsigned)))

    def _import_entry(self, caller: Caller, message: commands.ImportEntry) -> Answer:
        def keep(transfers: Transfers, content: memoryview, file: int | None) -> Reply:
            from xcached.tiers.transfers import Came

            came = Came(content, caller.uid if message.unsigned else None, file)
            return Reply(transfers.stage_entry(caller, came, message.key, here))

        files = caller.take_files()
        if not is_digest(message.key):
            close_files(files)
            return _NOT_A_KEY
        here = {hit.digest for hit in self._lookup.readable(caller, message.key)}
        return self._import(caller, message, files, self._settings.now.max_payload, keep)

    def _import_history(self, caller: Caller, message: commands.ImportHistory) -> Answer:
        def keep(transfers: Transfers, content: memoryview, file: int | None) -> Reply:
            from xcached.tiers.transfers import Came

            wanted = protocol.Predict(message.program, message.arguments)
            came = Came(content, caller.uid if message.unsigned else None, file)
            return Reply(transfers.stage_history(caller, came, wanted))

        return self._import(caller, message, caller.take_files(), _MOST_HISTORY_BYTES, keep)

    def _end_import(self, caller: Caller, _: commands.EndImport) -> Answer:
        return self._begin(caller, lambda transfers: Reply(transfers.end_import(caller)))

    def _import(
        self,
        caller: Caller,
        message: commands.ImportEntry | commands.ImportHistory,
        files: Sequence[int],
        most: int,
        keep: Callable[[Transfers, memoryview, int | None], Reply],
    ) -> Answer:
        self._on_import()
        if self._discard not in caller.at_end:
            caller.at_end.append(self._discard)
        inline = message.content
        if inline is not None:
            close_files(files)
            return self._begin(caller, lambda transfers: keep(transfers, memoryview(inline), None))
        try:
            if len(files) != 1 or message.size > most:
                raise RefusedError("too large", f"{message.size} bytes are not accepted")
            check(files[0], message.size, shared=self._store.shared)
        except RefusedError as error:
            close_files(files)
            return Reply(refusal(error))

        def kept(transfers: Transfers) -> Reply:
            try:
                if caller.has_left:
                    return Reply(protocol.Done())
                return keep(transfers, content_of(files[0], message.size), files[0])
            finally:
                close_files(files)

        return self._begin(caller, kept)

    def _discard(self, caller: Caller) -> None:
        def work(transfers: Transfers) -> Reply:
            transfers.discard(caller)
            return Reply(protocol.Done())

        self._begin(caller, work)

    def _begin(self, caller: Caller, work: Callable[[Transfers], Reply]) -> Future[Reply]:
        """Do something on the thread of transfers when it is the user's turn, and answer then."""
        done: Future[Reply] = Future()

        def do() -> None:
            try:
                if self._jobs.closed:
                    raise RefusedError("store busy", "the daemon is leaving")
                if self._transfers is None:
                    self._transfers = self._make_transfers()
                done.set_result(work(self._transfers))
            except Exception as error:  # noqa: BLE001 - each request gets an answer
                done.set_result(Reply(refusal(error)))

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="xcached-transfers", daemon=True)
            self._thread.start()
        self._jobs.add(caller.uid, do)
        return done

    def _run(self) -> None:
        while not self._jobs.over:
            self._jobs.wait(_PATIENCE_SECONDS)
            if (turn := self._jobs.take()) is not None:
                began = time.monotonic()
                turn.item()
                self._jobs.charge(turn.user, time.monotonic() - began)
        if self._transfers is not None:
            self._transfers.discard_all()


def _exported(content: bytes) -> Reply:
    if len(content) <= protocol.INLINE_LIMIT:
        return Reply(commands.Exported(content, len(content)))
    descriptor = memory_file()
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
    except OSError:
        os.close(descriptor)
        raise
    return Reply(commands.Exported(None, len(content)), (descriptor,))
