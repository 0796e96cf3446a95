"""The commands read headers of entries in remote stores, and ``xcache remote gc`` removes some after an upgrade."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support import parcels
from support.command_line import Shell
from support.conversation import key_of, talking
from support.engines import SECRET, Engine
from support.marks import thorough
from support.places import digest, until
from support.sharing import host, remote_of, trust
from support.signing import OURS, SECOND, STRANGER

from xcache.wire import commands, protocol
from xcache.wire.names import Names

DAY = 86400.0
OLD, NEW = digest(b"the old toolchain"), digest(b"the new one")


@contextlib.contextmanager
def shell(folder: Path, option: str = "", **settings: str) -> Iterator[Shell]:
    """Give a shell in a place whose daemon has this folder as its remote store."""
    with host(f"file://{folder}{option}", **settings) as place:
        yield Shell(place)


def write(folder: Path, name: str, content: bytes, age: float = 0.0) -> Path:
    """Put an object there under the key of a name."""
    path = folder / Names("").entry(key_of(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def made_by(name: str, jaxlib: str = "0.10.2", toolchain: str = OLD, signer: object = OURS, **changes: object) -> bytes:
    """Return an entry as a machine with this toolchain would upload it."""
    put = parcels.put(key=key_of(name), module_name=f"jit_{name}", jaxlib_version=jaxlib, **changes)
    put = put._replace(components=put.components | {"toolchain": toolchain})
    return parcels.packed(put, namespace="", signer=signer)


def details_of(here: Shell) -> dict[str, dict[str, object]]:
    """Return what each entry says, by key."""
    return {each["id"]: each["details"] for each in here.json("remote", "ls", "--details")["objects"]}


def fill_with_doubtful_ones(folder: Path) -> dict[str, Path]:
    """Write entries of the old toolchain of which nothing is certain."""
    whole = made_by("f")
    contents = {
        "stranger": made_by("stranger", signer=STRANGER),
        "unsigned": made_by("unsigned", signer=None),
        "garbage": b"an object",
        "empty": b"",
        "cut": made_by("cut")[:-5],
        "cut-in-the-header": made_by("cut-in-the-header")[:100],
        "of-another-key": whole,
        "altered": made_by("altered")[:40] + b"X" + made_by("altered")[41:],
    }
    return {name: write(folder, name, content) for name, content in contents.items()}


def test_each_entry_says_what_made_it_and_who_signed_it(folder):
    write(folder, "f", made_by("f", device_kind="TPU v5e", platform="tpu", compile_seconds=65.0))
    with shell(folder) as here:
        (row,) = here.json("remote", "ls", "--details")["objects"]
        assert row["module_name"] is None
        assert row["details"] == {
            "state": "ok",
            "problem": "",
            "module_name": "jit_f",
            "platform": "tpu",
            "jaxlib_version": "0.10.2",
            "toolchain": OLD,
            "compile_seconds": 65.0,
            "size": row["bytes"],
            "signer": OURS.public.id,
        }
        titles, line = here.say("remote", "ls", "--details").splitlines()
        assert re.split("  +", titles.strip()) == [
            *("object", "kind", "name", "platform", "jaxlib", "toolchain", "compile", "signed by", "size", "age")
        ]
        told = [key_of("f")[:12], "entry", "jit_f", "tpu", "0.10.2", OLD[:12], "1m", "05s", OURS.public.id]
        assert line.split()[: len(told)] == told
        # It costs a request for each, so only who asks gets it.
        assert here.json("remote", "ls")["objects"][0]["details"] is None


def test_entries_are_counted_by_what_made_them(folder):
    for name in ("f", "g"):
        write(folder, name, made_by(name))
    newer = write(folder, "h", made_by("h", jaxlib="0.12.0", toolchain=NEW))
    write(folder, "stranger", made_by("stranger", signer=STRANGER))
    with shell(folder) as here:
        (told,) = here.json("remote", "stats", "--details")["remotes"]
        counted = {row["jaxlib_version"]: row["objects"] for row in told["toolchains"]}
        assert counted == {"0.10.2": 2, "0.12.0": 1}
        assert told["unknown"] == 1
        assert told["toolchains"][1]["bytes"] == newer.stat().st_size
        said = here.say("remote", "stats", "--details")
        assert f"  {OLD[:12]}  cpu, jaxlib 0.10.2: 2 entries, " in said
        assert "  1 entry: damaged, or signed by no trusted key" in said
        assert here.json("remote", "stats")["remotes"][0]["toolchains"] is None


def test_an_entry_of_which_nothing_is_certain_is_told_as_such(folder):
    fill_with_doubtful_ones(folder)
    (folder / "v1/all/entries/no-key").write_text("x")
    (folder / "v1/all/runs/ab").mkdir(parents=True)
    (folder / "v1/all/runs/ab" / key_of("run")).write_text("x")
    with shell(folder) as here:
        found = details_of(here)
        assert found.pop("no-key") is found.pop(key_of("run")) is None
        expected = {
            "stranger": ("not trusted", f"the key {STRANGER.public.id} is not in"),
            "unsigned": ("not trusted", "nobody has signed it"),
            "garbage": ("damaged", "it is cut off"),
            "empty": ("damaged", "it is cut off"),
            "cut": ("damaged", "and its header says"),
            "cut-in-the-header": ("damaged", "it is cut off"),
            "of-another-key": ("damaged", "it belongs to another key"),
        }
        for name, (state, problem) in expected.items():
            told = found[key_of(name)]
            assert told["state"] == state and problem in str(told["problem"]), name
        # The signature is the same, and what it is of is not, or cannot be read any more.
        assert found[key_of("altered")]["state"] != "ok"
        said = here.say("remote", "ls", "--details")
        assert f"{STRANGER.public.id} (not trusted)" in said and " nobody " in said and " damaged " in said
        assert "xcache: 1 entry: nobody has signed it" in said


def test_what_cannot_be_read_is_told_and_does_not_hide_the_rest(folder, redis_engine):
    with host(redis_engine.at("details-odd").url) as place:
        here = Shell(place)
        key, odd, none = here.put("jit_f"), key_of("odd"), key_of("none")
        assert until(lambda: not remote_of(place)["waiting"])
        with contextlib.closing(redis.Redis(port=redis_engine.port, password=SECRET)) as client, talking(place) as talk:
            client.rpush(f"details-odd:{Names('').entry(odd)}", "a list")
            asked = commands.DescribeEntries(str(remote_of(place)["name"]), [odd, none, key], 5.0)
            assert [each["state"] for each in talk.ask(asked).entries] == ["unreadable", "gone", "ok"]
    path = write(folder, "f", made_by("f"))
    path.unlink()
    path.mkdir()
    write(folder, "g", made_by("g"))
    with host(f"file://{folder}") as place, talking(place) as talk:
        asked = commands.DescribeEntries(f"file://{folder}", [key_of("f"), key_of("g")], 5.0)
        assert [each["state"] for each in talk.ask(asked).entries] == ["gone", "ok"]
        # A key is no way out of the namespace.
        for wrong in ("../../x", "", "ab", key_of("f").upper()):
            answer = talk.ask(asked._replace(keys=[wrong]))
            assert isinstance(answer, protocol.Refused), wrong
        (folder / "v1").rename(folder / "v2")
        assert {each["state"] for each in talk.ask(asked).entries} == {"gone"}
        folder.rename(folder.with_name("gone"))
        answer = talk.ask(asked)
        assert isinstance(answer, protocol.Refused) and answer.kind == "missing"


def test_a_long_header_is_read_whole(folder):
    # Hardly anything can be compressed.
    noise = random.Random(0)
    details = {part: noise.randbytes(protocol.MAX_TEXT // 2).hex() for part in protocol.DESCRIBED_COMPONENTS}
    content = made_by("f", details=details)
    assert parcels.parcel.label_bytes(content) > parcels.parcel.FEW_BYTES
    write(folder, "f", content)
    with shell(folder) as here:
        assert details_of(here)[key_of("f")]["state"] == "ok"


def test_texts_of_a_stranger_are_bounded_and_cannot_steer_a_terminal(folder):
    write(folder, "f", made_by("f", signer=STRANGER, platform="\x1b[2J" + "p" * 10_000))
    with shell(folder) as here:
        assert len(str(details_of(here)[key_of("f")]["platform"])) == 200
        assert "\x1b[2J" not in here.say("remote", "ls", "--details")


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--jaxlib", "0.10.2"], {"old"}),
        (["--jaxlib", "0.10"], {"old", "older"}),
        (["--jaxlib", "0.1"], {"quite-old"}),
        (["--jaxlib", "0"], {"old", "older", "quite-old", "new"}),
        (["--jaxlib", "0.10.2.1"], set()),
        (["--jaxlib", "0.10", "--older-than", "5d"], {"older"}),
    ],
)
def test_entries_of_a_jaxlib_are_removed_whatever_their_age(folder, options, gone):
    versions = {"old": "0.10.2", "older": "0.10.1", "quite-old": "0.1.75", "new": "0.12.0"}
    paths = {name: write(folder, name, made_by(name, version)) for name, version in versions.items()}
    os.utime(paths["older"], (time.time() - 10 * DAY,) * 2)
    doubtful = fill_with_doubtful_ones(folder)
    (folder / "v1/all/runs/ab").mkdir(parents=True)
    run = folder / "v1/all/runs/ab" / key_of("run")
    run.write_text("what a program wanted")
    os.utime(run, (0, 0))
    with shell(folder) as here:
        would = here.json("remote", "gc", *options, "--dry-run")
        (row,) = would["remotes"]
        assert (row["matched"], row["removed"]) == (len(gone), 0)
        assert row["unknown"] == (0 if "--older-than" in options else len(doubtful))
        assert row["bytes"] == sum(paths[name].stat().st_size for name in gone)
        assert sum(each["objects"] for each in row["toolchains"]) == len(gone)
        assert all(path.exists() for path in paths.values())
        (done,) = here.json("remote", "gc", *options)["remotes"]
        assert done == row | {"removed": len(gone)}
        assert {name for name, path in paths.items() if not path.exists()} == gone
        assert run.exists() and all(path.exists() for path in doubtful.values())


def test_a_tier_whose_writers_are_trusted_is_believed(folder):
    path = write(folder, "f", made_by("f", signer=None))
    with shell(folder, "?trust=tier") as here:
        assert details_of(here)[key_of("f")]["state"] == "ok"
        assert "removed 1 object" in here.say("remote", "gc", "--jaxlib", "0.10.2")
    assert not path.exists()


def test_what_a_revoked_key_signed_is_not_believed(folder):
    path = write(folder, "f", made_by("f"))
    with host(f"file://{folder}?trust=tier") as place:
        trust(place, f"{OURS.public} revoked=2026-01-01", SECOND.public)
        here = Shell(place)
        assert "was revoked" in str(details_of(here)[key_of("f")]["problem"])
        said = here.say("remote", "gc", "--jaxlib", "0.10.2")
        assert "removed 0 objects" in said and "left 1 entry: damaged, or signed by no trusted key" in said
    assert path.exists()


def test_stale_is_what_the_store_here_knows_as_stale(folder):
    other = digest(b"a toolchain that was never here")
    made = {"old": OLD, "new": NEW, "other": other}
    paths = {name: write(folder, name, made_by(name, toolchain=toolchain)) for name, toolchain in made.items()}
    with shell(folder) as here:
        said = here.say("remote", "gc", "--stale")
        assert "removed 0 objects" in said and "no toolchain is stale here; see xcache toolchains" in said
        now = time.time()
        for toolchain, since in ((OLD, now), (NEW, None)):
            sql = "INSERT INTO toolchains (digest, platform, first_seen, stale_since) VALUES (?, 'cpu', ?, ?)"
            here.change(sql, toolchain, now, since)
        assert here.json("remote", "gc", "--stale", "--jaxlib", "0.9", "--dry-run")["remotes"][0]["matched"] == 0
        assert here.json("remote", "gc", "--stale", "--older-than", "1d", "--dry-run")["remotes"][0]["matched"] == 0
        said = here.say("remote", "gc", "--stale", "--dry-run")
        assert f"file://{folder}: would remove 1 object, " in said
        assert f"  {OLD[:12]}  cpu, jaxlib 0.10.2: 1 entry, " in said
        assert "removed 1 object" in here.say("remote", "gc", "--stale")
    assert [path.exists() for path in paths.values()] == [False, True, True]


def test_an_empty_version_removes_nothing(folder):
    path = write(folder, "f", made_by("f"), age=1000 * DAY)
    with shell(folder) as here:
        assert "--jaxlib is empty" in here.say("remote", "gc", "--jaxlib", "", code=2)
    assert path.exists()


def test_many_are_looked_at_in_several_messages(folder):
    for number in range(2 * commands.MAX_DESCRIBED + 5):
        write(folder, f"{number}", made_by(f"{number}", f"0.{number % 2}.0"))
    with shell(folder) as here:
        assert len(details_of(here)) == 205
        assert here.json("remote", "gc", "--jaxlib", "0.1")["remotes"][0]["removed"] == 102
        assert len(details_of(here)) == 103


@pytest.fixture(scope="session", params=thorough(["folder", "redis"], usual=["redis"]))
def engine(request) -> Engine:
    """Each engine in turn."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


@pytest.mark.thorough
def test_after_an_upgrade_a_team_sees_and_removes_what_the_old_jaxlib_made(engine):
    """As a user does it: each command is a process, and what one machine uploaded another one looks at."""
    address = engine.at("upgrade").url
    with host(address) as there:
        shell = Shell(there)
        keys = [shell.put(f"jit_{number}", jaxlib="0.10.2", seconds=30.0) for number in range(3)]
        kept = shell.put("jit_new", jaxlib="0.12.0")
        assert until(lambda: not remote_of(there)["waiting"])
    with host(address, signer=None) as here:
        shell = Shell(here)
        listed = shell.run("remote", "ls", "--details")
        assert (listed.returncode, listed.stderr) == (0, "")
        lines = [line for line in listed.stdout.splitlines() if " entry " in line]
        assert {line.split()[0] for line in lines} == {key[:12] for key in (*keys, kept)}
        assert all(OURS.public.id in line for line in lines)
        assert sum(bool(re.search(r"jit_\d +cpu +0\.10\.2 ", line)) for line in lines) == 3
        dry = shell.run("remote", "gc", "--jaxlib", "0.10", "--dry-run")
        assert (dry.returncode, dry.stderr) == (0, "")
        assert "would remove 3 objects" in dry.stdout and dry.stdout.count("jaxlib 0.10.2: 1 entry") == 3
        done = shell.run("remote", "gc", "--jaxlib", "0.10")
        assert done.returncode == 0 and "removed 3 objects" in done.stdout
        left = shell.json("remote", "ls", "--details")["objects"]
        assert [each["id"] for each in left if each["kind"] == "entries"] == [kept]
