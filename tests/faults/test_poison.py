"""An entry whose load ends the program does so twice and never again."""

from __future__ import annotations

import json
import platform
import signal

import pytest
from support.conversation import talking
from support.places import digest
from support.program_files import program_text

from xcache.wire import envelope, protocol

PROGRAM = program_text("abort_at_poison")


# Before Linux 6.15 a death while it was loaded ahead may remain unexplained, and then only makes the entry suspected.
LINUX = tuple(int(number) for number in platform.release().split(".")[:2])
MOST_DEATHS = 2 if LINUX >= (6, 15) else 3


def poison(place) -> str:
    """Replace the program's one entry by a whole one that kills every process that loads it; return its digest."""
    ((key, module),) = place.query("SELECT key, module_name FROM entries WHERE module_name LIKE '%lambda%'")
    sealed = envelope.seal(key, b"poison")
    with talking(place) as talk:
        assert talk.put(key, sealed, module_name=module, overwrite=True) == protocol.Stored(True)
    return digest(sealed)


@pytest.mark.thorough
def test_the_third_program_compiles_and_the_fourth_finds_what_it_stored(place):
    first = place.run(PROGRAM, XCACHE="1")
    assert first.returncode == 0, first.stderr
    blob = poison(place)
    deaths = 0
    while (healed := place.run(PROGRAM, XCACHE="1")).returncode:
        assert (healed.returncode, healed.stdout) == (-signal.SIGABRT, "")
        deaths += 1
        assert deaths <= MOST_DEATHS
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
