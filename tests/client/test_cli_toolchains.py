"""``xcache toolchains`` and ``xcache invalidate``; and the limits that ``xcache status`` shows."""

from __future__ import annotations

import os

import pytest
from command_line import Shell, names
from places import until


@pytest.fixture
def shell(place):
    return Shell(place)


@pytest.fixture
def filled(shell):
    """Four entries, each of a toolchain that nobody announced."""
    shell.put("jit_f", jaxlib="0.10.2")
    shell.put("jit_g", jaxlib="0.1.75")
    shell.put("jit_step", jaxlib="0.10.1", platform="tpu", raw=os.urandom(100_000))
    shell.put("pmap_step", jaxlib="0.9.0")
    return shell


def left(shell: Shell) -> list[str]:
    return names(shell.json("ls", "--sort", "name"))


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--jaxlib", "0.10"], {"jit_f", "jit_step"}),
        (["--jaxlib", "0.1"], {"jit_g"}),
        (["--platform", "TPU"], {"jit_step"}),
        (["--name", "step"], {"jit_step", "pmap_step"}),
        (["--name", "JIT_?"], {"jit_f", "jit_g"}),
        (["--name", "step", "--platform", "cpu"], {"pmap_step"}),
        (["--older-than", "0"], {"jit_f", "jit_g", "jit_step", "pmap_step"}),
    ],
)
def test_what_fits_all_options_is_removed_and_nothing_else(filled, options, gone):
    before = left(filled)
    would = filled.json("invalidate", *options, "--dry-run")
    assert would | {"bytes": 0} == {"matched": len(gone), "removed": 0, "bytes": 0, "dry_run": True}
    assert left(filled) == before
    done = filled.json("invalidate", *options)
    # As many bytes as it said, too.
    assert done == would | {"removed": len(gone), "dry_run": False}
    assert left(filled) == [name for name in before if name not in gone]
    (change,) = filled.json("stats")["invalidations"]
    assert change["entries"] == len(gone)
    assert change["reason"].startswith("by hand: ")


def test_what_several_entries_have_comes_free_with_the_last(shell):
    for name, program in (("jit_f", b"one" * 1000), ("jit_g", b"one" * 1000), ("jit_h", b"another" * 1000)):
        shell.put(name, program=program)
    few, all_of_them = (shell.json("invalidate", "--name", name, "--dry-run")["bytes"] for name in ("jit_f", "jit"))
    assert shell.json("invalidate", "--name", "jit_f")["bytes"] == few
    assert shell.json("invalidate", "--name", "jit")["bytes"] == all_of_them - few


def test_a_toolchain_by_its_beginning(filled):
    digests = sorted(row["digest"] for row in filled.json("toolchains")["toolchains"])
    assert len(digests) == 4
    said = filled.say("invalidate", "--toolchain", digests[0][:20].upper())
    assert said.startswith("removed 1 entry, ")
    assert len(left(filled)) == 3
    assert "no toolchain begins with" in filled.say("invalidate", "--toolchain", digests[0], code=1)


def test_one_that_could_be_several_is_none(shell):
    for number in range(17):
        shell.put(f"jit_{number}")
    digests = [row["digest"] for row in shell.json("toolchains")["toolchains"]]
    twice = next(digit for digit in "0123456789abcdef" if sum(one.startswith(digit) for one in digests) > 1)
    said = shell.say("invalidate", "--toolchain", twice, code=2)
    assert f"more than one toolchain begins with {twice}:" in said
    assert said.count("\n  ") == sum(one.startswith(twice) for one in digests)
    assert len(left(shell)) == 17


@pytest.mark.parametrize("option", ["--toolchain", "--jaxlib", "--platform", "--name"])
def test_a_variable_that_is_not_set_does_not_remove_everything(filled, option):
    assert f"{option} says nothing" in filled.say("invalidate", option, "", code=2)
    assert len(left(filled)) == 4


def test_what_fits_nothing(filled):
    assert filled.say("invalidate", "--name", "nothing") == "none of 4 entries fits\n"
    assert filled.say("invalidate", "--name", "nothing", "--dry-run") == "none of 4 entries fits\n"
    assert "say which entries" in filled.say("invalidate", code=2)


def test_an_entry_that_is_not_served_says_so(filled):
    key, *_ = [entry["key"] for entry in filled.json("ls", "--name", "jit_f")["entries"]]
    assert filled.json("show", key)["stale"] is False
    digest = filled.json("show", key)["components"]["toolchain"]["digest"]
    filled.say("stop")
    filled.change("INSERT INTO toolchains (digest, platform, first_seen, stale_since) VALUES (?, 'cpu', 1, 2)", digest)
    assert filled.json("show", key)["stale"] is True
    assert "not served" in filled.say("show", key)
    assert "stale" in filled.say("toolchains")


def test_an_empty_store(shell):
    assert shell.say("invalidate", "--name", "x") == "the store is empty\n"
    assert shell.say("toolchains") == "the store is empty\n"
    assert not shell.held()


def test_without_a_daemon_it_is_what_the_last_one_saw(filled):
    assert "no daemon runs" not in filled.run("toolchains").stderr
    filled.say("stop")
    said = filled.run("toolchains")
    assert said.stderr == "xcache: no daemon runs; this is what the last one saw\n"
    assert said.stdout.count("unknown") == 4


def test_status_shows_the_limits_that_are_set(shell):
    assert "of 20 GiB (0%)" in shell.say("status")
    assert "keeps" not in shell.say("status")
    shell.env |= {"XCACHE_MAX_SIZE": "0", "XCACHE_MAX_ENTRIES": "8", "XCACHE_MAX_AGE": "90d"}
    for _ in range(2):
        said = shell.say("status")
        assert "1 entry of 8 (12%), " in said or "0 entries of 8 (0%), " in said
        assert "what was used within 90d" in said
        shell.put("jit_f")
    found = shell.json("status")
    assert (found["max_entries"], found["max_age"]) == (8, 90 * 86400.0)
    shell.env |= {"XCACHE_MAX_ENTRIES": "0"}
    shell.say("stop")
    assert ", no limit" in shell.say("status")


def test_status_says_when_the_disk_is_too_full(shell):
    shell.env["XCACHE_MIN_FREE"] = "1"
    shell.say("start")
    # It asks the disk when it makes room, and begins with that.
    assert until(lambda: shell.json("status")["to_stay_free"])
    found = shell.json("status")
    assert found["free"] > found["to_stay_free"] == 1
    assert "disk" not in shell.say("status")
    shell.say("stop")
    whole = os.statvfs(shell.directory)
    shell.env["XCACHE_MIN_FREE"] = str(whole.f_blocks * whole.f_frsize)
    shell.say("start")
    assert until(lambda: "entries go, and nothing is stored" in shell.say("status"))
