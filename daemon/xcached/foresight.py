"""What a program is handed before it asks: the list of what it will want, and with it as much of that as there is room.

Nothing here changes the store.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Sequence

from xcache import framing, protocol
from xcache.errors import ProtocolError
from xcached.caller import Caller, Process, Reply, close_all
from xcached.lookup import Lookup
from xcached.reading import Hit
from xcached.runs import Runs, nothing
from xcached.trace import Trace

logger = logging.getLogger("xcached")

# So much is handed over before it is asked for, if the list of what is foreseen leaves room for that in a frame.
_INLINE, _IN_FILES = protocol.MAX_FRAME // 2, 16 * 1024 * 1024
_LOOKED_AT = 500
# For so long who has begun counts as beginning: as long as most take until all is loaded.
_BEGINNING_SECONDS = 10.0
# What is added to the list for each that is handed over, its key among the payloads or files included.
_LONGEST_TOLD = 220


class Foresight:
    """Belongs to the thread that serves."""

    def __init__(self, runs: Runs, lookup: Lookup, trace: Trace) -> None:
        self._runs = runs
        self._lookup = lookup
        self._trace = trace
        # When a process asked for the first time.
        self._began: weakref.WeakKeyDictionary[Process, float] = weakref.WeakKeyDictionary()

    def predict(self, caller: Caller, message: protocol.Predict) -> Reply:
        """What will be wanted by a program that begins like this, or after this key."""
        found = self._runs.predict(caller.uid, message)._replace(beginning=self._others_that_begin(caller))
        try:
            listed = len(framing.encode(0, found)) + _LOOKED_AT * _LONGEST_TOLD
        except ProtocolError:
            # Whoever remembered it made the most of every field.
            return Reply(nothing()._replace(beginning=found.beginning))
        handed: list[int] = []
        try:
            for item, hit in self._chosen(caller, found.items[:_LOOKED_AT], min(_INLINE, protocol.MAX_FRAME - listed)):
                key = str(item["key"])
                reply = self._lookup.hand_over(caller, key, hit)
                if reply is None or hit.answer is None:
                    continue
                told = hit.answer.message
                self._trace.note_hit(key, told)
                item |= {name: getattr(told, name) for name in ("digest", "compile_seconds", "stored_size")}
                if hit.is_inline:
                    found.payloads[key] = told.payload
                else:
                    found.files.append(key)
                    handed += reply.descriptors
        except OSError as error:
            logger.warning("no more is handed over ahead: %s", error)
        except BaseException:
            close_all(handed)
            raise
        return Reply(found, tuple(handed))

    def _others_that_begin(self, caller: Caller) -> int:
        """How many other processes asked for the first time lately, are still there and may use the same processors."""
        now = time.monotonic()
        self._began.setdefault(caller.process, now)
        mine = _processors(caller.process)
        return sum(
            process.connections > 0 and now - began < _BEGINNING_SECONDS and not mine.isdisjoint(_processors(process))
            for process, began in self._began.items()
            if process is not caller.process
        )

    def _chosen(
        self, caller: Caller, items: Sequence[dict[str, protocol.Scalar]], room_inline: int
    ) -> Iterator[tuple[dict[str, protocol.Scalar], Hit]]:
        """What comes first, as far as there is room."""
        room, files = {True: room_inline, False: _IN_FILES}, protocol.MAX_PREDICTED_FILES
        for item in items:
            hit = self._lookup.best(caller, str(item["key"]))
            if hit is None or hit.answer is None:
                continue
            told = hit.answer.message
            room[hit.is_inline] -= len(told.payload) if hit.is_inline else max(told.stored_size, 0)
            files -= not hit.is_inline
            if room[hit.is_inline] >= 0 and (hit.is_inline or files >= 0):
                yield item, hit
            elif room[True] < 0 and (room[False] < 0 or files < 0):
                return


def _processors(process: Process) -> set[int]:
    """Those that a process may use, as far as that can be seen from here."""
    try:
        return os.sched_getaffinity(process.pid)
    except (OSError, AttributeError):
        return set(range(os.cpu_count() or 1))
