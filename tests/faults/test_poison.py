"""An entry whose load ends the program does so twice and never again."""

from __future__ import annotations

import json
import signal

from conversation import talking
from places import digest

from xcache import payload, protocol

# XLA itself dies of some damaged entries; here it takes a certain word, so that it always does.
PROGRAM = """
import faulthandler, json, os, dataclasses
import jax, jax.numpy as jnp, xcache
from xcache import executables
load = executables.deserialize
def deserialize(client, raw, *arguments):
    if raw == b"poison":
        os.abort()
    return load(client, raw, *arguments)
executables.deserialize = deserialize
import xcache.hook.wrapper
xcache.hook.wrapper.deserialize = deserialize
result = float(jax.jit(lambda v: v * 3 + 1)(2.0))
print(json.dumps([result, dataclasses.asdict(xcache.stats())]))
"""


def poison(place) -> str:
    """Put something whole into the place of the program's one entry that ends whoever loads it."""
    ((key, module),) = place.query("SELECT key, module_name FROM entries WHERE module_name LIKE '%lambda%'")
    sealed = payload.seal(key, b"poison")
    with talking(place) as talk:
        assert talk.put(key, sealed, module_name=module, overwrite=True) == protocol.Stored(True)
    return digest(sealed)


def test_the_third_program_compiles_and_the_fourth_finds_what_it_stored(place):
    first = place.run(PROGRAM, XCACHE="1")
    assert first.returncode == 0, first.stderr
    blob = poison(place)
    for _ in range(2):
        died = place.run(PROGRAM, XCACHE="1")
        assert (died.returncode, died.stdout) == (-signal.SIGABRT, "")
    healed = place.run(PROGRAM, XCACHE="1")
    assert (healed.returncode, healed.stderr) == (0, "")
    result, stats = json.loads(healed.stdout)
    assert (result, stats["misses"], stats["errors"]) == (7.0, 1, {})
    again = json.loads(place.run(PROGRAM, XCACHE="1").stdout)
    assert (again[0], again[1]["misses"]) == (7.0, 0)
    ((found, reason),) = place.query("SELECT blob, reason FROM quarantined")
    assert found == blob
    assert "2 processes ended while they loaded it, the last was '-c (process " in reason
    listed = place.run("import sys; from xcache.cli import main; sys.argv[1:] = ['ls', '--quarantined']; main()")
    assert "2 processes ended while they loaded it" in listed.stdout
    status = place.run("import sys; from xcache.cli import main; sys.argv[1:] = ['status']; main()")
    assert "set aside    1 entry (xcache ls --quarantined)" in status.stdout
