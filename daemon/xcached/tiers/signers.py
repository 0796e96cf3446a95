"""The keys that sign what leaves this machine, and those whose signatures count here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from xcache.config.remotes import Remote
from xcache.wire import trusted_keys
from xcache.wire.ownership import signer_uid
from xcached.tiers import parcel


def tier_id(remote: Remote) -> str:
    """Return what stands for the signing key of an unsigned entry: a digest of the tier that is trusted itself."""
    return hashlib.sha256(f"tier {remote.public_url}".encode()).hexdigest()


class Signers:
    """The trusted keys of now; any thread may ask."""

    def __init__(self, trusted: trusted_keys.TrustedKeys, namespace: str, remotes: Sequence[Remote]) -> None:
        self._trusted = trusted
        self._namespace = namespace
        self._of_tiers = frozenset(signer_uid(tier_id(remote)) for remote in remotes if remote.trust == "tier")

    def trusts(self, uid: int) -> bool:
        """Return whether what this key has signed may be loaded now."""
        return uid in self._of_tiers or uid in self.uids()

    def uids(self) -> frozenset[int]:
        """Return all uids that stand for keys which are trusted now."""
        now = time.time()
        return self._of_tiers | {signer_uid(key.id) for key in self._trusted.fresh().valid(now)}

    def unpack(self, content: bytes, key: str, remote: Remote) -> parcel.Parcel:
        """Return an entry of a tier; raise XcacheError if it is damaged, or nobody trusted has signed it."""
        return parcel.unpack(
            content,
            key,
            namespace=self._namespace,
            trusted=self._trusted,
            trust_unsigned=remote.trust == "tier",
            now=time.time(),
        )
