"""Keep in the local store what a tier had, after its signature was checked."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from xcache.errors import DamagedError, SignatureError
from xcache.wire import parcel, protocol
from xcache.wire.hashing import digest
from xcache.wire.names import Names
from xcache.wire.ownership import signer_uid
from xcache.wire.runs import Found, Run, parts_of, unpack
from xcached.store.aliases import AliasRows
from xcached.store.entries import Source, Writer
from xcached.store.histories import Histories
from xcached.store.intake import Intake
from xcached.store.jobs import PutJob
from xcached.store.memory_files import memory_file
from xcached.store.writer import WriterThread
from xcached.tiers import lease_object
from xcached.tiers.describing import label_of
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.identity import Identity

logger = logging.getLogger("xcached")

# Entries of a bundle that are looked at together.
_AT_ONCE = 8


class Keeper:
    """Writes entries of tiers to the store, each as one of the key that signed it."""

    def __init__(
        self,
        identity: Identity,
        names: Names,
        namespace: str,
        writer: WriterThread,
        intake: Intake,
        aliases: AliasRows,
        histories: Histories,
        is_barred: Callable[[str], bool],
        is_in_place: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``is_barred`` says of a digest that processes here have ended while they loaded exactly these bytes.

        ``is_in_place`` says whether an executable can be read where it is.
        """
        self._is_in_place = is_in_place
        self._identity = identity
        self._names = names
        self._namespace = namespace
        self._writer = writer
        self._intake = intake
        self._aliases = aliases
        self._histories = histories
        self._is_barred = is_barred

    async def keep_entry(self, tier: GuardedTier, content: bytes, key: str, unwanted: str) -> bool:
        """Keep an entry; return whether it is one to hand out. Raise XcacheError for one that is not to be trusted."""
        found = await asyncio.to_thread(self.unpacked, tier, content, key)
        if found.put.digest == unwanted or self._is_barred(found.put.digest):
            return False
        return await self.keep(tier, found)

    def lease_in(self, tier: GuardedTier, content: bytes, name: str) -> lease_object.Found | None:
        """Return the lease that an object of a tier is, and why its holder's entry would be of no use here."""
        trust_unsigned = tier.remote.trust == "tier"
        return lease_object.decoded(content, name, self._identity.trusted(), time.time(), trust_unsigned=trust_unsigned)

    def why_useless(self, tier: GuardedTier) -> str:
        """Return why nothing of a tier may be loaded here now; empty if something may."""
        return "" if tier.remote.trust == "tier" else self._identity.trusted().why_nobody(time.time())

    async def is_there(self, tier: GuardedTier, key: str) -> bool:
        """Return whether a tier has an entry that stays: one that counts here, or whose key others may trust.

        Raise TierError if the tier fails.
        """
        try:
            found = await self._label(tier, key)
        except DamagedError:
            return False
        if found is None or (found.why_not and (not found.key_id or self._identity.trusted().knows(found.key_id))):
            return False
        if found.why_not:
            tier.note_foreign(key)
        return True

    async def why_of_no_use(self, tier: GuardedTier, key: str) -> str | None:
        """Return why an entry of a tier would not be loaded here, as far as its header says; None if there is none.

        Raise TierError if the tier fails.
        """
        try:
            found = await self._label(tier, key)
        except DamagedError as error:
            return str(error)
        return None if found is None else found.why_not

    async def _label(self, tier: GuardedTier, key: str) -> parcel.Label | None:
        return await tier.do_reading(label_of(tier, self._names, self._namespace, key, self._identity.trusted()))

    async def keep_run(self, tier: GuardedTier, content: bytes, program: str, arguments: str) -> bool:
        """Keep what a program wanted elsewhere, with its entries and aliases; return whether there was anything."""
        wanted = protocol.Predict(program, arguments)
        kept = False
        # The history that is written last counts first.
        for found in reversed(await asyncio.to_thread(self.runs_in, tier, content, wanted)):
            parcels = await asyncio.to_thread(self._all_unpacked, tier, found.run.parcels)
            await asyncio.gather(*(self.keep(tier, each) for each in parcels))
            if tier.remote.is_bundle:
                await self._keep_beside(tier, found.run)
            uid = signer_uid(found.key_id or tier.remote.id)

            def note(uid: int = uid, run: Run = found.run) -> None:
                self._aliases.remember(uid, run.aliases)
                self._histories.remember(uid, run.history)

            answer = await asyncio.wrap_future(self._writer.call(note, uid))
            kept |= answer == protocol.Done()
        return kept

    async def _keep_beside(self, tier: GuardedTier, run: Run) -> None:
        """Keep the entries of a run that are objects of their own in a bundle, which has everything once."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def keep(key: str) -> None:
            async with room, tier.fetched(self._names.entry(key)) as content:
                for each in await asyncio.to_thread(self._all_unpacked, tier, {key: content} if content else {}):
                    await self.keep(tier, each)

        await asyncio.gather(*(keep(str(item["key"])) for item in run.history.items))

    def runs_in(self, tier: GuardedTier, content: bytes, wanted: protocol.Predict) -> list[Found]:
        """Return the parts of an object that somebody trusted has signed, the newest first; others are noted."""
        trusted, found = self._identity.trusted(), []
        for part in parts_of(content):
            try:
                found.append(
                    unpack(
                        part, wanted, self._namespace, trusted, time.time(), trust_unsigned=tier.remote.trust == "tier"
                    )
                )
            except (DamagedError, SignatureError) as error:
                tier.note_rejected(f"what {wanted.program} wanted", str(error))
        return found

    def _all_unpacked(self, tier: GuardedTier, parcels: Mapping[str, parcel.Content]) -> list[parcel.Parcel]:
        found = []
        for key, content in parcels.items():
            try:
                found.append(self.unpacked(tier, content, key))
            except (DamagedError, SignatureError) as error:
                tier.note_rejected(key, str(error))
        return [each for each in found if not self._is_barred(each.put.digest)]

    def unpacked(self, tier: GuardedTier, content: parcel.Content, key: str) -> parcel.Parcel:
        """Return an entry of a tier; raise XcacheError if it is damaged, or nobody trusted has signed it."""
        return parcel.unpack(
            content,
            key,
            self._namespace,
            self._identity.trusted(),
            time.time(),
            len(content),
            trust_unsigned=tier.remote.trust == "tier",
        )

    async def keep(self, tier: GuardedTier, found: parcel.Parcel) -> bool:
        """Write an entry whose signature was checked; return whether it is stored."""
        uid = signer_uid(found.key_id or tier.remote.id)
        answer = await self.put(found, uid, in_place=tier.remote.is_bundle and self._is_in_place(found.put.digest))
        if isinstance(answer, protocol.Stored):
            return True
        logger.info("%s of %s is not kept here: %s", found.put.module_name, tier.name, answer)
        return False

    async def put(self, found: parcel.Parcel, uid: int, *, in_place: bool = False) -> protocol.Message:
        """Write an entry whose signature was checked, as one of this writer; a large one may stay ``in_place``."""
        job = await self.job(found, uid, in_place=in_place)
        if job.executable.descriptor is None and job.program.descriptor is None:
            self._writer.submit(job, uid)
        else:
            self._intake.submit(job, uid)
        return await asyncio.wrap_future(job.done)

    async def job(self, found: parcel.Parcel, uid: int, *, in_place: bool = False, file: int | None = None) -> PutJob:
        """Return the job that writes an entry; ``file`` ends with its contents, if they are in one."""
        program = found.program
        put = found.put
        if program is None:
            # It stays where it was lowered; the entry's row needs one.
            program = memoryview(b"")
            put = put._replace(program_stored_digest=digest(program), program_stored_size=0, program_raw_size=0)
        if in_place and put.stored_size > protocol.INLINE_LIMIT:
            executable = Source(put.digest, put.stored_size, None, None, checked=True)
        else:
            executable = await _source(put.digest, found.payload, file, len(program))
        try:
            of_program = await _source(put.program_stored_digest, program, file, 0)
        except BaseException:
            if executable.descriptor is not None:
                os.close(executable.descriptor)
            raise
        return PutJob(put, executable, of_program, Writer(uid, 0, found.writer), Future())


async def _source(digest: str, content: memoryview, file: int | None, following: int) -> Source:
    """Return a content for the store; one too large for a row is in a file, before so many bytes ``following``."""
    if len(content) <= protocol.INLINE_LIMIT:
        return Source(digest, len(content), bytes(content), None)
    if file is not None:
        offset = os.fstat(file).st_size - following - len(content)
        return Source(digest, len(content), None, os.dup(file), offset)
    return Source(digest, len(content), None, await asyncio.to_thread(_filled, content))


def _filled(content: memoryview) -> int:
    file = memory_file()
    with open(file, "wb", closefd=False) as written:
        written.write(content)
    return file
