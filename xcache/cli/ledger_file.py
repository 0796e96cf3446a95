"""Read the runs and their ledgers, from the store or from its daemon."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xcache.cli import daemon, store_file
from xcache.cli.daemon_listing import AskedReader
from xcache.cli.store_file import StoreReader
from xcache.client.connection import Connection
from xcache.config.config import Config
from xcache.errors import ClosedStoreError, StoreError, UnavailableError
from xcache.start_up import Run
from xcache.wire import commands, protocol
from xcache.wire.bounded import parsed_json, text_of
from xcache.wire.ledger import Row
from xcache.wire.protocol import MAX_FRAME

NO_RUN = "no run is recorded"
_NONE_BEFORE = f"{NO_RUN}: an older xcache wrote this store, and the next program that uses it brings it up to date"
# The least digits of a run's number that a user may give.
_LEAST_DIGITS = 4
_BEGINNING = re.compile(rf"[0-9a-f]{{{_LEAST_DIGITS},}}")
# A process's start is known to a hundredth of a second, and the clock may have been set since.
_CLOCK_SECONDS = 2.0
_COLUMNS = ", ".join(Row._fields)


class StoredRun(NamedTuple):
    """A run, and the number of its row."""

    id: int
    run: Run

    @property
    def state(self) -> str:
        """Whether it has ended, is running, was killed by a signal; or that nobody here can tell."""
        if "killed_by" in self.run.facts:
            return "killed"
        if self.run.ended_at is not None:
            return "ended"
        is_here = self.run.facts.get("host") == socket.gethostname()
        return "running" if is_here and self._is_alive() else "no end known"

    def _is_alive(self) -> bool:
        try:
            fields = text_of(f"/proc/{self.run.pid}/stat", errors="replace").rpartition(")")[2].split()
            since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return False
        if "started" in self.run.facts:
            return fields[19] == self.run.facts["started"]
        # An older xcache does not say so.
        began = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
        # A forked process counts from the start of its parent.
        return abs(began - self.run.began_at) < _CLOCK_SECONDS or "parent" in self.run.facts


class LedgerReader:
    """The runs of a store, and their ledgers."""

    def __init__(
        self,
        runs: Callable[[], Iterable[StoredRun]],
        rows: Callable[[int], list[Row]],
        rows_with: Callable[[str, Collection[str], int], list[tuple[str, Row]]] = lambda *_: [],
        none: str = NO_RUN,
    ) -> None:
        """``runs`` returns all, the latest first; ``rows`` returns the ledger of the run of a number.

        ``rows_with`` returns rows by run; ``none`` says that there is no run.
        """
        self._runs = runs
        self._rows = rows
        self._rows_with = rows_with
        self._none = none

    def runs(self, limit: int, program: str = "", directory: str | None = None) -> list[StoredRun]:
        """Return the latest runs, of a program or folder if given."""
        found = (
            each
            for each in self._runs()
            if program in each.run.program and directory in (None, each.run.facts.get("directory"))
        )
        return list(itertools.islice(found, limit or None))

    def run(self, wanted: str) -> StoredRun:
        """Return the run whose number begins so; raise StoreError unless there is exactly one.

        ``last`` is the last run that began in this folder, or else the last of all.
        """
        if wanted == "last":
            return self._last(str(Path.cwd()))
        wanted = wanted.lower()
        if not _BEGINNING.fullmatch(wanted):
            raise StoreError(
                f"{wanted!r} is not the beginning of a run: give {_LEAST_DIGITS} or more of its hexadecimal digits, as"
                " `xcache runs` prints them, or `last`"
            )
        found = [each for each in self.runs(0) if each.run.run.startswith(wanted)]
        if not found:
            raise StoreError(f"no run begins with {wanted!r}; `xcache runs` lists them")
        if len(found) > 1:
            some = ", ".join(each.run.run for each in found[:5])
            raise StoreError(f"{len(found)} runs begin with {wanted!r}: {some}")
        return found[0]

    def _last(self, directory: str) -> StoredRun:
        found = self.runs(1, directory=directory) or self.runs(1)
        if not found:
            raise StoreError(self._none)
        return found[0]

    def rows(self, run: StoredRun) -> list[Row]:
        """Return the ledger of a run, in the order in which the program asked."""
        return self._rows(run.id)

    def earlier(self, run: StoredRun, *, column: str, values: Collection[str]) -> list[tuple[str, Row]]:
        """Return the rows of earlier runs that have one of these values, each with its run, in their order.

        ``column`` is ``key``, ``site`` or ``module_name``.

        None are known where only the daemon may read the store.
        """
        return self._rows_with(column, values, run.id) if values else []


@contextlib.contextmanager
def open_ledger(settings: Config) -> Iterator[tuple[LedgerReader, StoreReader | None]]:
    """Yield the ledger, and the store if there is one; the daemon is asked for both if only it may read the store."""
    try:
        store_file.is_there(settings)
    except ClosedStoreError as error:
        closed = error
    else:
        daemon.flush(settings, of_runs=True)
        with store_file.open_store(settings) as store:
            if store is None or not store.has_ledger:
                # Without entries it may as well be one whose making was cut short.
                is_of_before = store is not None and store.totals().get("entries")
                yield LedgerReader(tuple, lambda _: [], none=_NONE_BEFORE if is_of_before else NO_RUN), store
                return
            connected = store.connection
            yield (
                LedgerReader(
                    lambda: _runs_in(connected),
                    lambda run: _rows_in(connected, run),
                    lambda column, values, before: _rows_with(connected, column, values, before),
                ),
                store,
            )
            return
    connection = daemon.find(settings)
    if connection is None:
        raise UnavailableError(f"nobody listens on {settings.socket}, and {closed}")
    with contextlib.closing(connection):
        connection.demand(commands.Sync(), protocol.Done, settings.timeout)
        daemon.note_unrecorded_runs(connection, settings.timeout)
        listed = LedgerReader(
            lambda: _listed_runs(settings, connection), lambda run: _listed_rows(settings, connection, run)
        )
        yield listed, AskedReader(settings, connection)


def _runs_in(connection: sqlite3.Connection) -> Iterator[StoredRun]:
    sql = "SELECT id, run, uid, pid, program, facts, began_at, reported_at, ended_at FROM runs ORDER BY id DESC"
    return (_run(*row) for row in connection.execute(sql))


def _rows_in(connection: sqlite3.Connection, run: int) -> list[Row]:
    sql = f"SELECT {_COLUMNS} FROM ledger WHERE run = ? ORDER BY position"  # noqa: S608 - names of our own
    return [Row(*row) for row in connection.execute(sql, (run,))]


def _rows_with(
    connection: sqlite3.Connection, column: str, values: Collection[str], before: int
) -> list[tuple[str, Row]]:
    sql = (
        f"SELECT runs.run, {_COLUMNS} FROM ledger JOIN runs ON runs.id = ledger.run"  # noqa: S608 - names of our own
        f" WHERE ledger.run < ? AND {column} IN (SELECT value FROM json_each(?)) ORDER BY ledger.run"
    )
    return [(run, Row(*row)) for run, *row in connection.execute(sql, (before, json.dumps(sorted(values))))]


def _listed_runs(settings: Config, connection: Connection) -> Iterator[StoredRun]:
    before = 0
    while True:
        found = connection.demand(commands.AskRuns(before), commands.Runs, settings.timeout).runs
        for row in found:
            number, *columns = row.values()
            run = _run(int(str(number)), *columns)
            yield run
            before = run.id
        if not found:
            return


def _listed_rows(settings: Config, connection: Connection, run: int) -> list[Row]:
    rows: list[Row] = []
    while True:
        asked = commands.AskLedger(run, rows[-1].position + 1 if rows else 0)
        found = connection.demand(asked, commands.LedgerRows, settings.timeout).rows
        rows += [Row(*fields) for fields in found]  # type: ignore[arg-type] # as the daemon writes them
        if not found:
            return rows


def _run(number: int, *columns: Any) -> StoredRun:
    run = Run(*columns)
    try:
        facts = parsed_json(columns[4], MAX_FRAME)
    except ValueError:
        facts = {}
    return StoredRun(number, run._replace(facts=facts if isinstance(facts, dict) else {}))
