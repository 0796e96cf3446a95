"""Aliases: the program that a structure was lowered to last time, so that it need not be lowered again."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgpack

from xcache.client.client import Client
from xcache.errors import DamagedAliasError
from xcache.request import Alias
from xcache.signals import reraise_if_the_programs
from xcache.trouble import Trouble
from xcache.wire import bounded, protocol, seals

logger = logging.getLogger("xcache")

# A program waits so long to learn what its last run has gained: not to know costs more.
_PATIENCE_SECONDS = 0.1
# The facts of an alias are a flat list.
_SHAPE = bounded.Shape(elements=8, fields=0, containers=1)


class Predicted(Protocol):
    """The aliases that the daemon has told of before the program asks; they may still arrive."""

    @property
    def aliases(self) -> dict[str, protocol.Alias]:
        """The aliases of the programs that this one will probably want, by structure."""

    def may_have_alias(self, structure: str) -> bool:
        """Return False if the daemon has no alias of a structure."""

    def wait(self, seconds: float) -> None:
        """Wait until they have come, if they are on their way."""


class Aliases:
    """The aliases that one process has found, and those that it has made. Thread-safe."""

    def __init__(self, client: Client, predicted: Predicted, trouble: Trouble, *, is_readonly: bool) -> None:
        self._client = client
        self._predicted = predicted
        self._trouble = trouble
        self._is_readonly = is_readonly
        # Each structure that was asked for; None if there is no alias.
        self._known: dict[str, Alias | None] = {}
        # A deque, because any thread may note one while another thread sends the others.
        self._made: deque[protocol.Alias] = deque()
        # Programs that have an entry.
        self._stored: set[str] = set()
        # Records of calls that wait until their program has one.
        self._waiting_records: deque[Alias] = deque()
        # Structures of wrong aliases, each with the key of the entry to which its alias led, if it is known.
        self._wrong: deque[tuple[str, str | None]] = deque()
        # Structures whose aliases must not be sent, though some may be queued.
        self._dropped: set[str] = set()

    def find(self, structure: str) -> Alias | None:
        """Return the alias of a structure; only the program's own exceptions leave."""
        if structure not in self._known:
            try:
                sent = self._predicted.aliases.get(structure)
                if sent is None and self._predicted.may_have_alias(structure):
                    sent = self._client.alias(structure)
                self._known[structure] = None if sent is None else _from_wire(sent)
            except BaseException as error:  # noqa: BLE001 - no trouble of the cache may reach the program
                reraise_if_the_programs(error)
                self._trouble.note(error)
                return None
        return self._known[structure]

    def expected_worth(self) -> float | None:
        """Return what skipping all lowerings of the program's last run is worth; None if that is not known."""
        self._predicted.wait(_PATIENCE_SECONDS)
        best: dict[str, float] = {}
        for alias in self._expected():
            # A record is worth a trace as well.
            worth = math.inf if alias.record else alias.worth
            if worth:
                best[alias.program] = max(worth, best.get(alias.program, 0.0))
        return sum(best.values()) if best else None

    def drop_expected(self) -> None:
        """Forget the aliases of the program's last run, so that the next one makes them and measures their worth."""
        for alias in self._expected():
            self.drop(alias.structure)

    def _expected(self) -> Iterator[Alias]:
        for sent in self._predicted.aliases.copy().values():
            with contextlib.suppress(DamagedAliasError):
                yield _from_wire(sent)

    def note(self, alias: Alias) -> None:
        """Note the program that a structure was lowered to here; ``send`` sends it."""
        if self._is_readonly:
            return
        self._stored.add(alias.program)
        if self._known.get(alias.structure) != alias:
            self._known[alias.structure] = alias
            self._made.append(_to_wire(alias))

    def note_call(self, alias: Alias) -> None:
        """Note the record of a call; ``send`` sends it once there is an entry of its program."""
        if not self._is_readonly:
            self._dropped.discard(alias.structure)
            self._waiting_records.append(alias)

    def forget(self, structure: str) -> None:
        """Forget an alias whose entry is gone, so that it is sent again after the next one is stored."""
        self._known[structure] = None

    def drop(self, structure: str, key: str | None = None) -> None:
        """Forget a wrong alias, and have the daemon delete this user's own; keep the entry of ``key`` for a report."""
        self._known[structure] = None
        self._dropped.add(structure)
        if not self._is_readonly:
            self._wrong.append((structure, key))

    def send(self) -> None:
        """Send what was noted to the daemon, on a background thread."""
        for _ in range(len(self._wrong)):
            structure, key = self._wrong.popleft()
            try:
                self._client.drop_alias(structure, key)
            except BaseException as error:  # noqa: BLE001 - nobody watches this thread
                logger.debug("could not drop an alias: %s", error)
        for _ in range(len(self._waiting_records)):
            alias = self._waiting_records.popleft()
            if alias.program in self._stored:
                self._made.append(_to_wire(alias))
            else:
                self._waiting_records.append(alias)
        made = [self._made.popleft() for _ in range(len(self._made))]
        made = [alias for alias in made if alias.structure not in self._dropped]
        try:
            if made:
                self._client.remember_aliases(made)
        except BaseException as error:  # noqa: BLE001 - nobody watches this thread
            logger.debug("could not send aliases: %s", error)


def _to_wire(alias: Alias) -> protocol.Alias:
    facts: bytes = msgpack.packb(alias[2:])
    return seals.sealed(alias.structure, alias.program, facts)


def _from_wire(sent: protocol.Alias) -> Alias:
    try:
        return Alias(sent.structure, sent.program, *bounded.unpacked(sent.facts, _SHAPE))
    except (ValueError, TypeError):
        raise DamagedAliasError("an alias's facts are malformed", sent.seal) from None
