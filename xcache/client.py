"""What a program asks of the daemon: get, put, and a few words about what it counted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from time import sleep
from typing import Any, TypeVar

from xcache import protocol
from xcache.breaker import SWIFT, Breaker
from xcache.clock import own_time
from xcache.config import Config
from xcache.connection import Connection, left
from xcache.entries import Absent, Entry, found_in, in_memory_file, predicted_in
from xcache.errors import (
    ConnectionLostError,
    DamagedError,
    HungUpError,
    NobodyThereError,
    NotAskedError,
    ProtocolError,
    RefusedError,
    StoreError,
    UnavailableError,
    UncacheableError,
)
from xcache.handlers import let_pass
from xcache.launcher import Launcher
from xcache.private import trusted_uids

Result = TypeVar("Result")

_RETRY_EVERY = 0.01
# Who waits for another's compile hears of it four times a second.
_SIGN_OF_LIFE = 1.0
# Shorter waits than this are nobody's news.
_WORTH_SAYING = 0.5

logger = logging.getLogger("xcache")


class _Here(threading.local):
    """The connection on which this thread says what it loads."""

    loading: Connection | None = None


class Client:
    """Connections to one daemon, shared by all threads of a process."""

    def __init__(self, config: Config, version: str, launcher: Launcher | None = None) -> None:
        """With a ``launcher``, a daemon is started where there is none."""
        self._config = config
        self._version = version
        self._launcher = launcher
        self._looking = launcher or Launcher(config)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._loading: dict[Connection, dict[str, str]] = {}
        self._here = _Here()
        self._notes: list[protocol.Message] = []
        self._lock = threading.RLock()
        self._breaker = Breaker(config.timeout)
        self._trusted: set[int] | None = None

    def get(self, message: protocol.Get, leases: list[tuple[str, int]] | None = None) -> Entry | Absent:
        """What is stored, not yet checked; UncacheableError where nothing can be. A lease is added to ``leases``.

        If another program is compiling it at this moment, that is waited for as long as the message says.
        """
        start = own_time()
        first_sign: float | None = None
        waited_for: protocol.Wait | None = None
        said = False

        def waiting(word: protocol.Wait) -> float:
            nonlocal first_sign, waited_for, said
            first_sign = first_sign or own_time()
            waited = own_time() - first_sign
            if waited > message.wait + self._config.timeout:
                raise ConnectionLostError(f"no answer within {message.wait:g} s and more")
            if waited >= _WORTH_SAYING and not said:
                said = True
                logger.info(
                    "waiting for process %d (%s), which has been compiling %s for %.1f s",
                    *(word.pid, word.program, message.module_name, word.seconds),
                )
            waited_for = word
            return max(self._config.timeout, _SIGN_OF_LIFE)

        def get(connection: Connection, timeout: float) -> Entry | Absent:
            nonlocal first_sign
            answer = connection.ask(message, timeout, waiting=waiting)
            first_sign = first_sign or own_time()
            found = found_in(connection, answer)
            if isinstance(found, Absent) and found.lease and leases is not None:
                leases.append((message.key, found.lease))
            return found

        try:
            found = self._try(get, start + self._breaker.check_foreground())
        except (RefusedError, UncacheableError, DamagedError):
            self._breaker.waited((first_sign or own_time()) - start)
            raise
        self._breaker.waited((first_sign or start) - start)
        if waited_for is None or first_sign is None:
            return found
        waited = own_time() - first_sign
        level = logging.INFO if said else logging.DEBUG
        logger.log(level, "waited %.1f s for process %d (%s)", waited, waited_for.pid, waited_for.program)
        return found._replace(waited=waited)

    @contextlib.contextmanager
    def loading(self, key: str, digest: str) -> Iterator[None]:
        """Have the daemon know that this is being loaded: if the process ends here, that may be why."""
        try:
            self.begin_loading(key, digest)
            yield
        finally:
            self.end_loading()

    def begin_loading(self, key: str, digest: str, soon: Iterable[tuple[str, str]] = ()) -> None:
        """As ``loading``, for a thread that loads one after the other: what it began before is loaded.

        What comes ``soon`` is said along with it, and not again when it is begun.
        """
        connection = self._here.loading
        if connection is not None and self._loading.get(connection, {}).get(key) == digest:
            return
        if connection is None:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return
            self._here.loading = connection
        entries = self._loading[connection] = {key: digest, **dict(soon)}
        self._tell(connection, protocol.Loading(entries))

    def end_loading(self) -> None:
        """What this thread began is loaded, or refused to be."""
        connection, self._here.loading = self._here.loading, None
        if connection is not None:
            self._loading.pop(connection, None)
            if self._tell(connection, protocol.Loading({})):
                self._put_back(connection)

    def release(self, key: str, lease: int) -> None:
        """Give a lease back: nothing will be stored, and the next in line may try. The program waits for nothing here.

        It can be told on any connection. Where there is none, the lease has ended with the one it came on.
        """
        with self._lock:
            self._notes.append(protocol.Release(key, lease))
        self._tell_notes()
        if self._notes and self._open:
            # All are in use, perhaps for a long wait. If one cannot be had now, the next that comes free will do.
            with contextlib.suppress(UnavailableError, StoreError):
                deadline = own_time() + self._breaker.check_foreground()
                self._put_back(self._watched(lambda: self._connect(deadline)))

    def _tell_notes(self) -> None:
        """Say what was to be said on whichever connection comes free first."""
        while True:
            with self._lock:
                if not self._open:
                    self._notes.clear()
                if not self._notes or not self._idle:
                    return
                connection, note = self._idle.pop(), self._notes[0]
            if self._tell(connection, note, SWIFT):
                with self._lock:
                    self._idle.append(connection)
                    if note in self._notes:
                        self._notes.remove(note)

    def fetch(self, key: str) -> Entry | Absent:
        """What is stored, for a program that will want it: without a lease, and waiting for nobody."""
        message = protocol.Get(key, 0.0, "", "")
        return self._in_background(lambda c, timeout: found_in(c, c.ask(message, timeout)))

    def predict(self, message: protocol.Predict) -> tuple[protocol.Prediction, dict[str, Entry]]:
        """What such a program wanted last time, and the entries that came along, by key."""

        def predict(connection: Connection, timeout: float) -> tuple[protocol.Prediction, dict[str, Entry]]:
            found = connection.demand(message, protocol.Prediction, timeout)
            return found, dict(predicted_in(connection, found))

        return self._in_background(predict)

    def remember(self, message: protocol.Remember) -> None:
        """What this program wanted, for the next time."""
        self._in_background(lambda c, timeout: c.demand(message, protocol.Done, timeout))

    def announce(self, message: protocol.Announce) -> None:
        """Have the daemon know of a toolchain, and look after it."""
        deadline = own_time() + self._breaker.check_foreground()
        self._try(lambda c, timeout: c.demand(message, protocol.Done, timeout), deadline)

    def complain(self, key: str, digest: str, reason: str) -> None:
        """Have an entry set aside that cannot be used."""
        message = protocol.Complain(key, digest, reason[:1000])
        start = own_time()
        deadline = start + self._breaker.check_foreground()
        try:
            self._try(lambda c, timeout: c.demand(message, protocol.Done, timeout), deadline)
        except RefusedError:
            self._breaker.waited(own_time() - start)
            raise
        self._breaker.waited(own_time() - start)

    def put(self, message: protocol.Put, sealed: bytes, program: bytes) -> bool:
        """Hand over an executable and its program; whether it was kept (and not there already)."""

        def put(connection: Connection, timeout: float) -> bool:
            with contextlib.ExitStack() as stack:
                descriptors = []
                inline: dict[str, Any] = {}
                for field, content in (("payload", sealed), ("program", program)):
                    inline[field] = content if len(content) <= protocol.INLINE_LIMIT else None
                    if inline[field] is None:
                        descriptors.append(stack.enter_context(in_memory_file(content)))
                return connection.demand(message._replace(**inline), protocol.Stored, timeout, descriptors).kept

        # The daemon has to write and sync it: that takes longer than an answer, in proportion to the size.
        return self._in_background(put, patience=(len(sealed) + len(program)) / 10e6)

    def mark_not_cacheable(self, key: str, module_name: str, reason: str) -> None:
        """Have it remembered that what ``key`` compiles to cannot be stored."""
        message = protocol.MarkNotCacheable(key, module_name, reason)
        self._in_background(lambda c, timeout: c.demand(message, protocol.Done, timeout))

    def report(self, counts: dict[str, float]) -> None:
        """Add to the daemon's statistics."""
        self._in_background(lambda c, timeout: c.demand(protocol.Report(counts), protocol.Done, timeout))

    def close(self) -> None:
        """Close what is open; the client can be used again."""
        with self._lock:
            connections, self._idle = self._idle, []
            loading = list(self._loading)
            self._loading.clear()
        for connection in loading:
            # Threads that are still at it end with the program, which is not what they load ending the program.
            self._tell(connection, protocol.Loading({}), SWIFT)
        for connection in connections:
            self._drop(connection)

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connections, whatever its other threads were doing with them."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()
        self._loading.clear()
        self._notes.clear()

    def _in_background(self, work: Callable[[Connection, float], Result], *, patience: float = 0.0) -> Result:
        """Ask what nobody waits for; this is also how a daemon that was in trouble is tried again."""
        deadline = own_time() + self._config.timeout
        is_known = self._breaker.has_failed
        if self._breaker.check_background():
            try:
                self._try(self._knock, deadline)
            except ConnectionLostError as error:
                if not is_known:
                    raise
                raise NotAskedError(f"tried again, without success: {error}") from None
        return self._try(work, deadline, patience)

    def _knock(self, connection: Connection, timeout: float) -> None:
        """Ask what any daemon knows, and see how long that takes."""
        start = own_time()
        connection.demand(protocol.AskStatus(), protocol.Status, timeout)
        self._breaker.answered(own_time() - start)

    def _try(self, work: Callable[[Connection, float], Result], deadline: float, patience: float = 0.0) -> Result:
        """Ask, and once more if a connection turns out to be one to a daemon that has left."""

        def ask() -> Result:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is not None:
                try:
                    return self._use(connection, work, deadline - own_time() + patience)
                except ConnectionLostError:
                    if own_time() >= deadline:
                        raise
            return self._use(self._connect(deadline), work, deadline - own_time() + patience)

        return self._watched(ask)

    def _watched(self, work: Callable[[], Result]) -> Result:
        """Do something whose failure means that the daemon is in trouble."""
        try:
            return work()
        except TimeoutError as error:
            let_pass(error)
            self._breaker.failed()
            raise ConnectionLostError(f"no answer within {self._config.timeout:g} s") from None
        except (UnavailableError, StoreError):
            self._breaker.failed()
            raise

    def _use(self, connection: Connection, work: Callable[[Connection, float], Result], timeout: float) -> Result:
        try:
            result = work(connection, timeout)
        except (RefusedError, UncacheableError, DamagedError):
            self._put_back(connection)
            raise
        except BaseException:
            self._drop(connection)
            raise
        self._put_back(connection)
        return result

    def _tell(self, connection: Connection, message: protocol.Message, timeout: float | None = None) -> bool:
        """Send a note; whether the connection is still good."""
        try:
            connection.tell(message, timeout or self._config.timeout)
        except ConnectionLostError:
            self._drop(connection)
            return False
        except BaseException:
            # Half a note may have been sent.
            self._drop(connection)
            raise
        return True

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)
        if self._notes:
            self._tell_notes()

    def _drop(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)

    def _connect(self, deadline: float) -> Connection:
        """Connect, starting a daemon when there is none, or asking an older one to make room."""
        if self._trusted is None:
            self._trusted = trusted_uids(self._config.daemon_user)
        replaced = started = hung_up = False
        listening: float | None = None
        path = self._config.socket
        while True:
            try:
                connection = Connection(path, left(deadline), self._version, self._trusted)
            except HungUpError:
                # One that was leaving, or being killed, at that moment: the next one will be there soon.
                if hung_up:
                    raise
                hung_up = True
                sleep(min(_RETRY_EVERY, left(deadline)))
                continue
            except NobodyThereError:
                if self._launcher is None:
                    elsewhere = self._looking.address()
                    if elsewhere is None or elsewhere == path:
                        raise
                    path = elsewhere
                    continue
                # Whichever thread started one that failed, it is what all of them wait for: none starts another.
                if listening is None:
                    listening = self._launcher.listen()
                elif reason := self._launcher.failure(listening):
                    raise UnavailableError(f"the daemon did not start: {reason}") from None
                # Again and again: one that is leaving holds the store a moment longer than its socket.
                started = started or self._launcher.start(listening)
                # The daemon of this store may have been started where the socket is elsewhere: without XDG_RUNTIME_DIR
                # (cron, sudo), or with another temporary directory (batch jobs).
                path = (not started and self._launcher.address()) or self._config.socket
                sleep(min(_RETRY_EVERY, left(deadline)))
                continue
            theirs = connection.welcome.protocol
            if theirs == protocol.VERSION:
                with self._lock:
                    self._open.add(connection)
                return connection
            if theirs > protocol.VERSION or replaced or self._launcher is None:
                connection.close()
                raise ProtocolError(
                    f"the daemon speaks version {theirs} of the protocol, this program {protocol.VERSION}"
                )
            with contextlib.closing(connection):
                connection.demand(protocol.Stop("a newer xcache takes over"), protocol.Done, left(deadline))
                connection.wait_for_end(left(deadline))
            replaced = True
