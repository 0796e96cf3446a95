"""On a machine's daemon each user sees their own runs, and compares them only with entries that they may load."""

from __future__ import annotations

import json

import pytest
from support.users import ALICE, BOB, BUILDER, CAROL, KEY, command

STEP = """
import os, sys, numpy as np, jax
@jax.jit
def step(x):
    return x @ x.T + 1
size = int(os.environ["SIZE"])
step(np.ones((size, size), np.float32))
if os.environ.get("LARGE"):
    large = np.random.default_rng(0).random(300_000, np.float32)
    jax.jit(lambda x: x + large)(np.float32(1))
"""
ON = {"XCACHE": "1", "XCACHE_TIMEOUT": "20s", "PYTHONHASHSEED": "0"}


def run(machine, uid, size, *arguments, **environment):
    done = machine.run(uid, STEP, *arguments, **ON | {"SIZE": str(size)} | environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def why(machine, uid, *arguments):
    code, said, complaints = command(machine, uid, "why", *arguments, "--json")
    assert code == 0, complaints
    return json.loads(said)["misses"]


def runs(machine, uid):
    return json.loads(command(machine, uid, "runs", "--json")[1])["runs"]


def test_users_see_their_own_runs_and_hear_nothing_of_others(machine):
    machine.start()
    run(machine, ALICE, 8, "--secret-of-alice")
    run(machine, BOB, 8)
    (of_alice,), (of_bob,) = runs(machine, ALICE), runs(machine, BOB)
    assert "--secret-of-alice" in of_alice["command"]
    for arguments in (("run",), ("why",), ("runs",), ("compare", "last"), ("trace", "-o", "-")):
        code, said, complaints = command(machine, BOB, *arguments)
        assert code == 0, complaints
        assert "secret" not in said
        assert of_alice["run"][:8] not in said
    for arguments in (("run", of_alice["run"]), ("why", "--run", of_alice["run"]), ("compare", of_alice["run"])):
        code, said, complaints = command(machine, BOB, *arguments)
        assert (code, said) == (1, "")
        assert complaints == f"xcache: no run begins with {of_alice['run']!r}; `xcache runs` lists them\n"
    assert command(machine, CAROL, "runs")[1] == ""
    # Root sees both.
    assert {each["run"] for each in runs(machine, 0)} == {of_alice["run"], of_bob["run"]}


@pytest.mark.thorough
def test_what_only_a_stranger_has_stored_is_told_without_a_name(machine):
    machine.start()
    run(machine, ALICE, 8)
    run(machine, BOB, 8)
    (miss,) = why(machine, BOB)
    assert (miss["cause"], miss["nearest"], miss["differences"]) == ("not trusted", "", [])
    assert "trusted_writers" in miss["advice"]
    # A program that only resembles that of a stranger is new.
    run(machine, CAROL, 9)
    (miss,) = why(machine, CAROL)
    assert (miss["cause"], miss["nearest"], miss["differences"]) == ("new", "", [])


@pytest.mark.thorough
def test_a_program_is_compared_with_ones_own_and_those_of_trusted_writers(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder")
    run(machine, BUILDER, 9)
    run(machine, BOB, 10)
    run(machine, ALICE, 11)
    (miss,) = why(machine, ALICE)
    assert miss["cause"] == "other program"
    assert [each["text"] for each in miss["differences"]] == [
        "argument 0 (x) is f32[11,11] here, f32[9,9] in the stored program"
    ]
    run(machine, ALICE, 12)
    (miss,) = why(machine, ALICE)
    assert "f32[11,11] in the stored program" in miss["differences"][0]["text"]


def test_nobody_is_handed_the_program_of_a_stranger(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder")
    machine.talk(BUILDER, "said.append(text(talk.put(KEY, b'of the builder', b'program of the builder')))")
    ask = "answer = talk.ask(commands.AskProgram(KEY)); said.append(str(getattr(answer, 'content', text(answer))))"
    assert machine.talk(ALICE, ask) == [str(b"program of the builder")]
    machine.talk(BUILDER, "said.append(text(talk.ask(commands.Remove([KEY]))))")
    large = "said.append(text(talk.put(KEY, b'of bob', os.urandom(100_000))))"
    assert machine.talk(BOB, large) == ["Stored"]
    assert machine.talk(ALICE, ask) == ["Refused: no entry"]
    assert machine.talk(BOB, f"{ask}; said.append(str(len(talk.descriptors)))") == ["None", "1"]
    assert machine.talk(ALICE, ask.replace("KEY", "'no digest'")) == ["Refused: no entry"]
    assert KEY not in command(machine, ALICE, "why")[1]


@pytest.mark.thorough
def test_what_exceeds_a_quota_is_told(machine):
    machine.start(XCACHE_USER_QUOTA="512K")
    for _ in range(2):
        done = machine.run(ALICE, STEP, **ON | {"SIZE": "8", "LARGE": "1"})
        assert done.returncode == 0, done.stderr
    (miss,) = why(machine, ALICE)
    assert miss["cause"] == "refused: quota"
    assert "XCACHE_USER_QUOTA" in miss["advice"]
