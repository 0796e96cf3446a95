"""Hosts that share by a tier, each a place with a daemon that signs with one key and trusts it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from support.command_line import Shell
from support.engines import Where
from support.places import PATIENCE, Place, new_place, until
from support.signing import OURS


@contextlib.contextmanager
def host(tier: Where, **settings: str) -> Iterator[Place]:
    """Give a place whose daemon runs and shares by this tier."""
    with new_place() as place:
        keys = place.root / "config" / "xcache"
        keys.mkdir(parents=True, mode=0o700)
        (keys / "signing-key").write_text(OURS.line())
        (keys / "signing-key").chmod(0o600)
        (keys / "trusted-keys").write_text(f"{OURS.public}\n")
        (keys / "trusted-keys").chmod(0o644)
        # On a busy machine everything takes long.
        place.env |= {"XCACHE_REMOTE": tier.url, "XCACHE_REMOTE_TIMEOUT": f"{PATIENCE}s"} | tier.environment | settings
        place.start_daemon()
        yield place


def remote_of(place: Place) -> dict[str, Any]:
    """Return what `xcache status` says of a host's tier."""
    (found,) = json.loads(Shell(place).run("status", "--json").stdout)["remotes"]
    assert not found["problem"], found
    return dict(found)


def has_uploaded(place: Place) -> bool:
    """Wait until nothing is to be uploaded; return whether it came to that."""
    return until(lambda: not place.query("SELECT 1 FROM uploads"), 3 * PATIENCE)
