"""The names of those who wrote entries: accounts of this machine, and keys that signed what came from others."""

from __future__ import annotations

import functools
import pwd
import time

from xcache.config import config
from xcache.wire.ownership import is_signer, signer_uid


@functools.cache
def writer_name(uid: int) -> str:
    """Return the name of an account, or of a key; the number if there is none."""
    if is_signer(uid):
        return trusted_signers().get(uid) or f"key {_keys().get(uid, f'{uid:x}'[1:])}"
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


@functools.cache
def trusted_signers() -> dict[int, str]:
    """Return the names of the keys that are trusted now, and of the tiers that are trusted without keys, by uid."""
    from xcache.wire.trusted_keys import TrustedKeys

    settings, _ = config.load_usable()
    listed, now = TrustedKeys.load(settings.trusted_keys), time.time()
    of_tiers = [each for each in settings.tiers() if each.trust == "tier"]
    return {signer_uid(each.id): f"tier {each.public_url}" for each in of_tiers} | {
        signer_uid(key.public.id): f"key {key.public.name}"
        for key in listed.keys
        if listed.public(key.public.id, now) is not None
    }


@functools.cache
def _keys() -> dict[int, str]:
    from xcache.wire.trusted_keys import TrustedKeys

    settings, _ = config.load_usable()
    return {signer_uid(key.public.id): key.public.name for key in TrustedKeys.load(settings.trusted_keys).keys}
