"""Each cause of a miss, brought about with a real daemon and real programs, and told in words of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.command_line import Shell
from support.conversation import talking
from support.marks import thorough
from support.places import get_message, until

from xcache.wire import ledger, protocol

ON = {"XCACHE": "1", "PYTHONHASHSEED": "0", "XCACHE_PREFETCH": "0", "XCACHE_TIMEOUT": "20s"}
STEP = """
import json, os, numpy as np, jax, xcache
size = int(os.environ.get("SIZE", "8"))
# Nothing that compresses well.
large = np.random.default_rng(0).random(600_000, np.float32) if os.environ.get("LARGE") else 1
@jax.jit
def step(x):
    return (x @ x.T)[0, 0] + large
step(np.ones((size, size), np.float32))
print(json.dumps(xcache.ledger()["programs"]))
"""


def run(place, program: str = STEP, /, **environment: str) -> dict[str, Any]:
    """Run a program that compiles one function, or has it from the cache; return what its own ledger says of it."""
    result = place.run(program, **ON | environment)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)
    return row


def why(shell: Shell) -> dict[str, Any]:
    """Return what the last run's only miss is told; its words are those of its causes."""
    (miss,) = json.loads(shell.run("why", "--json").stdout)["misses"]
    assert all(kind in ledger.CAUSES for kind in ledger.kinds_of(miss["cause"]))
    return miss


def cause_of(place, shell: Shell, **environment: str) -> str:
    """Run the program once more, which misses; return the cause, the same in the program and in the store."""
    row = run(place, **environment)
    assert row["outcome"] == "miss"
    assert why(shell)["cause"] == row["cause"]
    return row["cause"]


def test_never_seen(place, shell):
    assert cause_of(place, shell) == "new"
    assert "nothing is wrong: 1 program is new to the store" in shell.run("why").stdout


@pytest.mark.thorough
def test_another_program(place, shell):
    run(place)
    assert cause_of(place, shell, SIZE="9") == "other program"


def test_other_flags(place, shell):
    run(place)
    assert cause_of(place, shell, XLA_FLAGS="--xla_cpu_enable_fast_math=true") == "other flags"


@pytest.mark.thorough
def test_another_platform(place, shell):
    run(place)
    assert cause_of(place, shell, XLA_FLAGS="--xla_force_host_platform_device_count=2") == "other platform"


@pytest.mark.once
@pytest.mark.parametrize(
    ("limit", "cause", "says"),
    [
        pytest.param({"XCACHE_MAX_ENTRIES": "1"}, "evicted: count", "XCACHE_MAX_ENTRIES", marks=pytest.mark.thorough),
        ({"XCACHE_MAX_AGE": "1s"}, "too old", "had not been used for too long"),
    ],
)
def test_gone_by_a_limit(place, shell, limit, cause, says):
    run(place)
    if "XCACHE_MAX_ENTRIES" in limit:
        # It is worth more than the other, because it was used before.
        for _ in range(3):
            run(place, SIZE="9")
    assert shell.run("stop").returncode == 0
    place.start_daemon(**limit)
    assert until(lambda: place.query("SELECT 1 FROM compile_times WHERE reason = ?", cause))
    assert cause_of(place, shell) == cause
    assert says in shell.run("why").stdout


@pytest.mark.once
@pytest.mark.parametrize("command", thorough(["rm", "clear", "invalidate"], usual=["rm"]))
def test_removed_by_a_command(place, shell, command):
    key = run(place)["key"]
    arguments = {"rm": (key,), "clear": ("--yes",), "invalidate": ("--platform", "cpu")}[command]
    done = shell.run(command, *arguments)
    assert done.returncode == 0, done.stderr
    assert cause_of(place, shell) == f"removed: {command}"
    assert f"`xcache {command}`" in why(shell)["meaning"]


@pytest.mark.once
def test_set_aside(place, shell):
    run(place)
    place.execute("UPDATE blobs SET stored_size = 'x' WHERE digest IN (SELECT blob FROM entries)")
    assert cause_of(place, shell) == "set aside"
    assert "xcache ls --quarantined" in why(shell)["advice"]


@pytest.mark.thorough
def test_damage_that_only_the_program_can_see(place, shell):
    run(place)
    place.execute("UPDATE blobs SET content = zeroblob(length(content)) WHERE digest IN (SELECT blob FROM entries)")
    assert cause_of(place, shell) == "set aside"
    assert "its digest differs" in shell.run("ls", "--quarantined").stdout


@pytest.mark.thorough
def test_unusable(place, shell):
    """The bytes are whole, but jaxlib does not load them."""
    run(place)
    broken = STEP.replace("step(np", "from xcache.request import Request\nRequest.load = lambda *_: 1 / 0\nstep(np")
    assert run(place, broken)["cause"] == "unusable"
    assert why(shell)["cause"] == "unusable"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "cause", "says"),
    [
        ({"XCACHE_MAX_PAYLOAD": "1M"}, "refused: too large", "XCACHE_MAX_PAYLOAD"),
        ({"XCACHE_MAX_SIZE": "512K"}, "refused: too large", "XCACHE_MAX_SIZE"),
        ({"XCACHE_MAX_ENTRIES": "1"}, "refused: store full", "pinned"),
    ],
)
def test_refused_before(place, shell, limit, cause, says):
    """Each run compiles it again, and is told that the store did not take it the last time."""
    if "XCACHE_MAX_ENTRIES" in limit:
        assert shell.run("pin", run(place)["key"]).returncode == 0
        assert shell.run("stop").returncode == 0
    place.start_daemon(**limit)
    assert run(place, LARGE="1")["outcome"] == "miss"
    assert cause_of(place, shell, LARGE="1") == cause
    told = why(shell)
    assert says in f"{told['meaning']} {told['advice']}"
    assert told["stored"].startswith("no: ")
    assert "and did not store it" in told["earlier"]


@pytest.mark.thorough
def test_stored_too_late(place, shell):
    row = run(place)
    assert shell.run("rm", row["key"]).returncode == 0
    with talking(place) as talk:
        mark = protocol.MarkNotCacheable(row["key"], "jit_step", protocol.SERIALIZE_FIRST)
        assert talk.ask(mark) == protocol.Done()
    assert cause_of(place, shell) == "serialized too late"
    assert why(shell)["stored"] == "yes"
    assert run(place)["outcome"] == "hit"


@pytest.mark.thorough
def test_waited_in_vain(place, shell):
    key = run(place)["key"]
    assert shell.run("rm", key).returncode == 0
    with talking(place) as talk:
        assert talk.ask(get_message(key, 60.0)).lease
        begun = subprocess.Popen([sys.executable, "-c", STEP], env=place.env | ON, stdout=subprocess.PIPE)
        assert until(lambda: [each["waiting"] for each in talk.ask(protocol.AskStatus()).compiles] == [1])
    said, _ = begun.communicate(timeout=100)
    assert json.loads(said)[0]["cause"] == "waited in vain"
    assert why(shell)["cause"] == "waited in vain"


CALLBACK = """
import json, numpy as np, jax, xcache
@jax.jit
def step(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
step(np.ones(8, np.float32))
print(json.dumps(xcache.ledger()["programs"]))
"""


@pytest.mark.once
def test_not_cacheable_with_the_reason(place, shell):
    row = run(place, CALLBACK)
    assert (row["outcome"], row["cause"]) == ("uncacheable", "python callback")
    shown = shell.run("why").stdout
    assert "1 program: it cannot be cached: python callback" in shown
    assert "pure_callback" in shown


@pytest.mark.once
def test_no_daemon(place, shell):
    """No run is left, so the program says it itself."""
    result = place.run(STEP, **ON, XCACHE_AUTOSTART="0", XCACHE_EXPLAIN="1")
    assert result.returncode == 0
    assert [row["cause"] for row in json.loads(result.stdout)] == ["no daemon"]
    lines = result.stderr.splitlines()
    assert any("jit_step" in line and "no daemon could be reached" in line for line in lines), lines
    assert "no run is recorded" in shell.run("why").stderr


STOPPED = """
import os, signal
os.kill({pid}, signal.SIGSTOP)
try:
    exec({source!r})
    jax.jit(lambda x: x * 2)(np.ones(8, np.float32))
    print(json.dumps(xcache.ledger()["programs"]))
finally:
    os.kill({pid}, signal.SIGCONT)
"""


@pytest.mark.thorough
def test_a_daemon_that_does_not_answer_is_not_asked_again(place, shell):
    """The first of the program's threads to ask waits for an answer; the breaker is open then."""
    place.start_daemon()
    source = STOPPED.format(pid=place.daemon_pid(), source=STEP)
    result = place.run(source, **ON | {"XCACHE_TIMEOUT": "1s", "XCACHE_EXPLAIN": "1"})
    assert result.returncode == 0, result.stderr
    first, second = (row["cause"] for row in json.loads(result.stdout.splitlines()[-1]))
    not_asked = "not asked: it failed before: the daemon did not answer within"
    assert first == "no answer" or first.startswith(not_asked)
    assert second.startswith(not_asked)
    assert "the daemon was not asked" in result.stderr
    assert ledger.CAUSES["no daemon"] not in result.stderr


@pytest.mark.once
def test_a_program_that_may_wait_no_longer_asks_no_more(place, shell):
    """The daemon is in no trouble, and its log has nothing to say."""
    spent = "import jax, jax.numpy as jnp\njnp.ones(3)\n"
    spent += "from xcache import process_cache\nprocess_cache.current().client.charge(1e6)\n"
    result = place.run(spent + STEP, **ON)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[-1]["cause"] == "time used up"
    told = shell.run("why").stdout
    assert "XCACHE_TIMEOUT" in told
    assert "log" not in told


@pytest.mark.thorough
def test_on_the_first_run_of_an_empty_store_all_is_new(place, shell):
    more = "step(np.ones((9, 9), np.float32))\njax.jit(step)(np.ones((9, 3), np.float32))\n"
    twice = STEP.replace("print(", f"{more}print(")
    result = place.run(twice, **ON)
    assert [row["cause"] for row in json.loads(result.stdout)] == ["new"] * 3
    assert shell.json("stats")["causes"] == {"new": 3}
    told = shell.run("why").stdout.splitlines()
    assert told[3].startswith("nothing is wrong: 3 programs are new to the store")
    assert "compared" not in str(told)
    # For the next run they were there before.
    assert cause_of(place, shell, SIZE="10") == "other program"


@pytest.mark.thorough
def test_refresh(place, shell):
    run(place)
    assert cause_of(place, shell, XCACHE="refresh") == "refresh"
    assert "XCACHE=1" in why(shell)["advice"]


@pytest.mark.thorough
def test_readonly_says_that_it_stores_nothing(place, shell):
    run(place, SIZE="9")
    for _ in range(2):
        assert cause_of(place, shell, XCACHE="readonly") == "other program; readonly"
    told = why(shell)
    assert "each run compiles it again" in told["meaning"]
    assert "Run the program once with XCACHE=1" in f"{told['advice']}{told['differences']}"
    assert told["stored"] == "no: XCACHE=readonly"
    # A program that is not stored is compared by its arguments.
    assert told["differences"][0]["text"] == "argument 0 is f32[8,8] here, f32[9,9] in the stored program"


@pytest.mark.thorough
def test_statistics_count_the_same_causes(place, shell):
    run(place)
    run(place, SIZE="9", XCACHE="readonly")
    assert shell.run("clear", "--yes").returncode == 0
    run(place)
    counted = shell.json("stats")
    assert counted["causes"] == {"new": 1, "other program; readonly": 1, "removed": 1}
    assert sum(counted["causes"].values()) == counted["misses"]
