"""The commands that look at programs rebuild compile options from the store, and compare two programs."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from jaxlib import xla_client
from support.command_line import Shell

from xcache.cli import Failure
from xcache.cli.artifacts import comparison, process, recipe
from xcache.cli.artifacts.entry import Entry
from xcache.keys import flags, options
from xcache.wire.hashing import digest

FLAGS = '--xla_a="b c\\"d" --xla_cpu_enable_fast_math --xla_b=1,2 --xla_c=\'$HOME\''


@pytest.fixture
def shell(place):
    place.start_daemon()
    return Shell(place)


def component(content):
    return digest(content), content.decode()


def real_options():
    """Return compile options in which every kind of value occurs."""
    made = xla_client.CompileOptions()
    made.num_replicas, made.num_partitions = 1, 4
    made.device_assignment = xla_client.DeviceAssignment.create(np.array([[3, 2, 1, 0]]))
    build = made.executable_build_options
    build.use_spmd_partitioning = True
    build.allow_spmd_sharding_propagation_to_output = [True, False]
    build.fdo_profile = b"12ab"
    build.debug_options.xla_dump_to = "/nowhere"
    made.env_option_overrides = [("xla_cpu_enable_fast_math", True), ("xla_x", "1"), ("xla_y", 2.5)]
    return made.SerializeAsString()


@pytest.mark.parametrize("serialized", [xla_client.CompileOptions().SerializeAsString(), real_options()])
def test_rebuilt_options_are_those_of_the_key(serialized):
    text = options.canonical(serialized)
    found = recipe.rebuilt(
        {"options": component(text), "flags": component(flags.collect({"XLA_FLAGS": FLAGS}, ()))}, own=True
    )
    # jaxlib reads them, and writes them with what it adds on its own.
    parsed = xla_client.CompileOptions.ParseFromString(found.options)
    assert options.canonical(parsed.SerializeAsString()) == text
    assert flags.collect(found.environment, ()) == flags.collect({"XLA_FLAGS": FLAGS}, ())
    assert found.devices == ((3, 2, 1, 0) if serialized == real_options() else ())


def test_the_devices_of_a_gpu_are_numbered_from_zero():
    text = options.canonical(real_options(), places=tuple((number, 0, None) for number in range(4)))
    assert recipe.rebuilt({"options": component(text), "flags": component(b"")}, own=True).devices == (0, 1, 2, 3)


def test_dumps_are_asked_for_beside_all_other_options():
    text = options.canonical(real_options())
    parsed = xla_client.CompileOptions.ParseFromString(recipe.with_dumps(real_options(), ".*"))
    build = parsed.executable_build_options
    debug = build.debug_options
    assert (debug.xla_dump_to, debug.xla_dump_hlo_pass_re, debug.xla_dump_max_hlo_modules) == (".", ".*", -1)
    assert options.canonical(parsed.SerializeAsString()) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3.3.99999=7", "does not know option 3.3.99999"),
        ("3.3.109.5=7", "cannot be read"),
        ("no line", "cannot be read"),
        ("3.3.61=zz", "cannot be read"),
        ("content of xla_gpu_ptx_file=abc", "a file that they name has changed (xla_gpu_ptx_file)"),
        ("3.3.99=1\n3.1=2", "please report this"),
    ],
)
def test_options_that_cannot_be_rebuilt_are_refused(text, says):
    with pytest.raises(Failure, match=re.escape(says)):
        recipe.rebuilt({"options": component(text.encode()), "flags": component(b"")}, own=True)


def test_a_description_that_was_cut_short_is_refused():
    text = options.canonical(real_options())
    parts = {"options": (digest(text), text.decode()[:-1]), "flags": component(b"")}
    with pytest.raises(Failure, match="no complete description"):
        recipe.rebuilt(parts, own=True)


def test_files_that_another_user_names_are_not_read(tmp_path):
    named = tmp_path / "named"
    named.write_text("secret")
    made = xla_client.CompileOptions()
    made.env_option_overrides = [("xla_gpu_ptx_file", str(named))]
    parts = {"options": component(options.canonical(made.SerializeAsString())), "flags": component(b"")}
    assert recipe.rebuilt(parts, own=True)
    with pytest.raises(Failure, match="does not read for another user's entry"):
        recipe.rebuilt(parts, own=False)


def test_a_job_of_several_processes_is_refused():
    facts = b"devices=(8, 4)\nkinds=('cpu',)\nprocesses=2\nthreads=2"
    with pytest.raises(Failure, match="a job of 2 processes"):
        recipe.client({"platform": component(facts)})


def entry(writer):
    return Entry("0" * 64, "jit_f", "cpu", "0.10.2", writer, 1.0, "0" * 64, b"", b"", {}, [])


@pytest.mark.skipif(os.getuid() != 0, reason="only root may take another user's rights")
def test_root_takes_the_rights_of_the_writer():
    # Any program may be named in place of Python; this one says whose rights it has.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        script = Path(folder, "script")
        script.write_text("#!/bin/sh\necho $(id -u) $(id -G) >&2; ln -s /etc/passwd result.json; exit 1\n")
        script.chmod(0o755)
        with pytest.raises(Failure, match=r"failed: 54321 65534$"):
            process.run(entry(54321), process.Python(str(script)), "stablehlo")


@pytest.mark.skipif(os.getuid() == 0, reason="root may look at all entries")
def test_nobody_looks_at_another_users_executable():
    with pytest.raises(Failure, match="only that user and root"):
        process.run(entry(54321), process.Python("/bin/false"), "stablehlo")


HERE = {"0001.simplify.txt": b'a\nb, metadata={op_name="f{}" line=1}\nc\n', "after.txt": b"x\n"}
THERE = {"0000.new.txt": b"n\n", "0002.simplify.txt": b'a\nb, metadata={op_name="g" line=2}\nd\n', "after.txt": b"x\n"}


def test_a_pass_is_compared_with_the_same_pass_and_places_do_not_count():
    changed, added = comparison.pairs(HERE, THERE)
    assert (changed.name, added.name) == ("simplify.txt", "new.txt")
    assert comparison.unified(changed, ("one", "two")) == [
        *("--- one simplify.txt", "+++ two simplify.txt", "@@ -1,3 +1,3 @@", " a", " b", "-c", "+d")
    ]
    assert added.here is None


def test_two_columns_fit_a_narrow_terminal():
    pair = comparison.Pair("f", ["same", "x" * 50, "only here"], ["same", "y" * 50])
    rows = comparison.side_by_side(pair, 40)
    assert max(map(len, rows)) <= 40
    assert [row[19] for row in rows] == [" ", "|", "<"]


def test_an_entry_is_found_by_a_part_of_its_name(shell):
    key = shell.put("jit_train_step")
    shell.put("jit_eval_step")
    assert shell.json("show", "train")["key"] == key
    said = shell.say("show", "step", code=2)
    assert "2 entries are named step" in said and "jit_train_step" in said and "jit_eval_step" in said
    assert said.count("compiled in") == said.count("stored 20") == 2
    assert "is named nothing" in shell.say("show", "nothing", code=1)
    # A whole name is not a part of a longer one.
    other = shell.put("jit_eval_step_2")
    assert shell.json("show", "eval_step")["key"] != other


def test_show_names_the_options(shell):
    key = shell.put("jit_f")
    named = digest(b"3.3.99=1\n3.4=2")
    text = "description = '3.3.99=1' || char(10) || '3.4=2'"
    shell.change(f"UPDATE components SET {text}, digest = '{named}' WHERE name = 'options'")  # noqa: S608 - its own text
    shell.change(f"UPDATE entries SET options_component = '{named}'")  # noqa: S608 - the test's own digest
    shown = shell.json("show", key)["components"]["options"]
    assert shown["named"] == ["xla_cpu_enable_fast_math = true", "num_replicas = 2"]
    assert shown["description"] == "3.3.99=1\n3.4=2"
    assert "  xla_cpu_enable_fast_math = true\n" in shell.say("show", key)


@pytest.mark.parametrize("command", ["hlo", "graph", "cost"])
def test_what_cannot_be_shown_is_one_line(shell, command, monkeypatch):
    monkeypatch.chdir(shell.directory)
    for wanted, says in (("abcd", "no entry begins with"), ("jit_f", "no entry is named jit_f")):
        assert says in shell.say(command, wanted, code=1)
    key = shell.put("jit_f")
    shell.change("UPDATE entries SET jaxlib_version = '0.0.1'")
    stage = () if command == "cost" else ("--stage", "optimized")
    said = shell.say(command, key, *stage, code=1)
    assert "the store does not know where jaxlib 0.0.1, which wrote this entry, is installed" in said
    assert said.count("\n") == 1


def test_options_that_make_no_sense_are_wrong_usage(shell):
    key = shell.put("jit_f")
    assert "exclude each other" in shell.say("hlo", key, "--diff", key, "-o", "x", code=2)
    assert "--side-by-side needs --diff" in shell.say("hlo", key, "--side-by-side", code=2)
    assert "should end in" in shell.say("graph", key, "-o", "x.jpg", code=2)
