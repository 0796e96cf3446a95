"""Tell the daemon which keys a program wants, in order, so that the next run can load them ahead."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcache.client.client import Client
from xcache.client.contents import SealedEntry, aliases_in
from xcache.clock import own_time
from xcache.prefetch.prefetcher import Item
from xcache.request import LoadTarget
from xcache.wire import hashing, protocol

logger = logging.getLogger("xcache")

# A growing list is sent again each time it has grown by this factor.
_GROWTH_FACTOR = 1.5
# A thread that waits for a prediction looks so often whether it has come.
_LOOK_SECONDS = 0.002


class History:
    """The keys that one process asked for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.RLock()
        self._items: dict[str, dict[str, protocol.Scalar]] = {}
        self._options: dict[str, bytes] = {}
        # The keys that the daemon remembers of a program of this name.
        self._remembered: list[str] = []
        self._complete = False
        # True while the daemon is asked for a prediction.
        self._is_asked = False
        self.aliases: dict[str, protocol.Alias] = {}
        """The aliases that came with the prediction, by structure; any thread may look one up."""
        # The first bytes of all structures that had an alias then; None if that is not known.
        self._structures: frozenset[bytes] | None = None

    def note(self, key: str, target: LoadTarget | None, platform: str, seconds: float) -> None:
        """Note that this key was wanted, and took so many seconds to load."""
        if target is None:
            return
        with self._lock:
            if key in self._items or len(self._items) >= protocol.MAX_WANTED:
                return
            digest = hashing.digest(target.options)
            self._options.setdefault(digest, target.options)
            self._items[key] = {
                "key": key,
                "options": digest,
                "devices": " ".join(map(str, target.device_ids)),
                "platform": platform,
                "seconds": seconds,
            }

    def may_have_alias(self, structure: str) -> bool:
        """Return False if the daemon had no alias of a structure when the program began."""
        return self._structures is None or protocol.beginning(structure) in self._structures

    def wait(self, seconds: float) -> None:
        """Wait for a prediction that is on its way, at the expense of the program's allowance."""
        began = now = own_time()
        # Ctrl-C may leave the lock of an event held.
        while self._is_asked and now < began + min(seconds, self._client.allowance()):
            time.sleep(_LOOK_SECONDS)
            now = own_time()
        self._client.charge(now - began)

    def mark_complete(self) -> None:
        """Note that the program is over: the list is complete."""
        self._complete = True

    def predict(self) -> Sequence[Item]:
        """Ask the daemon what a program of this name wanted last time."""
        self._is_asked = True
        try:
            return self._predict()
        finally:
            self._is_asked = False

    def _predict(self) -> Sequence[Item]:
        found, entries = self._client.predict(protocol.Predict(*_name()))
        try:
            items = [_item(item, found, entries.get(str(item["key"]))) for item in found.items]
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            logger.debug("the daemon's prediction cannot be used: %s", error)
            return ()
        if found.structures is not None:
            size, packed = protocol.STRUCTURE_BYTES, found.structures
            self._structures = frozenset(packed[at : at + size] for at in range(0, len(packed), size))
        self.aliases.update((alias.structure, alias) for alias in aliases_in(found))
        with self._lock:
            self._remembered = [item.key for item in items]
        return items

    def send(self) -> None:
        """Send the list to the daemon, if it differs enough from what the daemon remembers."""
        with self._lock:
            wanted = list(self._items)
            is_due = self._complete or len(wanted) >= _GROWTH_FACTOR * len(self._remembered)
            if not wanted or wanted == self._remembered or not is_due:
                return
            message = protocol.Remember(*_name(), list(self._items.values()), dict(self._options))
        try:
            self._client.remember(message)
        except BaseException as error:  # noqa: BLE001 - nobody watches this thread
            logger.debug("could not send the list of wanted keys: %s", error)
            return
        with self._lock:
            self._remembered = wanted


def _item(item: dict[str, Any], found: protocol.Prediction, entry: SealedEntry | None) -> Item:
    devices = tuple(int(number) for number in item["devices"].split())
    flags, platform, toolchain = found.made_with[item["made_with"]].split()
    return Item(
        item["key"],
        found.options[item["options"]],
        devices,
        item["platform"],
        float(item["seconds"]),
        (flags, platform, toolchain),
        entry,
    )


def _name() -> tuple[str, str]:
    """Return this program's name, and a digest of its arguments."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    arguments = "\0".join(sys.argv[1:]).encode("utf-8", "replace")
    return name.encode("utf-8", "replace").decode()[:200], hashing.digest(arguments)
