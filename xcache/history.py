"""What a program wants, in which order: told to the daemon, so that the next run can be served ahead."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

from xcache import keys, protocol
from xcache.client import Client
from xcache.entries import Entry
from xcache.errors import XcacheError
from xcache.prefetch import Foreseen, Item

logger = logging.getLogger("xcache")

_LONGEST = 2000
# A list that grows is told again when it has grown by as much.
_GROWTH = 1.5


class History:
    """The keys that one process asked for."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.RLock()
        self._items: dict[str, dict[str, protocol.Scalar]] = {}
        self._options: dict[str, bytes] = {}
        # What the daemon knows already of a program of this name.
        self._known: list[str] = []
        self._complete = False

    def note(self, key: str, ahead: tuple[bytes, tuple[int, ...]] | None, platform: str, seconds: float) -> None:
        """This was wanted, and took so long."""
        if ahead is None:
            return
        options, devices = ahead
        with self._lock:
            if key in self._items or len(self._items) >= _LONGEST:
                return
            digest = keys.digest(options)
            self._options.setdefault(digest, options)
            self._items[key] = {
                "key": key,
                "options": digest,
                "devices": " ".join(map(str, devices)),
                "platform": platform,
                "seconds": seconds,
            }

    def is_complete(self) -> None:
        """The program is over: what is told from now on is all of it."""
        self._complete = True

    def predict(self, key: str | None) -> Foreseen:
        """What such a program wanted last time: by its name, or by what it has just asked for."""
        found, entries = self._client.predict(protocol.Predict(*_name(), key))
        try:
            items = [_item(item, found, entries.get(str(item["key"]))) for item in found.items]
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            logger.debug("nothing is known ahead: %s", error)
            return Foreseen()
        if key is None:
            with self._lock:
                self._known = [item.key for item in items]
        return Foreseen(items, found.beginning)

    def tell(self) -> None:
        """Have the daemon remember what was wanted, as far as that is news."""
        with self._lock:
            wanted = list(self._items)
            if not wanted or wanted == self._known or not (self._complete or len(wanted) >= _GROWTH * len(self._known)):
                return
            message = protocol.Remember(*_name(), list(self._items.values()), dict(self._options))
        try:
            self._client.remember(message)
        except (XcacheError, OSError) as error:
            logger.debug("not remembered: %s", error)
            return
        with self._lock:
            self._known = wanted


def _item(item: dict[str, Any], found: protocol.Prediction, entry: Entry | None) -> Item:
    devices = tuple(int(number) for number in item["devices"].split())
    flags, platform, toolchain = found.around[item["around"]].split()
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
    """What this program is called, and a digest of its arguments."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    arguments = "\0".join(sys.argv[1:]).encode("utf-8", "replace")
    return name.encode("utf-8", "replace").decode()[:200], keys.digest(arguments)
