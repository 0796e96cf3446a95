"""Groups of rows, such as a history with its keys: each user has a share of the room for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xcached.store.store import Store


class RowGroups:
    """A table with a row for each group, with ``id``, ``uid`` and ``size``, and another with the group's rows.

    Belongs to the writer thread. A higher id is a newer group.
    """

    def __init__(self, store: Store, table: str, members: str, group: str, most_bytes: Callable[[], int]) -> None:
        """``group`` is the column of the table ``members`` that names the group.

        ``most_bytes`` returns the limit of the groups of all users together; a small store allows less.
        """
        self._store = store
        self._db = store.database.writing
        self._table = table
        self._members = members
        self._group = group
        self._most_bytes = most_bytes

    def clear(self, uid: int | None) -> None:
        """Forget the groups of one user (None: of all)."""
        self._store.free(lambda: self.forget("uid = coalesce(?, uid)", uid))

    def trim(self) -> None:
        """Forget the oldest groups until the rest fits."""
        self._store.free(self.forget_what_is_too_large)

    def forget_older(self, most: int, where: str, *values: Any) -> None:
        """Within a transaction: of the groups with a property, keep the newest ``most``."""
        older = f"SELECT id FROM {self._table} WHERE {where} ORDER BY id DESC LIMIT -1 OFFSET ?"
        self.forget(f"id IN ({older})", *values, most)

    def forget_what_is_too_large(self) -> None:
        """Within a transaction: forget the oldest groups of the user with the most bytes, until the rest fits."""
        most = self._store.most_other_data(self._most_bytes())
        by_user = f"SELECT uid, sum(size) FROM {self._table} GROUP BY uid ORDER BY 2 DESC"
        before = f"SELECT id, sum(size) OVER (ORDER BY id) - size AS before FROM {self._table} WHERE uid = ?"
        while True:
            sizes = self._db.execute(by_user).fetchall()
            excess = sum(size for _, size in sizes) - most
            if excess <= 0:
                return
            uid, largest = sizes[0]
            # Go down to the bytes of the next user, who then has the most.
            following = sizes[1][1] if len(sizes) > 1 else 0
            enough = min(excess, max(1, largest - following))
            self.forget(f"id IN (SELECT id FROM ({before}) WHERE before < ?)", uid, enough)

    def forget(self, where: str, *values: Any) -> None:
        """Within a transaction: forget the groups with a property."""
        ids = self._db.execute(f"SELECT id FROM {self._table} WHERE {where}", values).fetchall()
        self._db.executemany(f"DELETE FROM {self._members} WHERE {self._group} = ?", ids)
        self._db.executemany(f"DELETE FROM {self._table} WHERE id = ?", ids)
