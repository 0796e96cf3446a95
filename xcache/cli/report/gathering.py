"""Read what a report shows: from the store and the ledger, or from the daemon where only it may read them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from xcache.cli import Failure, programs
from xcache.cli.daemon_listing import AskedReader
from xcache.cli.ledger_file import LedgerReader, StoredRun, open_ledger
from xcache.cli.report import holdings
from xcache.cli.report.ledger_facts import Got, compile_seconds_by_key, got
from xcache.cli.store_file import StoreReader
from xcache.cli.why import explained
from xcache.config.config import Config
from xcache.errors import StoreError, XcacheError
from xcache.wire import ledger

# A report reads this much at most: the older runs are left out.
_MOST_RUNS, _MOST_ROWS = 500, 60_000
# Compiles that are compared with the nearest entry, which may take a second each.
_MOST_EXPLAINED = 30
# Bytes of programs' text: of all, and of one.
_MOST_TEXT, _LONGEST_TEXT = 1_200_000, 200_000
_CHANGES = 20


class RunOf(NamedTuple):
    """A run and how it got its programs."""

    stored: StoredRun
    programs: list[Got]


class Gathered(NamedTuple):
    """All that a report is made of."""

    now: float
    since: float
    focus: RunOf | None
    # The misses of the run, dearest first, as ``xcache why`` explains them.
    explained: list[dict[str, Any]]
    # The other run of a comparison.
    other: RunOf | None
    # The runs since then, the earliest first.
    period: list[RunOf]
    left_out_runs: int
    known: dict[str, float]
    # None where only root and the daemon may read the store.
    held: dict[str, Any] | None
    texts: dict[str, str]
    max_size: int


def gather(settings: Config, run: str, other: str | None, since: float, *, with_programs: bool) -> Gathered:
    """Read what the report on a run (``last``) shows; raise StoreError if there is nothing to show."""
    now = time.time()
    with open_ledger(settings) as (reader, store):
        latest = reader.runs(1)
        if not latest and run == "last" and other is None:
            if store is None or isinstance(store, AskedReader) or not store.totals().get("entries"):
                raise StoreError("there is nothing to report: no run is recorded, and the store is empty")
            focus = None
        else:
            focus = _run_of(reader, reader.run(run))
        compared = _run_of(reader, reader.run(other)) if other is not None else None
        period, left_out = _period(reader, now - since, [each for each in (focus, compared) if each])
        everything = [each for of in (*period, *filter(None, (focus, compared))) for each in of.programs]
        readable = _readable(store)
        return Gathered(
            now,
            now - since,
            focus,
            _explained(reader, store, focus) if focus else [],
            compared,
            period,
            left_out,
            known_seconds(store, everything),
            _held(readable, now) if readable else None,
            _texts(store, focus.programs) if with_programs and store and focus else {},
            settings.max_size,
        )


def known_seconds(store: StoreReader | None, programs: Sequence[Got]) -> dict[str, float]:
    """Return what compiling each key takes, as far as that is known."""
    readable = _readable(store)
    keys = {each.row.key for each in programs if each.row.key}
    return compile_seconds_by_key(programs, holdings.compile_seconds(readable, keys) if readable else {})


def _readable(store: StoreReader | None) -> StoreReader | None:
    """Return the store if sums over it can be had: a daemon hands out single entries."""
    return None if isinstance(store, AskedReader) else store


def _run_of(reader: LedgerReader, run: StoredRun) -> RunOf:
    return RunOf(run, got(run, reader.rows(run)))


def _period(reader: LedgerReader, since: float, have: Sequence[RunOf]) -> tuple[list[RunOf], int]:
    """Return the runs since a moment, the earliest first, and how many are left out because there are too many."""
    found: list[RunOf] = []
    read = {of.stored.id: of for of in have}
    # The latest to begin need not be the latest to report.
    wanted = [run for run in reader.runs(0) if run.run.reported_at >= since]
    rows = 0
    for run in itertools.islice(wanted, _MOST_RUNS):
        found.append(read.get(run.id) or _run_of(reader, run))
        rows += len(found[-1].programs)
        if rows > _MOST_ROWS:
            break
    return found[::-1], len(wanted) - len(found)


def _explained(reader: LedgerReader, store: StoreReader | None, of: RunOf) -> list[dict[str, Any]]:
    """Return the dearest compiles with their causes, and what differs from the nearest entry."""
    compiled = [each for each in of.programs if not each.is_found and each.row.outcome != ledger.FAILED]
    dearest = [each.row for each in sorted(compiled, key=lambda each: -each.seconds)[:_MOST_EXPLAINED]]
    return explained(reader, store, of.stored, dearest)


def _held(store: StoreReader, now: float) -> dict[str, Any]:
    return {
        **holdings.composition(store, now),
        "dearest": holdings.dearest(store),
        "gone": holdings.gone(store),
        "toolchains": store.toolchains(),
        "changes": store.invalidations(_CHANGES),
        "statistics": store.statistics(),
    }


def _texts(store: StoreReader, got_programs: Sequence[Got]) -> dict[str, str]:
    """Return the StableHLO of a run's programs by key, the dearest first, as far as there is room."""
    texts: dict[str, str] = {}
    room = _MOST_TEXT
    for each in sorted(got_programs, key=lambda each: -each.seconds):
        if not each.row.key or each.row.key in texts:
            continue
        try:
            entry = store.entry(each.row.key)
            program = store.program(entry["program"], entry["writer_uid"])
            text = programs.as_text(programs.bytecode(store, program))
        except XcacheError:
            # It is no longer in the store, or damaged.
            continue
        except Failure as failure:
            text = failure.format_message()
        if len(text) > _LONGEST_TEXT:
            text = f"{text[:_LONGEST_TEXT]}\n... cut; `xcache show {each.row.key[:12]} --program` prints all of it"
        if len(text) > room:
            break
        room -= len(text)
        texts[each.row.key] = text
    return texts
