"""Bundles are checked byte by byte, whoever signed them, and what is said of damage comes first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.parcels import KEY, NAMESPACE, packed, parts
from support.places import digest
from support.signing import OURS, in_memory

from xcache.cli import Failure
from xcache.cli.bundle_file import executable_in, objects, opened
from xcache.wire import protocol, runs
from xcache.wire.bundles import BundleWriter
from xcache.wire.names import Names

NAMES, PROGRAM = Names(NAMESPACE), ("train.py", digest(b"arguments"))
ITEMS = [{"key": KEY, "options": "o", "devices": "0", "platform": "cpu", "seconds": 0.1}]
KEYS = {"unsigned": None, "signed": OURS}


def written(path: Path, signer) -> bytes:
    """Write a bundle of an entry and of what a program wanted; return its bytes."""
    entry = packed(signer=signer)
    run = runs.Run(protocol.Remember(*PROGRAM, ITEMS, {"o": b"options"}), [], {}, digest(b"toolchain"))
    history = runs.joined([runs.pack(run, namespace=NAMESPACE, signer=signer)])
    with path.open("wb") as file:
        writer = BundleWriter(file)
        writer.add(NAMES.entry(KEY), entry, executable_in(entry, KEY, NAMESPACE))
        writer.add(NAMES.run(*PROGRAM), history)
        writer.finish()
    return path.read_bytes()


def problems(path: Path, *, trust_unsigned: bool) -> list[str]:
    """Return what a check finds wrong, which a file that cannot be opened tells by itself."""
    try:
        with opened(path) as bundle:
            found = objects(bundle, in_memory(OURS.public), trust_unsigned=trust_unsigned)
            return [each.problem for each in found if each.problem]
    except Failure as failure:
        return [failure.message]


@pytest.mark.parametrize("signer", KEYS.values(), ids=KEYS)
def test_every_byte_is_checked_whoever_signed_it(tmp_path, signer):
    path = tmp_path / "b"
    whole = written(path, signer)
    assert problems(path, trust_unsigned=signer is None) == []
    unnoticed = []
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if not problems(path, trust_unsigned=signer is None):
            unnoticed.append(at)
    assert not unnoticed


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A bundle with a damaged executable."""
    path = tmp_path / "b"
    whole = bytearray(written(path, None))
    whole[whole.index(parts(packed(signer=None))[3])] ^= 1
    path.write_bytes(whole)
    return path


def test_damage_in_an_unsigned_bundle_is_said_first_and_ends_the_advice(shell, damaged):
    said = shell.say("bundle", "verify", str(damaged), code=1)
    lines = said.splitlines()
    assert lines[0].startswith("xcache: 1 object damaged: the digest of its executable differs")
    assert lines[1].startswith("xcache: 1 object: nobody has signed it")
    assert lines[2] == "xcache: export or copy the file again: `xcache import` takes nothing from a damaged one"
    assert "--unsigned" not in said
    told = shell.json_with_status("bundle", "verify", str(damaged), code=1)
    assert sorted(each["is_damaged"] for each in told["problems"]) == [False, True]


def test_an_unsigned_bundle_that_is_whole_is_said_to_be_so(shell, tmp_path):
    written(tmp_path / "b", None)
    said = shell.say("bundle", "verify", str(tmp_path / "b"), code=1)
    assert said.startswith("2 objects: every byte is as it was written\n")
    assert "2 objects: nobody has signed it" in said
    assert "`xcache import --unsigned` takes it" in said


def test_a_damaged_bundle_is_said_to_be_so_by_inspect(shell, damaged):
    ran = shell.run("bundle", "inspect", str(damaged))
    assert "damaged    1 object" in ran.stdout
    assert "the digest of its executable differs" in ran.stderr
    assert json.loads(shell.run("bundle", "inspect", "--json", str(damaged)).stdout)["damaged"] == 1
