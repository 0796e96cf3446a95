"""Decides which users may connect, whose entries a user gets, and who may change what. The kernel reports uids."""

from __future__ import annotations

import grp
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from xcache.config.config import Config
from xcache.errors import ConfigError
from xcache.wire import protocol
from xcache.wire.bounded import text_of
from xcache.wire.ownership import is_signer, overflow_uids, own_uid, uid_of_account

if TYPE_CHECKING:
    from xcached.tiers.signers import Signers

ROOT = 0
# The answer to users who do not administer the daemon.
NOT_PERMITTED = protocol.Refused("not permitted", "only root and the daemon's own account may do this")
# Seconds for which a user's groups are cached.
_GROUPS_CACHE_SECONDS = 60.0
# Uids that a user may take on in a user namespace (subuid(5)): one user could appear as tens of thousands.
_SUBORDINATE = Path("/etc/subuid")
_MOST_SUBORDINATE = 64 * 1024**2


class Trust:
    """The rules of a daemon, for its own user or for all users of the machine."""

    def __init__(self, settings: Config) -> None:
        self._own = own_uid()
        self.shared = settings.daemon_uid() == self._own
        self._groups_by_uid: dict[int, tuple[float, frozenset[int]]] = {}
        self._subordinate = _SubordinateUids()
        self.signers: Signers | None = None
        """The keys whose entries are in the store; None if it has none."""
        self.adopt(settings)

    def adopt(self, settings: Config) -> None:
        """Adopt new settings; raise ConfigError, and change nothing, if they name an unknown user or group."""
        trusted_by_all, groups = {ROOT}, set()
        with settings.blamed("trusted_writers"):
            for name in settings.trusted_writers if self.shared else ():
                if name.startswith("@"):
                    groups.add(_gid_of_group(name[1:]))
                else:
                    trusted_by_all.add(uid_of_account(name))
        self._trusted_by_all, self._groups = trusted_by_all, groups

    def admits(self, uid: int) -> bool:
        """Return whether a user may connect.

        Users without a uid of their own here (the overflow uid) cannot be told apart, and are refused. So are
        subordinate uids: otherwise one user could claim the share of thousands.
        """
        if uid in (self._own, ROOT):
            return True
        return self.shared and uid not in overflow_uids() and uid not in self._subordinate

    def administers(self, uid: int) -> bool:
        """Return whether a user may stop the daemon and change other users' data."""
        return uid in (self._own, ROOT)

    def visible_to(self, uid: int) -> int | None:
        """Return the user whose data this user sees and changes (None: everybody's)."""
        return None if self.administers(uid) else uid

    def may_change(self, uid: int, writer: int) -> bool:
        """Return whether a user sees and changes what a writer stored."""
        return uid == writer or self.administers(uid)

    def reads(self, reader: int, writer: int) -> bool:
        """Return whether a reader loads a writer's entries. An executable is code, so this is a matter of trust."""
        if is_signer(writer):
            return self.signers is not None and self.signers.trusts(writer)
        if not self.shared or reader == writer or writer in self._trusted_by_all:
            return True
        return bool(self._groups) and not self._groups.isdisjoint(self._groups_of(reader) & self._groups_of(writer))

    def writers(self, reader: int, present: Callable[[], Iterable[int]]) -> Collection[int] | None:
        """Return the writers whose entries a reader loads, or None for all.

        ``present`` returns the writers in question; only a rule for groups needs it.
        """
        if not self.shared and self.signers is None:
            return None
        if not self.shared or self._groups:
            return [writer for writer in present() if self.reads(reader, writer)]
        return {reader, *self._trusted_by_all, *self.signer_uids()}

    def signer_uids(self) -> Collection[int]:
        """Return those who are keys that signed what came from other machines, and are trusted now."""
        return self.signers.uids() if self.signers else ()

    def may_share(self, writer: int) -> bool:
        """Return whether a writer's entries are signed here and leave the machine: everybody there would load them."""
        if is_signer(writer):
            return False
        return not self.shared or writer in self._trusted_by_all

    def _groups_of(self, uid: int) -> frozenset[int]:
        until, groups = self._groups_by_uid.get(uid, (0.0, frozenset()))
        if time.monotonic() >= until:
            try:
                account = pwd.getpwuid(uid)
                groups = frozenset(os.getgrouplist(account.pw_name, account.pw_gid))
            except (KeyError, OSError):
                groups = frozenset()
            self._groups_by_uid[uid] = time.monotonic() + _GROUPS_CACHE_SECONDS, groups
        return groups


class _SubordinateUids:
    """The uids that users other than root may take on, as the table has them now: accounts come while a daemon runs."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._ranges: list[range] = []

    def __contains__(self, uid: int) -> bool:
        try:
            found = _SUBORDINATE.stat()
            seen = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if seen != self._seen:
                self._ranges, self._seen = _ranges_in(text_of(_SUBORDINATE, _MOST_SUBORDINATE, "replace")), seen
        except OSError:
            self._seen, self._ranges = (), []
        return any(uid in uids for uids in self._ranges)


def _ranges_in(table: str) -> list[range]:
    fields = [line.split(":") for line in table.splitlines()]
    return [
        range(int(first), int(first) + int(count))
        for owner, first, count in (found for found in fields if len(found) == 3)
        if owner not in ("root", "0") and first.isdecimal() and count.isdecimal()
    ]


def _gid_of_group(name: str) -> int:
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name!r}") from None
