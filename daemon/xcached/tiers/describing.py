"""What an entry in a tier says that it is, for people: the beginning of its object is read, and not the rest."""

from __future__ import annotations

import asyncio
import time

from xcache.errors import DamagedError
from xcache.wire import commands, parcel, protocol
from xcache.wire.names import Names
from xcache.wire.trusted_keys import TrustedKeys
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.tier import MISSING, UNREACHABLE, TierError

# Characters of a text: anybody may have written it, and an answer has many.
_MOST_TEXT = 200

Facts = dict[str, protocol.Scalar]


async def described(tier: GuardedTier, names: Names, namespace: str, key: str, trusted: TrustedKeys) -> Facts:
    """Return the facts of an entry; raise TierError if the tier itself is in trouble."""
    try:
        content = await _beginning(tier, names.entry(key))
        if content is None:
            return _without(key, commands.GONE, "it has gone")
        return await asyncio.to_thread(_told, content, key, namespace, trusted, trust_unsigned=_trusts_all(tier))
    except DamagedError as error:
        return _without(key, commands.DAMAGED, str(error))
    except TierError as error:
        if error.kind in (UNREACHABLE, MISSING):
            raise
        return _without(key, commands.UNREADABLE, str(error))


def _trusts_all(tier: GuardedTier) -> bool:
    return tier.remote.trust == "tier"


async def _beginning(tier: GuardedTier, name: str) -> bytes | None:
    content = await tier.engine.begin(name, parcel.FEW_BYTES)
    if content is not None and (needed := parcel.label_bytes(content)) > parcel.FEW_BYTES:
        return await tier.engine.begin(name, needed)
    return content


def _told(content: bytes, key: str, namespace: str, trusted: TrustedKeys, *, trust_unsigned: bool) -> Facts:
    found = parcel.label(content, key, namespace, trusted, time.time(), trust_unsigned=trust_unsigned)
    return {
        "key": key,
        "state": commands.NOT_TRUSTED if found.why_not else commands.OK,
        "problem": found.why_not[:_MOST_TEXT],
        "module_name": found.put.module_name[:_MOST_TEXT],
        "platform": found.put.platform[:_MOST_TEXT],
        "jaxlib_version": found.put.jaxlib_version[:_MOST_TEXT],
        "toolchain": found.put.components["toolchain"],
        "compile_seconds": found.put.compile_seconds,
        "size": found.size,
        "signer": found.key_id,
    }


def _without(key: str, state: str, problem: str) -> Facts:
    return {"key": key, "state": state, "problem": problem[:_MOST_TEXT]}
