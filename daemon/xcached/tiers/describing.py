"""Read the header of an entry in a tier, and not the rest: it says what the entry is, and who signed it."""

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
        found = await label_of(tier, names, namespace, key, trusted)
    except DamagedError as error:
        return _without(key, commands.DAMAGED, str(error))
    except TierError as error:
        if error.kind in (UNREACHABLE, MISSING):
            raise
        return _without(key, commands.UNREADABLE, str(error))
    return _without(key, commands.GONE, "it has gone") if found is None else _told(found, key)


async def label_of(
    tier: GuardedTier, names: Names, namespace: str, key: str, trusted: TrustedKeys
) -> parcel.Label | None:
    """Return what the header of an entry says; None if there is none. Raise DamagedError or TierError."""
    content = await tier.engine.begin(names.entry(key), parcel.FEW_BYTES)
    if content is not None and (needed := parcel.label_bytes(content)) > parcel.FEW_BYTES:
        content = await tier.engine.begin(names.entry(key), needed)
    if content is None:
        return None
    trust_unsigned = tier.remote.trust == "tier"
    return await asyncio.to_thread(
        parcel.label, content, key, namespace, trusted, time.time(), trust_unsigned=trust_unsigned
    )


def _told(found: parcel.Label, key: str) -> Facts:
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
