"""One round trip with a tier, for people: an object is written, read back, compared and removed."""

from __future__ import annotations

import asyncio
import secrets
import time

from xcache.errors import XcacheError
from xcache.wire import protocol
from xcache.wire.names import Names
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.identity import Identity
from xcached.tiers.tier import FAILED, MISSING, UNREACHABLE, TierError

_BYTES = 64

Facts = dict[str, protocol.Scalar]


async def checked(tier: GuardedTier, names: Names, seconds: float) -> Facts:
    """Return how a tier did; the circuit breakers neither count here nor learn of it."""
    remote, began = tier.remote, time.monotonic()
    found: Facts = {
        "name": tier.name,
        "readonly": remote.readonly,
        "writeonly": remote.writeonly,
        "trust": remote.trust,
        "can_list": tier.engine.can_list,
        "rejected": tier.counts["rejected"],
        "last_rejected": _text(tier.last_rejected),
        "kind": "",
        "problem": "",
        "not_removed": "",
    }
    try:
        async with asyncio.timeout(seconds):
            await (_read(tier, names) if remote.readonly else _written(tier, names, found))
    except TierError as error:
        found |= {"kind": error.kind, "problem": str(error)}
    except TimeoutError:
        found |= {"kind": UNREACHABLE, "problem": f"no answer within {seconds:g} s"}
    return found | {"seconds": round(time.monotonic() - began, 6)}


def unusable(name: str, problem: str) -> Facts:
    """Return the same of a tier that could not be opened."""
    options: Facts = {"readonly": False, "writeonly": False, "trust": "", "can_list": False}
    return {
        "name": name,
        **options,
        "rejected": 0,
        "last_rejected": "",
        "kind": "unusable",
        "problem": problem,
        "not_removed": "",
        "seconds": 0.0,
    }


def keys(identity: Identity, now: float) -> Facts:
    """Return what is known of the key that signs and of those that are trusted; it may take a command's ten seconds."""
    trusted = identity.trusted()
    valid = sum(trusted.public(key.public.id, now) is not None for key in trusted.keys)
    found: Facts = {
        "signer": "",
        "signer_id": "",
        "signer_problem": "",
        "why_not_trusted": "",
        "trusted": valid,
        "trusted_file": protocol.path_text(trusted.path),
        "trusted_problem": _text("; ".join(filter(None, (trusted.problem, *trusted.problems)))),
    }
    try:
        signer = identity.signer()
    except XcacheError as error:
        return found | {"signer_problem": _text(str(error))}
    if signer is None:
        return found
    public = signer.public
    return found | {
        "signer": public.name,
        "signer_id": public.id,
        "why_not_trusted": trusted.why_not(public.id, now),
    }


def _text(problem: str) -> str:
    """Return a text that fits into a message, whatever the name of a file in it is."""
    return problem.encode("utf-8", "replace").decode()[: protocol.MAX_NAME]


async def _read(tier: GuardedTier, names: Names) -> None:
    # That there is no such object is an answer.
    await tier.engine.get(names.check(), _BYTES)
    # Programs take it for an empty store; people may have misspelt it.
    if tier.remote.is_bundle and not await asyncio.to_thread(tier.remote.path.exists):
        raise TierError(MISSING, f"{tier.remote.path} does not exist")


async def _written(tier: GuardedTier, names: Names, found: Facts) -> None:
    name, content = names.check(), secrets.token_bytes(_BYTES)
    await tier.engine.put(name, content)
    problem = None
    try:
        if not tier.remote.writeonly and (got := await tier.engine.get(name, _BYTES)) != content:
            raise TierError(FAILED, f"what is read back is {'nothing' if got is None else 'not what was written'}")
    except TierError as error:
        problem = error
    try:
        await tier.engine.remove(name)
    except TierError as error:
        # Nothing that programs need removes objects.
        found["not_removed"] = str(error)
    if problem:
        raise problem
