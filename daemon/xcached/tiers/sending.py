"""Send queued entries to the tiers, behind the programs that stored them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from xcache.errors import ConfigError, DamagedError, SigningKeyError
from xcache.wire import protocol
from xcache.wire.runs import Found
from xcache.wire.signatures import PrivateKey
from xcached.store import uploads
from xcached.store.uploads import Upload, Uploads
from xcached.store.writer import WriterThread
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.keeping import Keeper
from xcached.tiers.outgoing import MOST_RUN_BYTES, Outgoing, Outline
from xcached.tiers.room import MOST_BYTES
from xcached.tiers.tier import TierError
from xcached.tiers.workers import Workers

logger = logging.getLogger("xcached")

_T = TypeVar("_T")

# Uploads of one tier at the same time, and rows that are looked at together.
_AT_ONCE, _ROWS = 4, 64
# Seconds after which rows are looked at without being told.
_LONGEST_PAUSE_SECONDS = 30.0
# Seconds after which a store that could not be read is opened again.
_STORE_SECONDS = 5.0
# Somebody who makes a key looks at once whether it is used.
_KEY_SECONDS = 2.0
# The sender looks again after this long whether a tier has an object: a rule may have deleted it there.
_KNOWN_SECONDS, _MOST_KNOWN_RUNS = 86400.0, 2000


class Sender:
    """Sends what is due, tier by tier. Its methods run on the loop of the tiers' thread."""

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        rows: Uploads,
        writer: WriterThread,
        outgoing: Outgoing,
        keeper: Keeper,
    ) -> None:
        """``connect`` opens the store to read it."""
        self._connect = connect
        self._rows = rows
        self._writer = writer
        self._outgoing = outgoing
        self._keeper = keeper
        self._packing = Workers(1)
        self._woken: dict[str, asyncio.Event] = {}
        self._connections: dict[str, sqlite3.Connection] = {}
        # Those in progress: a row is sent once, though others wait for it.
        self._sending: dict[tuple[str, str, str], asyncio.Task[bool]] = {}
        # By tier, program and user: the digest of what the tier has of its run, and until when that is believed.
        self._known_runs: dict[tuple[str, str, int], tuple[str, float]] = {}

    def wake(self) -> None:
        """Have new rows sent."""
        for event in self._woken.values():
            event.set()

    async def run(self, tier: GuardedTier) -> None:
        """Send what is queued for a tier, until cancelled."""
        self._woken[tier.name] = asyncio.Event()
        while True:
            try:
                with contextlib.closing(self._connect()) as connection:
                    self._connections[tier.name] = connection
                    while True:
                        await self._send_some(tier, connection)
            except sqlite3.Error as error:
                # On a full disk, or while somebody else locks the database.
                logger.warning("nothing is sent to %s for now: the store cannot be read (%s)", tier.name, error)
                self._connections.pop(tier.name, None)
                await asyncio.sleep(_STORE_SECONDS)

    async def _send_some(self, tier: GuardedTier, connection: sqlite3.Connection) -> None:
        """Send rows that are due; wait for new ones if there are no more."""
        woken = self._woken[tier.name]
        woken.clear()
        rows = uploads.due(connection, tier.name, time.time(), _ROWS) if tier.may_write else []
        for at in range(0, len(rows), _AT_ONCE):
            some, began, before = rows[at : at + _AT_ONCE], time.monotonic(), tier.counts["bytes_written"]
            sent = await asyncio.gather(*(self._send_once(tier, row) for row in some))
            await self._note(row for row, is_sent in zip(some, sent, strict=True) if is_sent)
            if tier.remote.rate:
                seconds = (tier.counts["bytes_written"] - before) / tier.remote.rate
                await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
            if not tier.may_write:
                break
        if len(rows) < _ROWS or not tier.may_write:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(connection, tier)):
                    await woken.wait()

    def signer(self, tier: GuardedTier) -> PrivateKey | None:
        """Return the key that signs what is sent to a tier; None if nothing needs to be signed."""
        return self._outgoing.signer(tier)

    async def send_now(self, tier: GuardedTier, key: str) -> bool:
        """Send an entry before all others; return whether the tier has it then."""
        connection = self._connections.get(tier.name)
        if connection is None:
            return False
        rows = uploads.of_entry(connection, tier.name, key)
        await self._note([row for row in rows if await self._send_once(tier, row)])
        return await tier.contains(self._outgoing.names.entry(key)) is True

    async def _send_once(self, tier: GuardedTier, row: Upload) -> bool:
        """Send an object, or wait until it is sent; return whether this call has done it, and the row is done with."""
        about = tier.name, row.kind, row.name
        if (sending := self._sending.get(about)) is not None:
            await asyncio.wait({sending})
            return False
        sending = self._sending[about] = asyncio.get_running_loop().create_task(self._send(tier, row))
        sending.add_done_callback(lambda _: self._sending.pop(about))
        return await sending

    def _pause(self, connection: sqlite3.Connection, tier: GuardedTier) -> float:
        if not tier.may_write:
            return max(0.1, tier.writes.seconds_left, tier.reads.seconds_left)
        _, due_at = uploads.waiting(connection, tier.name)
        seconds = _LONGEST_PAUSE_SECONDS if due_at is None else due_at - time.time()
        return min(_LONGEST_PAUSE_SECONDS, max(0.05, seconds))

    async def _send(self, tier: GuardedTier, row: Upload) -> bool:
        """Send one object; return whether its row is done with."""
        send = self._send_entry if row.kind == uploads.ENTRY else self._send_run
        try:
            return await send(tier, row)
        except (SigningKeyError, ConfigError) as error:
            tier.writes.fail(tier.name, str(error), _KEY_SECONDS)
            return False
        except DamagedError as error:
            # The next program that loads it finds that out, too, and it is set aside then.
            logger.warning("%s %s is not sent to %s: %s", row.kind, row.name[:12], tier.name, error)
            return True
        except (sqlite3.Error, OSError) as error:
            logger.warning("%s %s is sent to %s later: %s", row.kind, row.name[:12], tier.name, error)
            await self._put_off(row)
            return False
        except Exception:
            # One entry must not keep the others here.
            logger.exception("%s %s cannot be made ready for %s", row.kind, row.name[:12], tier.name)
            return True

    async def _send_entry(self, tier: GuardedTier, row: Upload) -> bool:
        name = self._outgoing.names.entry(row.name)
        if not tier.remote.writeonly and name not in tier.replaceable:
            try:
                if await self._keeper.is_there(tier, row.name):
                    return True
            except TierError:
                return False
        made = await self._packed(lambda reading: self._outgoing.entry(reading, row.name, row.writer_uid, tier))
        if made is not None and len(made) > MOST_BYTES:
            logger.warning("%s stays here: no machine fetches an entry of %d bytes", row.name[:12], len(made))
            return True
        # It may have gone since.
        return made is None or await self._put(tier, row, name, made)

    async def _send_run(self, tier: GuardedTier, row: Upload) -> bool:
        program, _, arguments = row.name.partition("\0")
        wanted = protocol.Predict(program, arguments)
        outline = await self._packed(lambda reading: self._outgoing.outline(reading, wanted, row.writer_uid, tier))
        if outline is None:
            return True
        about, said = (tier.name, row.name, row.writer_uid), outline.digest()
        known, until = self._known_runs.pop(about, ("", 0.0))
        if known == said and time.monotonic() < until:
            # A program that runs again and again costs no request each time.
            self._known_runs[about] = known, until
            return True
        if not await self._send_outline(tier, row, outline):
            return False
        self._known_runs[about] = said, time.monotonic() + _KNOWN_SECONDS
        if len(self._known_runs) > _MOST_KNOWN_RUNS:
            del self._known_runs[next(iter(self._known_runs))]
        return True

    async def _send_outline(self, tier: GuardedTier, row: Upload, outline: Outline) -> bool:
        wanted = protocol.Predict(outline.history.program, outline.history.arguments)
        name = self._outgoing.names.run(*wanted)
        there: list[Found] = []
        if not tier.remote.writeonly:
            before = await tier.get(name, MOST_RUN_BYTES)
            if tier.reads.problem:
                return False
            if before is not None:
                there = self._keeper.runs_in(tier, before, wanted)
        made = await self._packed(lambda reading: self._outgoing.run(reading, outline, tier, there))
        return made is None or await self._put(tier, row, name, made)

    async def _packed(self, pack: Callable[[sqlite3.Connection], _T]) -> _T:
        """Read, pack and sign on a thread of its own: programs wait for what the loop fetches.

        A large entry takes a second, and a key that comes from a command ten.
        """

        def work() -> _T:
            with contextlib.closing(self._connect()) as connection:
                return pack(connection)

        return await self._packing.do(work)

    async def _put(self, tier: GuardedTier, row: Upload, name: str, content: bytes) -> bool:
        if not await tier.put(name, content):
            await self._put_off(row)
            return False
        return True

    async def _put_off(self, row: Upload) -> None:
        await asyncio.wrap_future(self._writer.call(lambda: self._rows.failed(row)))

    async def _note(self, rows: Iterable[Upload]) -> None:
        done = [*rows]
        if done:
            await asyncio.wrap_future(self._writer.call(lambda: self._rows.done(done)))
