"""The work of the threads that load ahead: ask the daemon for a prediction, then fetch, check and load each entry.

Only MemoryError leaves it. If an entry is unusable, the program finds that out when it asks for the entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from xcache.client.client import Client
from xcache.client.contents import Absent
from xcache.clock import monotonic
from xcache.errors import StoreError, UnavailableError, is_no_room
from xcache.prefetch.history import History
from xcache.prefetch.prefetcher import Begin, Item, LoadedAhead
from xcache.request import LoadTarget
from xcache.wire import envelope

logger = logging.getLogger("xcache")

# The program waits for a load that XLA has begun as long as compiling took, within these bounds. The upper one guards
# against a compile time that the entry's writer made up.
_MIN_PATIENCE_SECONDS, _MAX_PATIENCE_SECONDS = 1.0, 600.0


class Loader(Protocol):
    """Loads an item before jax asks for it."""

    def prepare(self, items: Sequence[Item]) -> None:
        """Prepare as far as that is possible before jax has a backend."""

    def must_not_load(self, item: Item) -> bool:
        """Return True if this process certainly must not load the item, False if that is not known yet."""

    def target(self, item: Item, is_over: Callable[[], bool]) -> LoadTarget:
        """Return the client and devices to load it onto; wait for a backend until ``is_over``.

        Raise UncacheableError if this process must not load the item.
        """

    def is_current(self, client: Any) -> bool:
        """Return whether jax still uses this client."""

    def __call__(self, target: LoadTarget, raw: bytes) -> Any:
        """Return the executable."""


class Fetcher:
    """The work of a Prefetcher's threads, with entries from the daemon."""

    def __init__(
        self, client: Client, history: History, loader: Loader | None, went_wrong: Callable[[BaseException], None]
    ) -> None:
        self._client = client
        self._history = history
        self._loader = loader
        self._went_wrong = went_wrong

    def predict(self) -> Sequence[Item]:
        """Return what the program will probably want, in order."""
        try:
            items = self._history.predict()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the program goes on without loading ahead
            self._went_wrong(error)
            return ()
        try:
            if self._loader is not None:
                self._loader.prepare(items)
        except BaseException as error:  # noqa: BLE001 - the program meets the same error when it asks
            logger.debug("could not prepare to load ahead: %s", error)
        return items

    def load(self, item: Item, begin: Begin, is_over: Callable[[], bool]) -> LoadedAhead | None:
        """Load an item, unless the program takes it over before XLA begins."""
        try:
            if self._loader is None or self._loader.must_not_load(item):
                return None
            if item.entry is None:
                # A crash while fetching must not be blamed on the load before it.
                self.end_loading()
            entry = item.entry or self._client.fetch(item.key)
            if isinstance(entry, Absent):
                return None
            raw = envelope.open_sealed(item.key, entry.digest, entry.sealed)
            # This step waits for a backend, so everything that needs none comes before it.
            target = self._loader.target(item, is_over)
            # The daemon is told before begin(), after which the program may wait for this load.
            if not self._client.begin_loading(item.key, entry.digest):
                return None
            if not begin(target, min(max(entry.compile_seconds, _MIN_PATIENCE_SECONDS), _MAX_PATIENCE_SECONDS)):
                self.end_loading()
                return None
            start = monotonic()
            executable = self._loader(target, raw)
            return LoadedAhead(executable, entry, start, monotonic() - start, len(raw))
        except (UnavailableError, StoreError) as error:
            self._went_wrong(error)
            return None
        except BaseException as error:  # noqa: BLE001 - as above
            logger.debug("could not load %s ahead: %s", item.key[:12], error)
            if is_no_room(error):
                raise MemoryError from None
            return None

    def is_current(self, client: Any) -> bool:
        """Return whether the program can still use what is loaded onto this client."""
        return self._loader is not None and self._loader.is_current(client)

    def end_loading(self) -> None:
        """Tell the daemon that this thread is loading nothing for the moment."""
        try:
            self._client.end_loading()
        except BaseException as error:  # noqa: BLE001 - as above
            logger.debug("could not tell the daemon that a load is over: %s", error)
