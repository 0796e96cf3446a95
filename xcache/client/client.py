"""The client: every request of a program to the daemon, over connections that its threads share."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from xcache.client.breaker import Breaker, Wait
from xcache.client.connection import Connection, left
from xcache.client.connector import Connector
from xcache.client.contents import Absent, HeldLease, SealedEntry, alias_in, found_in, hand_over, predicted_in
from xcache.client.launcher import Launcher
from xcache.client.pool import Pool
from xcache.clock import monotonic, own_time
from xcache.config.config import Config
from xcache.errors import (
    ConnectionLostError,
    NoAnswerError,
    NotAskedError,
    StoreError,
    TimeSpentError,
    UnavailableError,
)
from xcache.signals import reraise_if_the_programs
from xcache.wire import protocol

Result = TypeVar("Result")

# A client that waits for another's compile hears from the daemon four times a second. Silence beyond this is charged.
_FREE_SILENCE_SECONDS = 1.0
# A complaint has the daemon read the whole entry, which may be large.
_COMPLAIN_SECONDS = 30.0
# Shorter waits for another program's compile are not logged at info level.
_LOGGED_WAIT_SECONDS = 0.5
# The time for a connection on which a process says that it ends, if all that it has are in use.
_LAST_SECONDS = 0.5

logger = logging.getLogger("xcache")


class _ThreadLoads(threading.local):
    """The connection on which this thread announces its loads."""

    connection: Connection | None = None


class Client:
    """Connections to one daemon, shared by all threads of a process."""

    def __init__(self, config: Config, version: str, launcher: Launcher | None = None) -> None:
        """Take the settings; with a ``launcher``, the client starts a daemon if none runs."""
        self._config = config
        self._pool = Pool(Connector(config, version, launcher))
        self._thread_loads = _ThreadLoads()
        # A signal handler may ask while its thread holds the lock.
        self._lock = threading.RLock()
        self._breaker = Breaker(config.timeout)
        # For each background thread that waits for an answer, the moment from which the answer is overdue.
        self._due: dict[threading.Thread, float] = {}

    def get(self, message: protocol.Get, lease: HeldLease | None = None) -> SealedEntry | Absent:
        """Return the stored entry, unchecked, or Absent; raise UncacheableError if the key is marked so.

        If another program is compiling it, wait for as long as the message says. A lease that is granted goes to
        ``lease``.
        """
        since = start = own_time()
        wait = self._breaker.begin()
        # The wait is for the daemon until it gives its first heartbeat, and then for another program's compile.
        is_waiting, first_heartbeat = True, start
        waited_for: protocol.Wait | None = None
        said = False

        def heard() -> None:
            nonlocal since, is_waiting
            now = own_time()
            is_waiting = False
            self._breaker.end(wait, now - since)
            since = now

        def waiting(word: protocol.Wait) -> float:
            nonlocal is_waiting, first_heartbeat, waited_for, said
            heard()
            if waited_for is None:
                first_heartbeat = since
            waited = since - first_heartbeat
            if waited > message.wait + self._config.timeout:
                raise ConnectionLostError(f"no answer within {message.wait:g} s and more")
            if waited >= _LOGGED_WAIT_SECONDS and not said:
                said = True
                logger.info(
                    "waiting for process %d (%s), which has been compiling %s for %.1f s",
                    *(word.pid, word.program, message.module_name, word.seconds),
                )
            waited_for = word
            is_waiting = True
            # Past the time that was asked for, with a moment for the answer, it is the daemon that is waited for.
            is_late = waited > message.wait + _FREE_SILENCE_SECONDS
            self._breaker.continue_wait(wait, 0.0 if is_late else _FREE_SILENCE_SECONDS)
            return wait.seconds

        def get(connection: Connection, timeout: float) -> SealedEntry | Absent:
            answer = connection.ask(message, timeout, waiting=waiting)
            heard()
            found = found_in(connection, answer)
            if isinstance(found, Absent) and found.lease:
                connection.has_lease = True
                if lease is not None:
                    lease.take(message.key, found.lease)
            return found

        try:
            found = self._try(get, start + wait.seconds, limits_connections=True)
        finally:
            if is_waiting:
                heard()
        if isinstance(found, SealedEntry):
            found = found._replace(wait=wait)
        if waited_for is None:
            return found
        waited = since - first_heartbeat
        level = logging.INFO if said else logging.DEBUG
        logger.log(level, "waited %.1f s for process %d (%s)", waited, waited_for.pid, waited_for.program)
        return found._replace(waited=waited)

    @contextlib.contextmanager
    def loading(self, key: str, digest: str) -> Iterator[None]:
        """Tell the daemon that the program loads this entry: if the program crashes meanwhile, that may be why."""
        try:
            self.begin_loading(key, digest, ahead=False)
            yield
        finally:
            self.end_loading()

    def begin_loading(self, key: str, digest: str, *, ahead: bool = True) -> bool:
        """Tell the daemon that this thread begins to load an entry, and that its previous load is over.

        Return False if the daemon could not be told.
        """
        connection = self._thread_loads.connection
        if connection is None:
            connection = self._pool.take_idle()
            if connection is None:
                # Other threads use all connections. Open another: the daemon must learn of a crash all the same.
                try:
                    connection = self._another_connection(ahead=ahead)
                except (UnavailableError, StoreError) as error:
                    logger.debug("the daemon does not know that %s is being loaded: %s", key[:12], error)
                    return False
            self._thread_loads.connection = connection
        if self._pool.begin_load(connection, protocol.Loading(key, digest, ahead)):
            return True
        self._thread_loads.connection = None
        return False

    def _another_connection(self, *, ahead: bool) -> Connection:
        """Connect; with ``ahead`` the program is not waiting for this, so its allowance is not charged."""
        if not ahead:
            with self._charged() as deadline:
                return self._connect(deadline, limits_connections=True)
        if self._breaker.check_background():
            raise NotAskedError("the daemon failed and has not answered since")
        return self._connect(own_time() + self._config.timeout)

    def _connect(self, deadline: float, *, limits_connections: bool = False) -> Connection:
        return self._reporting_failures(lambda: self._pool.connect(deadline, limits_connections=limits_connections))

    def end_loading(self) -> None:
        """Tell the daemon that this thread's load is over, with an executable or without."""
        connection, self._thread_loads.connection = self._thread_loads.connection, None
        if connection is not None:
            self._pool.end_load(connection)

    def release(self, key: str, lease: int) -> None:
        """Give a lease back without storing, so that the next in line may compile. This does not wait for an answer.

        Any connection will do. If there is none, the lease has already ended with the connection it came on.
        """
        if not self._pool.note(protocol.Release(key, lease)):
            with contextlib.suppress(NotAskedError), self._charged() as deadline:
                self._open_for_notes(deadline)

    def fetch(self, key: str) -> SealedEntry | Absent:
        """Return a stored entry that the program will want, without taking a lease or waiting for a compile."""
        message = protocol.Get(key, 0.0, "", "")
        return self._in_background(lambda c, timeout: found_in(c, c.ask(message, timeout)), is_read=True)

    def predict(self, message: protocol.Predict) -> tuple[protocol.Prediction, dict[str, SealedEntry]]:
        """Return what such a program wanted last time, and the entries that came along, by key."""

        def predict(connection: Connection, timeout: float) -> tuple[protocol.Prediction, dict[str, SealedEntry]]:
            found = connection.demand(message, protocol.Prediction, timeout)
            return found, dict(predicted_in(connection, found))

        return self._in_background(predict, is_read=True)

    def remember(self, message: protocol.Remember) -> None:
        """Have the daemon remember, for the next run, what this program wanted."""
        self._demand_done(message)

    def alias(self, structure: str) -> protocol.Alias | None:
        """Return the alias of a jaxpr's structure; raise DamagedAliasError if it is damaged."""

        def ask(connection: Connection, timeout: float) -> protocol.Alias | None:
            return alias_in(structure, connection.ask(protocol.AskAlias(structure), timeout))

        with self._charged() as deadline:
            return self._try(ask, deadline, limits_connections=True)

    def remember_aliases(self, aliases: Sequence[protocol.Alias]) -> None:
        """Have the daemon keep aliases, after the entries of their programs; facts may have ``MAX_RECORD`` bytes."""
        pending = deque(aliases)
        while pending:
            batch: list[list[str | bytes]] = []
            size = 0
            while pending and (not batch or _fits(len(batch), size + len(pending[0].facts))):
                size += len(pending[0].facts)
                batch.append([*pending.popleft()])
            message = protocol.RememberAliases(batch)
            self._demand_done(message)

    def drop_alias(self, structure: str, key: str | None) -> None:
        """Have the daemon forget this user's own alias of a structure, as it is wrong, and pin the entry of ``key``."""
        self._demand_done(protocol.DropAlias(structure))
        if key is not None:
            # Programs need no other message of the command line.
            from xcache.wire import commands

            self._in_background(lambda c, timeout: c.demand(commands.Pin([key]), commands.Pinned, timeout))

    def announce(self, message: protocol.Announce, *, in_background: bool = False) -> None:
        """Announce a toolchain to the daemon, which watches it; with ``in_background``, the program does not wait."""
        if in_background:
            self._demand_done(message)
            return
        with self._charged() as deadline:
            self._try(lambda c, timeout: c.demand(message, protocol.Done, timeout), deadline, limits_connections=True)

    def complain(self, message: protocol.Complain) -> None:
        """Have the daemon examine an entry that could not be used."""
        self._demand_done(message, patience=_COMPLAIN_SECONDS)

    def put(self, message: protocol.Put, sealed: bytes, program: bytes) -> bool:
        """Store an executable and its program; return whether the daemon kept it, having none before."""

        def put(connection: Connection, timeout: float) -> bool:
            until = own_time() + timeout
            inline = [content if len(content) <= protocol.INLINE_LIMIT else None for content in (sealed, program)]
            if large := [content for content in (sealed, program) if len(content) > protocol.INLINE_LIMIT]:
                hand_over(connection, large, left(until))
            whole = message._replace(payload=inline[0], program=inline[1])
            return connection.demand(whole, protocol.Stored, left(until)).kept

        # Writing and syncing takes the daemon longer than an answer, in proportion to the size.
        return self._in_background(put, patience=(len(sealed) + len(program)) / 10e6)

    def mark_not_cacheable(self, key: str, module_name: str, reason: str) -> None:
        """Have the daemon remember that the executable of ``key`` cannot be stored."""
        self._demand_done(protocol.MarkNotCacheable(key, module_name, reason))

    def report(self, counts: dict[str, float]) -> None:
        """Add to the daemon's statistics."""
        self._demand_done(protocol.Report(counts))

    def record_run(self, message: protocol.RecordRun) -> None:
        """Have the daemon keep rows of this run's ledger."""
        self._demand_done(message)

    def note_at_the_end(self, message: protocol.Message) -> None:
        """Send a message and wait for no answer, though no time may be left to wait for the daemon."""
        if not self._pool.note(message):
            self._open_for_notes(own_time() + _LAST_SECONDS)

    def _open_for_notes(self, deadline: float) -> None:
        """Open a connection for notes: those in use may wait for long. If this fails, the next free one will do."""
        with contextlib.suppress(UnavailableError, StoreError):
            self._pool.put_back(self._connect(deadline, limits_connections=True))

    def close(self) -> None:
        """Close all connections; a thread that has not ended yet may still ask."""
        self._pool.close()

    def abandon(self) -> None:
        """Drop the parent's connections in a forked child, whatever the parent's threads were doing with them."""
        self._pool.abandon()
        self._due.clear()

    @contextlib.contextmanager
    def _charged(self) -> Iterator[float]:
        """Charge a wait to the allowance and yield its deadline; raise NotAskedError if nothing is left."""
        start = own_time()
        wait = self._breaker.begin()
        try:
            yield start + wait.seconds
        finally:
            self._breaker.end(wait, own_time() - start)

    def charge(self, seconds: float) -> None:
        """Charge a wait for the daemon to the program's allowance."""
        self._breaker.charge(seconds)

    def refund(self, wait: Wait, seconds: float) -> None:
        """Refund part of a charged wait, because its answer saved the program that much time."""
        self._breaker.refund(wait, seconds)

    def allowance(self) -> float:
        """Return how many seconds the program may still wait for its daemon."""
        return self._breaker.left()

    @property
    def lost_seconds(self) -> float:
        """Seconds that the program has lost to its daemon so far."""
        return self._breaker.lost

    def pause(self) -> float:
        """Return for how many seconds the daemon must not be asked in the background either."""
        return self._breaker.pause()

    def is_late(self) -> bool:
        """Return whether an answer to a background thread is overdue."""
        now = monotonic()
        with self._lock:
            return any(now > since for since in self._due.values())

    def _demand_done(self, message: protocol.Message, patience: float = 0.0) -> None:
        self._in_background(lambda c, timeout: c.demand(message, protocol.Done, timeout), patience=patience)

    def _in_background(
        self, work: Callable[[Connection, float], Result], *, patience: float = 0.0, is_read: bool = False
    ) -> Result:
        """Ask something that the program does not wait for; this also tries a failed daemon again."""

        # The daemon may be asking remote stores meanwhile, and is not slow.
        elsewhere = self._config.remote_timeout if is_read and self._config.has_tiers else 0.0
        patience += elsewhere

        def timed(connection: Connection, timeout: float) -> Result:
            # The clock starts once there is a connection: starting a daemon does not make it slow.
            start = monotonic()
            try:
                return work(connection, timeout)
            finally:
                self._breaker.note_slow_read(monotonic() - start - elsewhere)

        thread = threading.current_thread()
        with self._lock:
            self._due[thread] = monotonic() + patience
        try:
            return self._ask_in_background(timed if is_read else work, patience)
        finally:
            with self._lock:
                self._due.pop(thread, None)

    def _ask_in_background(self, work: Callable[[Connection, float], Result], patience: float) -> Result:
        deadline = own_time() + self._config.timeout
        is_known = self._breaker.has_failed
        if self._breaker.check_background():
            try:
                self._try(self._probe, deadline)
            except ConnectionLostError as error:
                if not is_known:
                    raise
                raise NotAskedError(f"tried again, without success: {error}") from None
        return self._try(work, deadline, patience)

    def _probe(self, connection: Connection, timeout: float) -> None:
        """Ask for the status and time the answer."""
        start = own_time()
        connection.demand(protocol.AskStatus(), protocol.Status, timeout)
        self._breaker.note_probe(own_time() - start)

    def _try(
        self,
        work: Callable[[Connection, float], Result],
        deadline: float,
        patience: float = 0.0,
        *,
        limits_connections: bool = False,
    ) -> Result:
        """Ask; if an idle connection turns out to be lost, ask once more on a new one.

        ``limits_connections``: many threads may ask this at once, so some go without rather than open one more.
        """

        def ask() -> Result:
            connection = self._pool.take_idle()
            if connection is not None:
                if own_time() >= deadline:
                    # The program's other threads took the time; the daemon is not to blame.
                    self._pool.put_back(connection)
                    raise TimeSpentError("no time was left to ask the daemon")
                try:
                    return self._pool.use(connection, work, deadline - own_time() + patience)
                except ConnectionLostError:
                    if own_time() >= deadline:
                        raise
            connection = self._pool.connect(deadline, limits_connections=limits_connections)
            return self._pool.use(connection, work, deadline - own_time() + patience)

        return self._reporting_failures(ask)

    def _reporting_failures(self, work: Callable[[], Result]) -> Result:
        """Run work whose failure means that the daemon is in trouble, and tell the breaker of a failure."""
        try:
            return work()
        except TimeoutError as error:
            reraise_if_the_programs(error)
            late = NoAnswerError(self._config.timeout)
            self._breaker.note_failure(late)
            raise late from None
        except NotAskedError:
            raise
        except (UnavailableError, StoreError) as error:
            self._breaker.note_failure(error)
            raise


def _fits(aliases: int, size: int) -> bool:
    """Return whether one more alias than these, with this size of all, fits into a message."""
    return aliases < protocol.MAX_ALIASES and size <= protocol.MAX_ALIAS_BYTES
