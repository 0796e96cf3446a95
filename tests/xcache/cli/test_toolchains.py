"""``xcache toolchains`` and ``xcache invalidate``; and the limits that ``xcache status`` shows."""

from __future__ import annotations

import os

import pytest
from support.command_line import Shell, names
from support.places import until


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
def test_entries_that_match_all_options_are_removed_and_no_others(filled, options, gone):
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


def test_removals_by_hand_are_counted_until_the_statistics_are_reset(filled):
    filled.say("invalidate", "--name", "step")
    filled.change("UPDATE statistics SET amount = amount + 5 WHERE name = 'invalidated'")
    said = filled.say("stats")
    assert "7 (2 removed by hand; 5 by changes of toolchains, 0 of them removed)" in said
    assert "\n\nthe latest invalidations\n" in said
    assert filled.json("stats", "--zero")["invalidations"] == []
    assert "the latest" not in filled.say("stats")


def test_a_shared_program_comes_free_with_the_last_entry(shell):
    for name, program in (("jit_f", b"one" * 1000), ("jit_g", b"one" * 1000), ("jit_h", b"another" * 1000)):
        shell.put(name, program=program)
    few, all_of_them = (shell.json("invalidate", "--name", name, "--dry-run")["bytes"] for name in ("jit_f", "jit"))
    assert shell.json("invalidate", "--name", "jit_f")["bytes"] == few
    assert shell.json("invalidate", "--name", "jit")["bytes"] == all_of_them - few


def test_a_blob_that_a_toolchain_has_twice_is_counted_once(filled):
    filled.json("stop")
    digests = [row["digest"] for row in filled.json("toolchains")["toolchains"]]
    # Two entries with the same content, and one place that two users have announced.
    filled.change("UPDATE entries SET toolchain_component = ?", digests[0])
    filled.change("UPDATE entries SET blob = (SELECT max(blob) FROM entries WHERE stored_size > 50000)")
    filled.change("UPDATE entries SET stored_size = (SELECT max(stored_size) FROM entries)")
    (size,) = {entry["stored_size"] for entry in filled.json("ls")["entries"]}
    for uid in (1, 2):
        filled.change("INSERT INTO installations VALUES (?, ?, '/here', '[]', 'here', 0)", digests[0], uid)
    row = next(row for row in filled.json("toolchains")["toolchains"] if row["digest"] == digests[0])
    assert (row["entries"], row["bytes"]) == (4, size)
    assert "/here\n" in filled.say("toolchains")


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
    assert f"{option} is empty" in filled.say("invalidate", option, "", code=2)
    assert len(left(filled)) == 4


def test_options_that_match_no_entry_remove_nothing(filled):
    assert filled.say("invalidate", "--name", "nothing") == "none of 4 entries match\n"
    assert filled.say("invalidate", "--name", "nothing", "--dry-run") == "none of 4 entries match\n"
    assert "say which entries" in filled.say("invalidate", code=2)


def test_an_entry_that_is_not_served_says_so(filled):
    key, *_ = [entry["key"] for entry in filled.json("ls", "--name", "jit_f")["entries"]]
    assert filled.json("show", key)["stale"] is False
    digest = filled.json("show", key)["components"]["toolchain"]["digest"]
    filled.say("stop")
    filled.change("INSERT INTO toolchains (digest, platform, first_seen, stale_since) VALUES (?, 'cpu', 1, 2)", digest)
    assert filled.json("show", key)["stale"] is True
    assert "not served" in filled.say("show", key)
    assert [entry["key"] for entry in filled.json("ls")["entries"] if entry["stale"]] == [key]
    titles, *rows = filled.say("ls").splitlines()
    assert titles.endswith("stale") and sum(row.endswith("yes") for row in rows) == 1
    assert filled.json("status")["stale"] == 1
    assert "1 entry, not served" in filled.say("status")
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
    assert until(lambda: "the daemon evicts entries and stores nothing" in shell.say("status"))
