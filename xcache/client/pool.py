"""The connections that the threads of a program share, and the notes that wait for a free one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from xcache.client.connection import Connection
from xcache.client.connector import Connector
from xcache.descriptors import may_take
from xcache.errors import ConnectionLostError, DamagedError, NotAskedError, RefusedError, UncacheableError
from xcache.wire import protocol

Result = TypeVar("Result")

# Idle connections that are kept: more than most programs' threads use at once.
MOST_IDLE = 16


class Pool:
    """Connections to one daemon. Thread-safe; each connection is used by one thread at a time."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        # All connections. One that an interrupt takes away from its thread is held by nobody else, and closes.
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        # Connections that threads are making.
        self._coming: set[object] = set()
        # Connections that no thread uses.
        self._idle: list[Connection] = []
        # Connections on which a load was announced that is not over yet.
        self._loading: set[Connection] = set()
        self._notes: list[protocol.Message] = []
        # A closed pool still connects, for threads that have not ended yet, but keeps no connection.
        self._is_closed = False
        self._lock = threading.RLock()

    def take_idle(self) -> Connection | None:
        """Return a connection that no thread uses, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def connect(self, deadline: float, *, limits_connections: bool = False) -> Connection:
        """Return a new connection; if ``limits_connections``, raise NotAskedError where that would be too many."""
        coming = object()
        with self._lock:
            if limits_connections and len(self._open) + len(self._coming) >= may_take():
                raise NotAskedError("other threads use all connections that this program may have")
            self._coming.add(coming)
        try:
            connection = self._connector.connect(deadline)
            with self._lock:
                self._open.add(connection)
        finally:
            self._coming.discard(coming)
        return connection

    def use(self, connection: Connection, work: Callable[[Connection, float], Result], timeout: float) -> Result:
        """Return the result of ``work``; keep the connection unless it may be out of step."""
        try:
            result = work(connection, timeout)
        except (RefusedError, UncacheableError, DamagedError):
            self.put_back(connection)
            raise
        except BaseException:
            self._drop(connection)
            raise
        self.put_back(connection)
        return result

    def tell(self, connection: Connection, message: protocol.Message) -> bool:
        """Send a note without waiting; return whether the connection is still good."""
        try:
            connection.tell(message)
        except ConnectionLostError:
            self._drop(connection)
            return False
        except BaseException:
            # The note may have been sent in part.
            self._drop(connection)
            raise
        return True

    def begin_load(self, connection: Connection, message: protocol.Loading) -> bool:
        """Announce a load on a connection, which stays with its thread; return whether the connection is still good."""
        self._loading.add(connection)
        if self.tell(connection, message):
            return True
        self._loading.discard(connection)
        return False

    def end_load(self, connection: Connection) -> None:
        """Tell the daemon that the load is over, and put the connection back."""
        self._loading.discard(connection)
        if self.tell(connection, protocol.Loaded()):
            self.put_back(connection)

    def put_back(self, connection: Connection) -> None:
        """Let other threads use a connection; send the notes that wait for one."""
        self._keep(connection)
        if self._notes:
            self._send_notes()

    def note(self, message: protocol.Message) -> bool:
        """Send a note on any free connection; return False if it has to wait for one of those in use."""
        with self._lock:
            self._notes.append(message)
        self._send_notes()
        return not (self._notes and self._open)

    def close(self) -> None:
        """Close all connections; those that threads still use or open are closed after the answer."""
        self._connector.start_no_more()
        with self._lock:
            self._is_closed = True
            connections, self._idle = self._idle, []
            loading = list(self._loading)
            self._loading.clear()
        for connection in loading:
            # A thread that is still loading ends with the program; the daemon must not take that for a crash.
            self.tell(connection, protocol.Loaded())
        for connection in connections:
            self._drop(connection)

    def abandon(self) -> None:
        """Drop the parent's connections in a forked child, whatever the parent's threads were doing with them."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._coming.clear()
        self._idle.clear()
        self._loading.clear()
        self._notes.clear()

    def _send_notes(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    # Notes concern connections, which are all closed now.
                    self._notes.clear()
                if not self._notes or not self._idle:
                    return
                connection, note = self._idle.pop(), self._notes[0]
            if self.tell(connection, note):
                with self._lock:
                    if note in self._notes:
                        self._notes.remove(note)
                self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            # A lease would end with its connection.
            if not self._is_closed and (len(self._idle) < MOST_IDLE or connection.has_lease):
                self._idle.append(connection)
                return
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)
