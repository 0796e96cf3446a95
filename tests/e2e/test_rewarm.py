"""``xcache rewarm``: the entries that it builds are those that programs ask for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import jax
import jaxlib
import pytest
from support.command_line import Shell
from support.jax_environment import JaxEnvironment
from support.marks import thorough
from support.places import until
from support.toolchains import make_old

from xcache.warming import building

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# It runs on every Python that xcache supports, and writes programs that the jax of these tests can read.
OTHER = "0.9.2"
OF_JAXLIB = "SELECT program FROM entries WHERE jaxlib_version = ?"
PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, xcache
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
whole = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
x = np.arange(8, dtype=np.float32)
jax.jit(lambda x: (x * 3 + 1).sum())(x)
jax.jit(lambda x: jnp.tanh(x), compiler_options={"xla_embed_ir_in_executable": True})(x)
jax.jit(lambda x: x.sort())(x)
jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x))(x)
jax.jit(lambda x: x.sum() + 2)(jax.device_put(x, whole))
if "callback" in sys.argv:
    jax.jit(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(x)
stats = xcache.stats()
print(json.dumps({"hits": stats.hits, "misses": stats.misses}))
"""
FLAGS = {
    "none": "",
    "some": "--xla_cpu_enable_fast_math=true --xla_dump_hlo_pass_re='a b'",
    "devices": "--xla_force_host_platform_device_count=4",
}


def ran(place, **environment: str) -> tuple[int, int]:
    done = place.run(PROGRAM, XCACHE="1", JAX_PLATFORMS="cpu", **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    return said["hits"], said["misses"]


@pytest.mark.parametrize("flags", thorough(FLAGS, usual=["none"]))
def test_the_keys_are_those_that_programs_ask_for(place, flags):
    environment = {"XLA_FLAGS": FLAGS[flags], "NPROC": "3"}
    hits, compiled = ran(place, **environment)
    assert (hits, compiled > 4) == (0, True)
    wanted = make_old(place)
    shell = Shell(place)
    # Other flags here change nothing: they are those of each entry.
    shell.env["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
    told = shell.json("rewarm", "--workers", "2")
    assert (told["built"], told["failed"], told["left_out"]) == (compiled, [], [])
    found = {key for (key,) in place.query("SELECT key FROM entries")}
    assert wanted.keys() <= found
    assert ran(place, **environment) == (compiled, 0)
    # Again there is nothing to do, and what is missing is built alone.
    shell.json("rm", sorted(wanted)[0])
    told = shell.json("rewarm")
    assert (told["built"], told["there"]) == (1, compiled - 1)


@pytest.mark.thorough
def test_entries_are_chosen_as_ls_does(place):
    ran(place)
    make_old(place)
    shell = Shell(place)
    assert shell.json("rewarm", "--jaxlib", "0.1")["chosen"] == 0
    assert shell.json("rewarm", "--name", "lambda")["built"] > 0


@pytest.mark.thorough
def test_other_settings_are_said_and_nothing_is_guessed(place):
    ran(place)
    make_old(place)
    shell = Shell(place)
    shell.env["JAX_OPTIMIZATION_LEVEL"] = "O1"
    told = shell.json("rewarm")
    assert told["built"] == 0
    (left,) = told["left_out"]
    assert "optimization_level" in left["reason"]


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_what_another_jax_lowers_alike_hits(place):
    other = JaxEnvironment(place, "other", OTHER, PROGRAM)
    _, compiled = other.run()
    told = Shell(place).json("rewarm", "--to", sys.executable)
    assert (told["jax"], told["failed"]) == (jax.__version__, [])
    assert told["built"] + sum(len(each["entries"]) for each in told["left_out"]) == compiled
    built = {program for (program,) in place.query(OF_JAXLIB, jaxlib.__version__)}
    hits, _ = ran(place)
    for miss in Shell(place).json("why")["misses"]:
        said = [f"{each['text']} {each['advice']}" for each in miss["differences"]]
        assert OTHER in said[0]
        assert not any("report it" in each or "no part of the two" in each for each in said)
    # The programs that miss all the same are other ones; of a jax that is much older, all are.
    assert hits > 0 or jax.__version_info__ < (0, 8)
    missed = {program for (program,) in place.query(OF_JAXLIB, jaxlib.__version__)} - built
    with_it = place.query("SELECT count(*) FROM entries WHERE jaxlib_version = ?", jaxlib.__version__)
    assert with_it == [(len(built) + len(missed),)]
    # And back: the other jax has its own entries still.
    assert other.run() == (compiled, 0)


def children(pid: int) -> list[int]:
    """Return the processes that a process, or one that it started, has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


def compiles(pid: int) -> list[int]:
    """Return the children of a command's workers."""
    workers = [child for child in children(pid) if b"xcache.warming.worker" in _command_of(child)]
    return [each for each in workers if any(each in children(worker) for worker in workers)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", thorough([signal.SIGKILL, signal.SIGSEGV], usual=[signal.SIGKILL]))
def test_a_compile_that_ends_costs_one_entry(place, number):
    _, compiled = ran(place)
    make_old(place)
    shell = Shell(place)
    with shell.begin("rewarm", "--workers", "1", "--json") as command:
        found: list[int] = []
        # A worker that only plans has none.
        assert until(lambda: found.extend(compiles(command.pid)) or found, 120.0)
        os.kill(found[0], number)
        said, complaints = command.communicate(timeout=120)
    told = json.loads(said)
    assert command.returncode == 1, complaints
    assert told["built"] == compiled - 1
    (failed,) = told["failed"]
    assert ("memory" if number == signal.SIGKILL else "crashed") in failed["reason"]
    assert len(failed["entries"]) == 1
    # The next call builds what is missing.
    assert shell.json("rewarm")["built"] == 1


@pytest.mark.thorough
def test_an_interrupted_command_leaves_no_process_and_goes_on_later(place):
    _, compiled = ran(place)
    make_old(place)
    shell = Shell(place)
    with shell.begin("rewarm", "--workers", "1") as command:
        started: list[int] = []
        assert until(lambda: started.extend(compiles(command.pid)) or started, 120.0)
        everything = children(command.pid)
        command.send_signal(signal.SIGINT)
        said, complaints = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "built" in said
    assert "Traceback" not in complaints
    ours = [pid for pid in everything if b"warming" in _command_of(pid)]
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() and b"warming" in _command_of(pid) for pid in ours))
    assert shell.json("rewarm")["failed"] == []
    assert ran(place) == (compiled, 0)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.thorough
def test_a_compile_that_hangs_is_given_up(place, monkeypatch):
    _, compiled = ran(place)
    make_old(place)
    monkeypatch.setattr(building, "_LEAST_SECONDS", 20.0)
    monkeypatch.setattr(building, "_TIMES", 0.0)
    stopped: list[int] = []
    begun = os.getpid()

    def stop_one() -> None:
        if until(lambda: stopped.extend(compiles(begun)) or stopped, 120.0):
            os.kill(stopped[0], signal.SIGSTOP)

    stopping = threading.Thread(target=stop_one)
    stopping.start()
    told = json.JSONDecoder().raw_decode(Shell(place).say("rewarm", "--workers", "1", "--json", code=1))[0]
    stopping.join()
    assert (told["built"], [each["reason"] for each in told["failed"]]) == (
        compiled - 1,
        ["it did not end within 20 s and was stopped"],
    )


@pytest.mark.thorough
def test_no_python_is_one_sentence(place):
    ran(place)
    make_old(place)
    assert "cannot be run" in Shell(place).say("rewarm", "--to", "/nowhere/python", code=1)


@pytest.mark.thorough
def test_no_cluster_is_one_sentence(place):
    ran(place)
    make_old(place)
    done = Shell(place).run("rewarm", "--dask", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("xcache: no Dask scheduler answers at tcp://127.0.0.1:1")
    assert len(done.stderr.splitlines()) == 1
