"""The writer thread: the only one that changes the store. It serves users in fair order and groups queued puts."""

from __future__ import annotations

import functools
import itertools
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future

from xcache.errors import RefusedError, XcacheError
from xcache.wire import protocol
from xcached.fair_queue import SharedFairQueue, Turn
from xcached.store.database import is_damage
from xcached.store.entries import EntryKey, Use
from xcached.store.evictor import Evictor, Tally
from xcached.store.jobs import CallJob, Job, LongJob, PutJob, TogetherJob
from xcached.store.statistics import MOST_COUNTERS, is_own_counter
from xcached.store.store import Store

logger = logging.getLogger("xcached")

# Jobs between two flushes, and the seconds after which no further job begins before the next flush.
_BATCH_JOBS, _BATCH_SECONDS = 100, 0.1
# Seconds of evictions between two flushes; they go on while puts are ahead of them by more than a batch's bytes.
_EVICTION_SECONDS = 0.1
# Bytes of contents that share a transaction.
_BATCH_BYTES = 64 * 1024 * 1024
# Uses written in one transaction; clients' jobs come before the next ones.
_USES_PER_FLUSH = 500
# Uses and statistics are written this often while there are no jobs.
_FLUSH_SECONDS = 5.0
# Seconds to return free pages for when the daemon leaves.
_LAST_VACUUM_SECONDS = 1.0
# Seconds that a newcomer stays although it is worth less than all other entries.
_NEWCOMER_SECONDS = 0.5
# Length of a user's queue beyond which notes, which no client waits for, are dropped.
_MOST_NOTES = 2000
_LARGEST_COUNT = 2.0**53
# Any other exception is a defect of the daemon, and is logged with its traceback.
_EXPECTED = (OSError, XcacheError, sqlite3.Error)


class WriterThread:
    """Owns the writing side of a store. One other thread may note uses and counts; any thread may submit jobs."""

    def __init__(self, store: Store, on_damage: Callable[[Exception], None], evictor: Evictor) -> None:
        """``on_damage`` is called on the writer thread when the database itself is damaged."""
        self._store = store
        self._evictor = evictor
        self._on_damage = on_damage
        self._jobs: SharedFairQueue[Job] = SharedFairQueue()
        self._lock = threading.Lock()
        self._uses: dict[EntryKey, Use] = {}
        self._counts: dict[str, float] = {}
        # Whether background work is left for when there are no jobs.
        self._more_to_do = False
        # Bytes and entries that were put, and not yet made up for by evictions.
        self._owed_bytes = self._owed_entries = 0
        self._thread = threading.Thread(target=self._run, name="xcached-writer", daemon=True)

    def start(self) -> None:
        """Start the thread; it first does what was queued before."""
        self._thread.start()

    def submit(self, job: Job, user: int | None) -> None:
        """Queue a job and charge its time to a user (None: the daemon). The writer thread resolves its future."""
        self._jobs.add(user, job)

    def call(self, work: Callable[[], protocol.Message | None], user: int | None = None) -> Future[protocol.Message]:
        """Queue a function; the job's answer is the message it returns, or Done for None."""
        done: Future[protocol.Message] = Future()
        self.submit(CallJob(work, done), user)
        return done

    def note(self, work: Callable[[], protocol.Message | None], user: int) -> None:
        """Queue a function whose result no client waits for; dropped if the user has too many jobs queued."""
        if self._jobs.count(user) < _MOST_NOTES:
            self.call(work, user)

    def call_by_steps(
        self, steps: Generator[None, None, protocol.Message], user: int | None, *, in_order: bool = False
    ) -> Future[protocol.Message]:
        """Queue long work as a generator."""
        done: Future[protocol.Message] = Future()
        self.submit(LongJob(steps, done, in_order), user)
        return done

    def note_use(self, entry: EntryKey, now: float) -> None:
        """Note a hit, to be written later with others."""
        with self._lock:
            # Removed and inserted again, so that the dict is in the order of last uses.
            before = self._uses.pop(entry, None)
            self._uses[entry] = Use(before.hits + 1 if before else 1, now)

    def note_counts(self, counts: Mapping[str, float]) -> None:
        """Note counts, to be written later with others; implausible ones are dropped."""
        with self._lock:
            for name, amount in counts.items():
                may_count = name in self._counts or is_own_counter(name) or len(self._counts) < MOST_COUNTERS
                if may_count and abs(amount) <= _LARGEST_COUNT:
                    self._counts[name] = self._counts.get(name, 0) + amount

    def stop(self, seconds: float) -> bool:
        """Finish all queued jobs; return whether that worked within ``seconds``."""
        self.close()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Have the thread end once all jobs are done; no more may be queued."""
        self._jobs.close()

    def catch_up(self) -> Generator[None, None, protocol.Message]:
        """Yield until everything noted is written and all evictions due are done, newcomers included."""
        for job in self._jobs.take_all_of(None):
            self._do_one(Turn(None, job))
        while self._flush():
            yield
        self._evictor.end_grace()
        # The failure of an eviction must not lose what was written.
        while self._guard(functools.partial(self._make_room, [])):
            yield
        return protocol.Done()

    def _run(self) -> None:
        self._guard(self._sweep)
        # A limit may be lower than before the restart.
        self._guard(lambda: self._make_room([]))
        while not self._jobs.over:
            if not self._more_to_do:
                self._jobs.wait(_NEWCOMER_SECONDS if self._evictor.newcomers_must_go else _FLUSH_SECONDS)
            self._guard(self._flush)
            self._evictor.end_grace()
            sizes = self._do_some()
            self._more_to_do = False
            self._guard(self._flush)
            self._guard(functools.partial(self._make_room, sizes, leaving=self._jobs.over))
        while self._guard(self._flush):
            pass
        self._guard(self._give_back_some)

    def _sweep(self) -> None:
        logger.debug("swept %d leftover files", self._store.sweep())

    def _do_some(self) -> list[int]:
        """Do the jobs queued by now, for a limited time; return the sizes of the puts."""
        sizes: list[int] = []
        until = time.monotonic() + _BATCH_SECONDS
        # Only jobs queued by now: later ones come after the evictions for these puts.
        count, most = 0, min(_BATCH_JOBS, len(self._jobs))
        while count < most and time.monotonic() < until and (turn := self._jobs.take()) is not None:
            if isinstance(turn.item, PutJob):
                puts = self._puts_with(Turn(turn.user, turn.item), most - count)
                self._put_together(puts)
                self._guard(self._flush)
                sizes += [put.item.size for put in puts]
                count += len(puts)
            else:
                self._do_one(turn)
                count += 1
        return sizes

    def _puts_with(self, first: Turn[PutJob], most: int) -> list[Turn[PutJob]]:
        """Return the puts that share a transaction with this one: those next in the queue."""
        turns: list[Turn[PutJob]] = []
        size = 0
        turn: Turn[PutJob] | None = first
        while turn is not None:
            turns.append(turn)
            size += turn.item.size
            # An estimate, for choosing the next job; the measured time is charged afterwards.
            self._jobs.charge(turn.user, turn.item.expected_seconds)
            turn = self._jobs.take_if(PutJob) if len(turns) < most and size < _BATCH_BYTES else None
        return turns

    def _put_together(self, turns: list[Turn[PutJob]]) -> None:
        began = time.monotonic()
        self._put([turn.item for turn in turns])
        expected = [turn.item.expected_seconds for turn in turns]
        error_of_estimate = (time.monotonic() - began) / sum(expected) - 1.0
        for turn, seconds in zip(turns, expected, strict=True):
            self._jobs.charge(turn.user, error_of_estimate * seconds)

    def _do_one(self, turn: Turn[Job]) -> None:
        began = time.monotonic()
        if isinstance(turn.item, LongJob):
            self._step(turn.user, turn.item)
        elif isinstance(turn.item, CallJob):
            self._call(turn.item)
        elif isinstance(turn.item, TogetherJob):
            self._put(turn.item.puts, all_or_none=True)
            self._owed_bytes += sum(job.size for job in turn.item.puts)
            self._owed_entries += len(turn.item.puts)
        else:
            self._put([turn.item])
        self._jobs.charge(turn.user, time.monotonic() - began)

    def _put(self, jobs: Sequence[PutJob], *, all_or_none: bool = False) -> None:
        if not all_or_none and len(jobs) > 1 and self._evictor.is_short_of(sum(job.size for job in jobs)):
            # One put's evictions depend on whether the entries of earlier puts stay.
            for job in jobs:
                self._put([job])
            return
        results: list[protocol.Message] = []
        maybe_orphaned: list[str] = []
        try:
            # Make room for all puts first: an eviction could remove bytes that another put is about to share.
            refusals = [self._admit(jobs)] * len(jobs) if all_or_none else [self._admit([job]) for job in jobs]
            refusals = [refused or self._accept(job) for job, refused in zip(jobs, refusals, strict=True)]
            if all_or_none:
                _raise_first(refusals)
            with self._store.transaction():
                for job, refused in zip(jobs, refusals, strict=True):
                    results.append(refused or self._put_one(job, maybe_orphaned))
                if all_or_none:
                    _raise_first(results)
                # Count them here, since a flush of its own would cost another sync.
                kept = [job.put.stored_size for job, r in zip(jobs, results, strict=True) if r == protocol.Stored(True)]
                if kept:
                    self._count_puts(len(kept), sum(kept))
        except Exception as error:  # noqa: BLE001 - told to each client; the daemon goes on
            self._failed(error, "the entries could not be written")
            results = [refusal(error)] * len(jobs)
        # Perhaps nothing refers to a new file whose entry was not kept, or to a replaced one.
        for job in jobs:
            job.discard(self._store.files)
        arrived = [source.digest for job in jobs for source in job.sources if source.is_file]
        self._guard(lambda: self._store.delete_files([*maybe_orphaned, *arrived]))
        for job, reply in zip(jobs, results, strict=True):
            job.done.set_result(reply)

    def _count_puts(self, count: int, size: int) -> None:
        """Count puts within their transaction; failing to count them does not fail them."""
        try:
            with self._store.savepoint():
                self._store.statistics.add({"stores": count, "bytes_written": size})
        except sqlite3.Error as error:
            if is_damage(error):
                raise
            self._failed(error, "puts could not be counted")

    def _admit(self, jobs: Sequence[PutJob]) -> protocol.Refused | None:
        """Check the contents of puts, then make room for all of them together."""
        wanted: list[PutJob] = []

        def write() -> None:
            for job in wanted:
                self._store.put(job.put, *job.sources, job.writer)

        try:
            wanted += (job for job in jobs if self._is_wanted(job))
            # Check first, so that nothing is evicted for bad contents.
            for source in itertools.chain.from_iterable(job.sources for job in wanted):
                self._store.check(source)
            if wanted:
                self._evictor.admit({job.entry: job.size for job in wanted}, write)
        except Exception as error:
            # One bad put must not take the others with it; a damaged database concerns them all.
            if is_damage(error):
                raise
            return refuse_put(error)
        return None

    def _accept(self, job: PutJob) -> protocol.Refused | None:
        """Move the contents to their places on disk, before the transaction that refers to them."""
        try:
            if self._is_wanted(job):
                for source in job.sources:
                    # Another put's evictions may have deleted a content that was there.
                    self._store.check(source)
                    self._store.accept(source)
        except Exception as error:
            if is_damage(error):
                raise
            return refuse_put(error)
        return None

    def _is_wanted(self, job: PutJob) -> bool:
        return job.put.overwrite or not self._store.has(job.entry)

    def _put_one(self, job: PutJob, maybe_orphaned: list[str]) -> protocol.Message:
        if not job.put.overwrite and self._store.has(job.entry):
            return protocol.Stored(kept=False)
        try:
            with self._store.savepoint():
                maybe_orphaned += self._store.put(job.put, job.executable, job.program, job.writer)
        except Exception as error:
            if is_damage(error):
                raise
            return refuse_put(error)
        return protocol.Stored(kept=True)

    def _make_room(self, sizes: list[int], *, leaving: bool = False) -> bool:
        """Evict what exceeds the limits; return whether more is left.

        While jobs wait, it evicts only as much as was put, which keeps the excess from growing. It does the same when
        the daemon is leaving: the next daemon evicts the rest.
        """
        gone, more = Tally(), False
        until = time.monotonic() + _EVICTION_SECONDS
        self._owed_bytes += sum(sizes)
        self._owed_entries += len(sizes)
        while (freed := self._evictor.evict_some()) is not None:
            gone.add(freed)
            self._owed_bytes -= freed.bytes
            self._owed_entries -= freed.entries
            enough = self._owed_bytes <= 0 and self._owed_entries <= 0
            # Evicting thousands of small entries for a large one takes long.
            enough |= time.monotonic() >= until and self._owed_bytes < _BATCH_BYTES
            if enough and (leaving or self._jobs):
                self._more_to_do = more = True
                break
        else:
            self._owed_bytes = self._owed_entries = 0
        self._owed_bytes, self._owed_entries = max(0, self._owed_bytes), max(0, self._owed_entries)
        if gone.entries:
            logger.info("evicted %s", gone)
        if not self._jobs:
            self._more_to_do |= self._evictor.shortage.give_back() > 0
            if not sizes:
                self._evictor.shortage.shrink_journal()
        self._evictor.shortage.keep_reserve()
        self._store.files.deleted.release()
        return more

    def _give_back_some(self) -> None:
        """Return free pages before the daemon leaves: the next one may not start for days."""
        until = time.monotonic() + _LAST_VACUUM_SECONDS
        while self._evictor.shortage.give_back() and time.monotonic() < until:
            pass

    def _flush(self) -> bool:
        """Write some of the noted uses and all counts, which are lost if that fails; return whether more is left."""
        if not self._store.database.may_grow():
            # They stay noted until there is room.
            return False
        with self._lock:
            uses = {entry: self._uses.pop(entry) for entry in list(itertools.islice(self._uses, _USES_PER_FLUSH))}
            self._more_to_do |= (more := bool(self._uses))
            counts, self._counts = self._counts, {}
        if uses or counts:
            with self._store.transaction():
                self._store.uses.note(uses)
                self._store.statistics.add(counts)
        return more

    def _call(self, job: CallJob) -> None:
        try:
            answer = job.work()
            job.done.set_result(protocol.Done() if answer is None else answer)
        except Exception as error:  # noqa: BLE001 - told to the client; the daemon goes on
            self._failed(error, "a request failed")
            job.done.set_result(refusal(error))

    def _step(self, user: int | None, job: LongJob) -> None:
        """Do one step, and queue the rest behind other users' jobs."""
        try:
            next(job.steps)
        except StopIteration as end:
            job.done.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - told to the client; the daemon goes on
            self._failed(error, "a request failed")
            job.done.set_result(refusal(error))
        else:
            (self._jobs.add_first if job.in_order else self._jobs.add)(user, job)

    def _guard(self, work: Callable[[], object]) -> bool:
        """Do work whose failure concerns no client in particular, and must not end the thread."""
        try:
            return bool(work())
        except Exception as error:  # noqa: BLE001 - see above
            self._failed(error, "the store could not be written")
            return False

    def _failed(self, error: Exception, what: str) -> None:
        logger.error("%s: %s", what, error, exc_info=None if isinstance(error, _EXPECTED) else error)
        if is_damage(error):
            self._on_damage(error)


def _raise_first(answers: Iterable[protocol.Message | None]) -> None:
    for answer in answers:
        if isinstance(answer, protocol.Refused):
            raise RefusedError(answer.kind, answer.reason)


def refuse_put(error: Exception) -> protocol.Refused:
    """Return the refusal of a put; a defect of the daemon is logged with its traceback."""
    if not isinstance(error, _EXPECTED):
        logger.error("a put hit a defect of the daemon", exc_info=error)
    return refusal(error)


def refusal(error: Exception) -> protocol.Refused:
    """Return the message that tells a client of an error."""
    if isinstance(error, RefusedError):
        return protocol.Refused(error.kind, str(error))
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        return protocol.Refused("disk full", str(error))
    return protocol.Refused("store error", f"{type(error).__name__}: {error}")
