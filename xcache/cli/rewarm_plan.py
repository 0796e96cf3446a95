"""Plan what ``xcache rewarm`` builds: read entries, and have a worker say which keys their programs have now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from xcache.cli import daemon_listing
from xcache.cli.option_lines import named
from xcache.cli.programs import ProgramElsewhere, both
from xcache.cli.store_file import Row, StoreReader
from xcache.cli.writers import trusted_signers
from xcache.config.config import Config
from xcache.errors import WorkerError, XcacheError
from xcache.warming.building import Task
from xcache.warming.place import Place, place_of
from xcache.warming.process import PLAN_SECONDS, Worker
from xcache.wire.hashing import digest

_TEXTS = ("options", "flags", "platform")


class Candidate(NamedTuple):
    """An entry that another toolchain has made."""

    key: str
    module_name: str
    seconds: float
    toolchain: str
    texts: dict[str, str]


class LeftOut(NamedTuple):
    """An entry of which nothing is built, and why."""

    key: str
    module_name: str
    reason: str


class Plan(NamedTuple):
    """The entries to build, those that are left out, and how many are this toolchain's own."""

    tasks: list[Task]
    left_out: list[LeftOut]
    current: int


def plan(settings: Config, rows: Sequence[Row], python: str, advance: Callable[[], object]) -> Plan:
    """Return what to build of these entries with the jaxlib of a Python; call ``advance`` after each."""
    by_place: dict[Place, list[Candidate]] = {}
    left_out: list[LeftOut] = []
    for row in rows:
        try:
            candidate = _candidate(settings, row)
            place = place_of(candidate.texts["flags"], candidate.texts["platform"])
        except (ValueError, XcacheError) as error:
            left_out.append(LeftOut(row["key"], row["module_name"], str(error)))
            advance()
        else:
            by_place.setdefault(place, []).append(candidate)
    tasks: dict[str, Task] = {}
    current = 0
    for place, candidates in by_place.items():
        with contextlib.closing(_Planner(python, place)) as planner:
            for each in candidates:
                found = _planned(settings, planner, each)
                if found is None:
                    current += 1
                elif isinstance(found, LeftOut):
                    left_out.append(found)
                elif found.key not in tasks or tasks[found.key].seconds < found.seconds:
                    # Several toolchains may have compiled one program.
                    tasks[found.key] = found
                advance()
    return Plan(sorted(tasks.values(), key=lambda task: -task.seconds), left_out, current)


def readable(rows: Iterable[Row]) -> tuple[list[Row], list[LeftOut]]:
    """Return the entries that this user or a trusted key wrote, a key once, and the others."""
    mine = {os.getuid(), *trusted_signers()}
    taken = {row["key"]: row for row in rows if row["writer_uid"] in mine}
    others = [
        LeftOut(row["key"], row["module_name"], "another user wrote it") for row in rows if row["key"] not in taken
    ]
    return list(taken.values()), others


def _candidate(settings: Config, row: Row) -> Candidate:
    with _entry(settings, row["key"]) as (store, entry):
        texts = {}
        for name in _TEXTS:
            component = entry[f"{name}_component"]
            text = store.description(component)
            if text is None or digest(text.encode()) != component:
                raise ValueError("the store has no complete description of its compile")
            texts[name] = text
    seconds, toolchain = float(row["compile_seconds"]), entry["toolchain_component"]
    return Candidate(row["key"], row["module_name"], seconds, toolchain, texts)


@contextlib.contextmanager
def _entry(settings: Config, key: str) -> Iterator[tuple[StoreReader, Row]]:
    """Yield a reader with one entry; the store is open for no longer than that, and has one program in memory."""
    with daemon_listing.open_store_or_asking(settings) as store:
        if store is None:
            raise ValueError("it is gone from the store")
        yield store, store.entry(key)


def _planned(settings: Config, planner: _Planner, each: Candidate) -> Task | LeftOut | None:
    """Return the task for an entry, why there is none, or None if the toolchain is the new one itself."""
    try:
        if planner.toolchain() == each.toolchain:
            return None
        plain, located = _programs(settings, each.key)
        if not located:
            # jax's own compiles leave one; a program that calls jaxlib itself chooses options that nobody else knows.
            raise ValueError("its program was compiled by xcache.compile, which knows nothing of jax's options")
        if plain == located:
            raise ValueError("its key has source locations (jax_compilation_cache_include_metadata_in_key)")
        answer = planner.ask({"action": "plan", "program": located, "texts": each.texts})
    except (ValueError, XcacheError) as error:
        return LeftOut(each.key, each.module_name, str(error))
    return Task(
        key=answer["key"],
        module_name=each.module_name,
        place=planner.place,
        components=answer["components"],
        options=answer["options"],
        seconds=each.seconds,
        program=lambda: _programs(settings, each.key)[1],
    )


def _programs(settings: Config, key: str) -> tuple[bytes, bytes]:
    """Return an entry's program without and with its locations."""
    with _entry(settings, key) as (store, entry):
        try:
            return both(store, store.program(entry["program"], entry["writer_uid"]))
        except ProgramElsewhere as elsewhere:
            raise ValueError(elsewhere.message) from None


class _Planner:
    """A worker that plans; one that ends is replaced, and only the entry that it was at is left out."""

    def __init__(self, python: str, place: Place) -> None:
        self.place = place
        self._python = python
        self._worker: Worker | None = None
        self._toolchain = ""
        self._trouble: WorkerError | None = None

    def toolchain(self) -> str:
        """Return the digest of the toolchain here; raise XcacheError if there is no such client."""
        if not self._toolchain:
            self._toolchain = str(self.ask({"action": "toolchain"})["toolchain"])
        return self._toolchain

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an answer; raise ValueError with the reason why there will never be one."""
        if self._trouble is not None:
            raise self._trouble
        if self._worker is None:
            try:
                self._worker = Worker(self._python, self.place)
            except WorkerError as error:
                # It is the same for all entries of this place.
                self._trouble = WorkerError(f"jax does not start with its XLA flags: {error}")
                raise self._trouble from None
        try:
            answer = self._worker.ask(message | {"platform": self.place.platform}, PLAN_SECONDS)
        except WorkerError:
            self.close()
            raise
        if "refused" in answer:
            lines = sorted({named(f"{path}=").partition(" = ")[0] for path in answer.get("options", ())})
            raise ValueError(answer["refused"] + (f": {', '.join(lines)}" if lines else ""))
        return answer

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
