"""Who may connect, whose entries a reader gets, and who may change what. Uids are those the kernel reports."""

from __future__ import annotations

import grp
import os
import pwd
import time
from pathlib import Path

from xcache.config import Config
from xcache.errors import ConfigError
from xcache.private import uid_of_account

ROOT = 0
# How long what the account database said about groups is believed.
_BELIEVED_SECONDS = 60.0


class Trust:
    """The rules of one daemon: for its own user, or for all users of the machine."""

    def __init__(self, settings: Config) -> None:
        self._own = os.getuid()
        self.shared = bool(settings.daemon_user) and uid_of_account(settings.daemon_user) == self._own
        self._known: dict[int, tuple[float, frozenset[int]]] = {}
        self._nobody = _overflow_uid()
        self.take(settings)

    def take(self, settings: Config) -> None:
        """Go by these settings from now on; ConfigError, and nothing changed, where they name nobody."""
        everybodys, groups = {ROOT}, set()
        for name in settings.trusted_writers if self.shared else ():
            if name.startswith("@"):
                groups.add(_gid_of_group(name[1:]))
            else:
                everybodys.add(uid_of_account(name))
        self._everybodys, self._groups = everybodys, groups

    def admits(self, uid: int) -> bool:
        """Whether this user may connect. Who has no number here is nobody in particular, and cannot be told apart."""
        return uid in (self._own, ROOT) or (self.shared and uid != self._nobody)

    def administers(self, uid: int) -> bool:
        """Whether this user may stop the daemon, and change what is not their own."""
        return uid in (self._own, ROOT)

    def reads(self, reader: int, writer: int) -> bool:
        """Whether a reader loads what a writer wrote. An executable is code: this is a matter of trust."""
        if not self.shared or reader == writer or writer in self._everybodys:
            return True
        return bool(self._groups) and not self._groups.isdisjoint(self._groups_of(reader) & self._groups_of(writer))

    def _groups_of(self, uid: int) -> frozenset[int]:
        until, groups = self._known.get(uid, (0.0, frozenset()))
        if time.monotonic() >= until:
            try:
                account = pwd.getpwuid(uid)
                groups = frozenset(os.getgrouplist(account.pw_name, account.pw_gid))
            except (KeyError, OSError):
                groups = frozenset()
            self._known[uid] = time.monotonic() + _BELIEVED_SECONDS, groups
        return groups


def _gid_of_group(name: str) -> int:
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"trusted_writers: there is no group {name!r}") from None


def _overflow_uid() -> int:
    """What the kernel reports for users of another user namespace who are nobody here."""
    try:
        return int(Path("/proc/sys/fs/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534
