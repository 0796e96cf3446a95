"""The names of those who wrote entries: accounts of this machine, and keys that signed what came from others."""

from __future__ import annotations

import functools
import pwd

from xcache.config import config
from xcache.wire.ownership import is_signer, signer_uid


@functools.cache
def writer_name(uid: int) -> str:
    """Return the name of an account, or of a key; the number if there is none."""
    if is_signer(uid):
        return f"key {_keys().get(uid, f'{uid:x}'[1:])}"
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


@functools.cache
def _keys() -> dict[int, str]:
    from xcache.wire.trusted_keys import TrustedKeys

    settings, _ = config.load_usable()
    return {signer_uid(key.public.id): key.public.name for key in TrustedKeys.load(settings.trusted_keys).keys}
