"""What is done on the threads that load ahead: ask what will be wanted, fetch it, make sure of it, load it.

Nothing is raised here. What is wrong with an entry is found, and said, by who wants it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from xcache import payload
from xcache.client import Client
from xcache.clock import monotonic
from xcache.entries import Absent
from xcache.errors import StoreError, UnavailableError
from xcache.history import History
from xcache.prefetch import Foreseen, Item, Loaded

logger = logging.getLogger("xcache")


class LoadsAhead(Protocol):
    """Knows how to load an item without being asked for it by jax."""

    def prepare(self, items: Sequence[Item]) -> None:
        """Do what can be done before there is a backend."""

    def is_foreign(self, item: Item) -> bool:
        """Whether it is known that this process must not load it."""

    def check(self, item: Item, is_over: Callable[[], bool]) -> None:
        """UncacheableError for what this process must not load; it may wait to find out until there is no use in it."""

    def __call__(self, item: Item, raw: bytes) -> Any:
        """The executable."""


class Fetcher:
    """Gets from the daemon what the threads of a Prefetcher work at."""

    def __init__(
        self, client: Client, history: History, load: LoadsAhead | None, went_wrong: Callable[[Exception], None]
    ) -> None:
        self._client = client
        self._history = history
        self._load = load
        self._went_wrong = went_wrong

    def predict(self, key: str | None) -> Foreseen:
        """What will be wanted. Who asks first is told what is wrong, and whoever asks after that is not."""
        try:
            foreseen = self._history.predict(key)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program does without
            self._went_wrong(error)
            return Foreseen()
        try:
            if self._load is not None:
                self._load.prepare(foreseen.items)
        except Exception as error:  # noqa: BLE001 - it is found out again when it is needed
            logger.debug("not prepared: %s", error)
        return foreseen

    def load(self, item: Item, soon: Sequence[Item], is_over: Callable[[], bool]) -> Loaded | None:
        """Load what will be wanted; ``soon`` is what this thread will probably load next."""
        try:
            if self._load is None or self._load.is_foreign(item):
                return None
            if item.entry is None:
                # To fetch it takes its time, in which what was loaded before is not at stake.
                self.pause()
            entry = item.entry or self._client.fetch(item.key)
            if isinstance(entry, Absent):
                return None
            raw = payload.open_sealed(item.key, entry.digest, entry.sealed, behind=True)
            # Only now: it waits until there is a backend.
            self._load.check(item, is_over)
            start = monotonic()
            self._client.begin_loading(item.key, entry.digest, ((other.key, other.entry.digest) for other in soon))
            executable = self._load(item, raw)
            return Loaded(executable, entry, monotonic() - start, len(raw))
        except (UnavailableError, StoreError) as error:
            self._went_wrong(error)
            return None
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("not loaded ahead: %s: %s", item.key[:12], error)
            return None

    def pause(self) -> None:
        """Nothing is loaded on this thread for the moment."""
        try:
            self._client.end_loading()
        except Exception as error:  # noqa: BLE001 - as above
            logger.debug("the daemon was not told that something is loaded: %s", error)
