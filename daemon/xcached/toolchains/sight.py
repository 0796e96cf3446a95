"""Whether a user could see a file: the daemon may see more than the user who names it, and must not tell."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

_MOST_LINKS = 40
_READ, _SEARCH = 0o4, 0o1


class Sight:
    """Tells what one user may look at, by owners and modes alone: an access list may allow more."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._groups: frozenset[int] | None = None
        self._open_folders: dict[Path, bool] = {}

    def sees(self, path: str) -> bool:
        """Return whether the user may search every folder on the way to a path, or to where the way ends."""
        return all(map(self._may_search, _folders(path)))

    def reads(self, status: os.stat_result) -> bool:
        """Return whether the user may read a file."""
        return self._may(status, _READ)

    def _may_search(self, folder: Path) -> bool:
        found = self._open_folders.get(folder)
        if found is None:
            try:
                found = self._may(folder.stat(), _SEARCH)
            except OSError:
                found = False
            self._open_folders[folder] = found
        return found

    def _may(self, status: os.stat_result, what: int) -> bool:
        if status.st_uid == self._uid:
            return bool(status.st_mode >> 6 & what)
        if status.st_gid in self._groups_of_user():
            return bool(status.st_mode >> 3 & what)
        return bool(status.st_mode & what)

    def _groups_of_user(self) -> frozenset[int]:
        if self._groups is None:
            try:
                account = pwd.getpwuid(self._uid)
                self._groups = frozenset(os.getgrouplist(account.pw_name, account.pw_gid))
            except (KeyError, OSError):
                self._groups = frozenset()
        return self._groups


def _folders(path: str) -> Iterator[Path]:
    """Yield the folders that the kernel searches on the way to a path, links followed."""
    at, left, links = Path("/"), path.split("/")[::-1], 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        yield at
        if name == "..":
            at = at.parent
            continue
        following = at / name
        try:
            target = str(following.readlink())
        except FileNotFoundError:
            return
        except OSError:
            # No link.
            at = following
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        at = Path("/") if target.startswith("/") else at
        left += target.split("/")[::-1]
