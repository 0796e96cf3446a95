"""What programs wanted, run by run: the next run of the same, or of one that begins like it, is told ahead."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from xcache import protocol
from xcached.store import Store

_MOST_RUNS_OF_ONE_USER = 200
# With the same arguments: a script that was changed, or that does now this and now that.
_MOST_RUNS_OF_ONE_PROGRAM = 8
_MOST_ITEMS = 2000
_TELLING = 8
_LARGEST_OPTIONS = 1 << 18
_FIELDS = {"key": str, "options": str, "devices": str, "platform": str, "seconds": float}


class Runs:
    """Rows of runs. What is read belongs to the thread that serves, what is written to the one that writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._reading = store.database.reading

    def predict(self, uid: int, message: protocol.Predict) -> protocol.Prediction:
        """What the run that is most like this one wanted, or wanted after a key; only what is in the store."""
        row = self._by_key(uid, message) if message.key else self._by_name(uid, message)
        if row is None:
            return nothing()
        run, options, begin = row
        rows = self._reading.execute(
            "SELECT wanted.key, wanted.options, wanted.devices, wanted.platform, wanted.seconds, flags_component,"
            " platform_component, toolchain_component FROM wanted JOIN entries ON entries.key = wanted.key"
            " WHERE run = ? AND position >= ? GROUP BY position ORDER BY position",
            (run, begin),
        )
        items: list[dict[str, protocol.Scalar]] = []
        # Few among many: each stands there once.
        around: dict[str, int] = {}
        for *fields, flags, platform, toolchain in rows:
            # Who loads ahead has to be sure that it was made with the same.
            place = around.setdefault(f"{flags} {platform} {toolchain}", len(around))
            items.append(dict(zip(_FIELDS, fields, strict=True)) | {"around": place})
        options_by_digest = {name: bytes.fromhex(text) for name, text in json.loads(options).items()}
        return protocol.Prediction(items, options_by_digest, {}, [], list(around), 0)

    def remember(self, uid: int, message: protocol.Remember) -> None:
        """A run in place of those of the same program that it is like; the oldest are forgotten."""
        same = "uid = ? AND program = ? AND arguments = ?"
        # At least half of what they wanted is wanted again: one that was soon over replaces none that went on.
        alike = (
            "(SELECT 2 * total(key IN (SELECT value FROM json_each(?))) >= count(*) FROM wanted WHERE run = runs.id)"
        )
        program = uid, message.program, message.arguments
        with self._store.transaction():
            self._forget(f"{same} AND {alike}", *program, json.dumps([item["key"] for item in message.items]))
            options = json.dumps({name: content.hex() for name, content in message.options.items()})
            (run,) = self._db.execute(
                "INSERT INTO runs (uid, program, arguments, options, ended_at) VALUES (?, ?, ?, ?, ?) RETURNING id",
                (*program, options, time.time()),
            ).fetchone()
            self._db.executemany(
                "INSERT INTO wanted (run, position, key, options, devices, platform, seconds)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(run, position, *(item[name] for name in _FIELDS)) for position, item in enumerate(message.items)],
            )
            of_all = "id IN (SELECT id FROM runs WHERE {} ORDER BY id DESC LIMIT -1 OFFSET ?)"
            self._forget(of_all.format(same), *program, _MOST_RUNS_OF_ONE_PROGRAM)
            self._forget(of_all.format("uid = ?"), uid, _MOST_RUNS_OF_ONE_USER)

    def _by_name(self, uid: int, message: protocol.Predict) -> tuple[int, str, int] | None:
        # The same arguments if there was such a run, else the latest with others.
        row: tuple[int, str, int] | None = self._reading.execute(
            "SELECT id, options, 0 FROM runs WHERE uid = ? AND program = ?"
            " ORDER BY arguments = ? DESC, id DESC LIMIT 1",
            (uid, message.program, message.arguments),
        ).fetchone()
        return row

    def _by_key(self, uid: int, message: protocol.Predict) -> tuple[int, str, int] | None:
        # One that has something to tell of what comes next, if possible of the same program, and the latest of those.
        row: tuple[int, str, int] | None = self._reading.execute(
            "SELECT runs.id, runs.options, wanted.position + 1 FROM wanted JOIN runs ON runs.id = wanted.run"
            " WHERE wanted.key = ? AND runs.uid = ?"
            " ORDER BY min(?, (SELECT max(position) FROM wanted AS w WHERE w.run = runs.id) - wanted.position) DESC,"
            " runs.program = ? DESC, runs.id DESC LIMIT 1",
            (message.key, uid, _TELLING, message.program),
        ).fetchone()
        return row

    def _forget(self, which: str, *values: Any) -> None:
        ids = self._db.execute(f"SELECT id FROM runs WHERE {which}", values).fetchall()  # noqa: S608 - our own words
        self._db.executemany("DELETE FROM wanted WHERE run = ?", ids)
        self._db.executemany("DELETE FROM runs WHERE id = ?", ids)


def nothing() -> protocol.Prediction:
    """What is foreseen where nothing is known."""
    return protocol.Prediction([], {}, {}, [], [], 0)


def is_sound(message: protocol.Remember) -> bool:
    """Whether a client's list can be what it says."""
    return (
        len(message.items) <= _MOST_ITEMS
        and sum(map(len, message.options.values())) <= _LARGEST_OPTIONS
        and all(_is_item(item, message.options) for item in message.items)
    )


def _is_item(item: dict[str, Any], options: Sequence[str] | dict[str, bytes]) -> bool:
    types = {name: type(value) for name, value in item.items()}
    return types == _FIELDS and item["options"] in options and all(len(str(value)) < 5000 for value in item.values())
