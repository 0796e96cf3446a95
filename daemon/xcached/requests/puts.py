"""The requests that add to the store: files for large contents, puts, and not-cacheable marks."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future

from xcache.errors import RefusedError
from xcache.wire import protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Reply, duplicates
from xcached.host.reload import LiveSettings
from xcached.requests.leases import Leases
from xcached.requests.strikes import Strikes
from xcached.store.entries import EntryKey, Source, Writer
from xcached.store.intake import MOST_IN_FLIGHT_BYTES, Intake
from xcached.store.jobs import PutJob
from xcached.store.memory_files import check, close_files, memory_file
from xcached.store.store import Store
from xcached.store.writer import WriterThread, refusal

_LARGEST = 2**53
# The codec's name is stored with each entry without counting toward limits.
_LONGEST_CODEC = 32
# The kinds of refusals that are noted as the cause of a later miss. While the disk or the journal is full, a note would
# take the room that is wanted.
_NOTED = ("too large", "quota", "store full")


class Puts:
    """Checks what clients send, and has it written."""

    def __init__(
        self,
        store: Store,
        settings: LiveSettings,
        writer: WriterThread,
        intake: Intake,
        strikes: Strikes,
        leases: Leases,
    ) -> None:
        self._store = store
        self._settings = settings
        self._writer = writer
        self._intake = intake
        self._strikes = strikes
        self._leases = leases
        self._loop = asyncio.get_running_loop()
        self.handlers: Handlers = {
            protocol.AskFiles: self._lend,
            protocol.Put: self._put,
            protocol.MarkNotCacheable: self._mark_not_cacheable,
        }

    def _lend(self, caller: Caller, message: protocol.AskFiles) -> Answer:
        if not 0 < message.files <= protocol.MAX_FILES:
            return Reply(protocol.Refused("protocol error", f"{message.files} files are not needed for a put"))
        close_files(caller.take_files())
        for _ in range(message.files):
            caller.files.append(memory_file())
        return Reply(protocol.Files(), tuple(duplicates(caller.files)))

    def _put(self, caller: Caller, message: protocol.Put) -> Answer:
        # This may raise, so it comes before the files are taken over and have to be closed.
        is_new = message.overwrite or not self._has(caller.uid, message.key)
        files = caller.take_files() if message.files else []
        refused = self._why_refused(caller, message, files)
        if refused is not None:
            close_files(files)
            self._leases.fail(message.key, caller.uid)
            self._note_refusal(caller.uid, message, refused)
            return Reply(refused)
        caller.process.compiled += message.compile_seconds
        is_large = len(files) > 0
        of_executable = files.pop(0) if message.payload is None else None
        of_program = files.pop(0) if message.program is None else None
        executable = Source(message.digest, message.stored_size, message.payload, of_executable)
        program = Source(message.program_stored_digest, message.program_stored_size, message.program, of_program)
        done: Future[protocol.Message] = Future()
        self._settle_when(done, message.key, caller.uid)
        done.add_done_callback(lambda done: self._note_refusal(caller.uid, message, done.result()))
        writer = Writer(caller.uid, caller.pid, caller.program)
        job = PutJob(message, executable, program, writer, done)
        if is_large and is_new:
            self._intake.submit(job, caller.uid, MOST_IN_FLIGHT_BYTES if self._store.shared else 0)
        else:
            self._writer.submit(job, caller.uid)
        return done

    def _mark_not_cacheable(self, caller: Caller, message: protocol.MarkNotCacheable) -> Answer:
        def mark() -> None:
            with self._store.transaction():
                self._store.mark_not_cacheable(message, caller.uid)

        if not is_digest(message.key):
            return Reply(protocol.Refused("protocol error", f"{message.key[:80]!r} is not a digest"))
        done = self._writer.call(mark, caller.uid)
        self._settle_when(done, message.key, caller.uid)
        return done

    def _has(self, uid: int, key: str) -> bool:
        """Return whether a user seems to have an entry under a key; the writer thread checks again."""
        return any(hit.writer_uid == uid for hit in self._store.reader.find(key))

    def _settle_when(self, done: Future[protocol.Message], key: str, writer: int) -> None:
        """Have waiting clients answered once the write has succeeded or failed."""
        done.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._has_put, key, writer, done.result()))

    def _has_put(self, key: str, writer: int, answer: protocol.Message) -> None:
        if isinstance(answer, protocol.Refused):
            self._leases.fail(key, writer)
        else:
            self._leases.settle(key, writer)

    def _note_refusal(self, uid: int, put: protocol.Put, answer: protocol.Message) -> None:
        """Have a refusal remembered: it is why the next program misses."""
        if not isinstance(answer, protocol.Refused) or answer.kind not in _NOTED:
            return
        entry, kind = EntryKey(put.key, uid), answer.kind

        def note() -> None:
            # On a full disk there may be no room for this either.
            with contextlib.suppress(sqlite3.OperationalError), self._store.transaction():
                self._store.note_refusal(entry, put.compile_seconds, kind)

        self._writer.note(note, uid)

    def _why_refused(self, caller: Caller, message: protocol.Put, files: Sequence[int]) -> protocol.Refused | None:
        named = (message.key, message.digest, message.program_digest, message.program_stored_digest)
        for digest in (*named, *message.components.values()):
            if not is_digest(digest):
                return protocol.Refused("protocol error", f"{digest[:80]!r} is not a digest")
        if len(message.codec) > _LONGEST_CODEC:
            return protocol.Refused("protocol error", f"{message.codec[:80]!r} is not a codec")
        if missing := [name for name in protocol.DESCRIBED_COMPONENTS if name not in message.components]:
            return protocol.Refused("protocol error", f"the key has no {missing[0]}")
        sizes = (message.raw_size, message.stored_size, message.program_raw_size, message.program_stored_size)
        if not all(0 <= size <= _LARGEST for size in sizes) or not 0 <= message.compile_seconds <= _LARGEST:
            return protocol.Refused("protocol error", "a size or time is out of range")
        if len(files) != message.files:
            there = f"{len(files)} files were asked for, and the message needs {message.files}"
            return protocol.Refused("protocol error", there)
        largest = max(message.stored_size, message.program_stored_size)
        if largest > self._settings.now.max_payload:
            return protocol.Refused(
                "too large", f"{largest} bytes are above the limit of {self._settings.now.max_payload}"
            )
        if self._strikes.bars(message.digest, caller.uid):
            return protocol.Refused(protocol.SET_ASIDE, "processes ended while they loaded exactly these bytes")
        contents = (message.payload, message.stored_size), (message.program, message.program_stored_size)
        inline = [content for content, _ in contents if content is not None]
        if any(len(content) > protocol.INLINE_LIMIT for content in inline):
            # A prediction reads many of them in one turn.
            there = f"a content of more than {protocol.INLINE_LIMIT} bytes comes in a file"
            return protocol.Refused("protocol error", there)
        large = [size for content, size in contents if content is None]
        try:
            for file, size in zip(files, large, strict=True):
                check(file, size, shared=self._store.shared)
        except RefusedError as error:
            return refusal(error)
        return None
