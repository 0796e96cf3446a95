"""One daemon with a remote store for all users of a machine: what no user may have an administrator remove."""

from __future__ import annotations

import json
import os

import pytest
from support import parcels
from support.places import digest, until
from support.users import ALICE, DAEMON, KEY, command

from xcache.wire.names import Names

TOOLCHAIN = digest(b"a toolchain that only other machines have")
# Everybody can read in the remote store which toolchains there are.
GONE = f"""
from support.environments import Environment
fake = Environment(Path.cwd() / "fake", "1.0")
said.append(text(talk.ask(fake.announcement()._replace(toolchain={TOOLCHAIN!r}))))
parts = {{name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}}
said.append(text(talk.put(KEY, b"x", components=parts | {{"toolchain": {TOOLCHAIN!r}}})))
fake.library.unlink()
"""
STALE = "SELECT 1 FROM toolchains WHERE stale_since IS NOT NULL"


@pytest.mark.parametrize("writers", ["", "alice"])
def test_only_who_is_trusted_says_that_a_toolchain_is_stale(machine, writers):
    tier = machine.place.root / "tier"
    put = parcels.put(key=KEY)
    put = put._replace(components=put.components | {"toolchain": TOOLCHAIN})
    object_of_others = tier / Names("").entry(KEY)
    object_of_others.parent.mkdir(parents=True)
    object_of_others.write_bytes(parcels.packed(put, namespace="", signer=None))
    for folder in (tier, *tier.rglob("*")):
        os.chown(folder, DAEMON, DAEMON)
    settings = {"XCACHE_REMOTE": f"file://{tier}?trust=tier", "XCACHE_TRUSTED_WRITERS": writers and str(ALICE)}
    machine.start(**settings)
    assert machine.talk(ALICE, GONE) == ["Done", "Stored"]
    assert until(lambda: machine.place.query(STALE))
    status, said, complaints = command(machine, 0, "remote", "gc", "--stale", "--json", **settings)
    assert (status, complaints) == (0, "")
    assert json.loads(said)["remotes"][0]["removed"] == bool(writers)
    assert object_of_others.exists() != bool(writers)
