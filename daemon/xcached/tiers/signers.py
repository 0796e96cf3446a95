"""The keys whose signatures count here, seen as writers of the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date

from xcache.config.remotes import Remote
from xcache.wire.ownership import signer_uid
from xcache.wire.trusted_keys import TrustedKeys, today
from xcached.tiers.identity import Identity

# A prediction asks a hundred times in one turn, and a look at the file takes longer than all the rest.
_LOOK_SECONDS = 0.02


class Signers:
    """The trusted keys of now. It belongs to the serving thread."""

    def __init__(self, identity: Identity, remotes: Sequence[Remote]) -> None:
        self._identity = identity
        self._of_tiers = frozenset(signer_uid(remote.id) for remote in remotes if remote.trust == "tier")
        # The uids of a list of keys on a day, and when that list was looked at.
        self._known: tuple[TrustedKeys, date, frozenset[int]] | None = None
        self._looked_at = 0.0

    def trusts(self, uid: int) -> bool:
        """Return whether what this key has signed may be loaded now."""
        return uid in self.uids()

    def why_nobody(self) -> str:
        """Return why no key is trusted now; empty if one is."""
        return self._identity.trusted().why_nobody(time.time())

    def why_not(self, uid: int) -> str:
        """Return why what this writer has signed may not be loaded now; empty if it may."""
        if uid in self.uids():
            return ""
        keys = self._identity.trusted()
        known = next((key.public.id for key in keys.keys if signer_uid(key.public.id) == uid), "")
        return keys.why_not(known, time.time()) if known else f"no key in {keys.path} has signed it"

    def uids(self) -> frozenset[int]:
        """Return the uids that stand for keys which are trusted now."""
        if self._known is not None and time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return self._known[2]
        now, keys, self._looked_at = time.time(), self._identity.trusted(), time.monotonic()
        if self._known is None or self._known[:2] != (keys, today(now)):
            valid = (key.public.id for key in keys.keys if keys.public(key.public.id, now) is not None)
            self._known = keys, today(now), self._of_tiers.union(map(signer_uid, valid))
        return self._known[2]
