"""Pinned entries stay whatever the limits say, but no user's beyond a fair share. Belongs to the writer thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from xcache.errors import RefusedError
from xcached.store.entries import EntryKey
from xcached.store.eviction import Excess
from xcached.store.limits import Limits
from xcached.store.store import Store


class PinnedTotal(NamedTuple):
    """The number and the bytes of pinned entries."""

    entries: int = 0
    bytes: int = 0


class Share(NamedTuple):
    """The entries, and the bytes of entries, that one user may pin (0: no limit)."""

    entries: int = 0
    bytes: int = 0


class Pins:
    """Pins and unpins entries, within the limits of the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db = store.database.writing
        self._by_user: dict[int, PinnedTotal] = {}

    def pin(self, entries: Iterable[EntryKey], share: Share) -> int:
        """Pin entries; raise RefusedError if their writer, or all users together, may not pin so much.

        Returns how many entries were not pinned before.
        """
        limits = self._store.limits
        with self._store.transaction():
            changed = self._set(entries, 1)
            for uid in {entry.writer_uid for entry in entries}:
                theirs = self.of(uid)
                for limit in (limits.max_size, limits.user_quota, share.bytes):
                    if limit and theirs.bytes > limit:
                        raise RefusedError("store full", f"at most {limit} bytes may be pinned, not {theirs.bytes}")
                if share.entries and theirs.entries > share.entries:
                    raise RefusedError("store full", f"one user may pin at most {share.entries} entries")
            everybodys = self.of_all()
            if limits.max_size and everybodys.bytes > limits.max_size:
                raise RefusedError("store full", f"{everybodys.bytes} bytes are more than the store may hold")
            if limits.max_entries and everybodys.entries > limits.max_entries:
                raise RefusedError("store full", f"at most {limits.max_entries} entries may be pinned")
        return changed

    def unpin(self, entries: Iterable[EntryKey]) -> int:
        """Unpin entries; return how many were pinned."""
        with self._store.transaction():
            return self._set(entries, 0)

    def lapse(self, uid: int, excess: Excess) -> int:
        """Unpin a user's least worthy entries until they make up an excess; return how many."""
        size, entries = excess
        lapsed: list[EntryKey] = []
        for key, footprint in self._db.execute(
            "SELECT key, footprint FROM entries WHERE writer_uid = ? AND pinned = 1 ORDER BY worth, used_order", (uid,)
        ).fetchall():
            lapsed.append(EntryKey(key, uid))
            size, entries = size - footprint, entries - 1
            if size <= 0 and entries <= 0:
                break
        return self.unpin(lapsed)

    def protected(self, newcomers: Iterable[int], limits: Limits) -> PinnedTotal:
        """Return what no put may count on: the pins of all users, but of each no more than a fair share.

        ``newcomers`` are users who may have nothing yet.
        """
        if not self._store.shared:
            return self.of_all()
        users = {uid for (uid,) in self._db.execute("SELECT uid FROM users")} | {*newcomers}
        share = PinnedTotal(limits.max_entries // len(users), limits.max_size // len(users))
        pins = self._now().values()
        return PinnedTotal(
            sum(min(one.entries, share.entries or one.entries) for one in pins),
            sum(min(one.bytes, share.bytes or one.bytes) for one in pins),
        )

    def by_user(self) -> Mapping[int, PinnedTotal]:
        """Return the pins of each user who has any."""
        return self._now()

    def of(self, uid: int) -> PinnedTotal:
        """Return the pins of one user."""
        return self._now().get(uid, PinnedTotal())

    def of_all(self) -> PinnedTotal:
        """Return the pins of all users together."""
        pins = self._now().values()
        return PinnedTotal(sum(one.entries for one in pins), sum(one.bytes for one in pins))

    def _set(self, entries: Iterable[EntryKey], pinned: int) -> int:
        changed = self._db.executemany(
            "UPDATE entries SET pinned = ? WHERE key = ? AND writer_uid = ? AND pinned != ?",
            [(pinned, *entry, pinned) for entry in entries],
        )
        self._store.pins_changed = True
        return changed.rowcount

    def _now(self) -> dict[int, PinnedTotal]:
        if self._store.pins_changed:
            rows = self._db.execute(
                "SELECT writer_uid, count(*), sum(footprint) FROM entries WHERE pinned = 1 GROUP BY writer_uid"
            )
            self._by_user = {user: PinnedTotal(*pins) for user, *pins in rows}
            self._store.pins_changed = self._db.in_transaction
        return self._by_user
