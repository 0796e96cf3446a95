"""A real program that one host has compiled is compiled on no other host that shares its tier."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time

import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.engines import Engine, Where
from support.engines import folder_engine as folder_engine
from support.engines import redis_engine as redis_engine
from support.engines import s3_engine as s3_engine
from support.marks import thorough
from support.places import PATIENCE, Place, digest, until
from support.program_files import program_path
from support.sharing import host, remote_of, train

from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.wire import protocol

pytestmark = pytest.mark.once

ON = {"XCACHE": "1", "JAX_PLATFORMS": "cpu"}
_NUMBERS = itertools.count()


@pytest.fixture(scope="session", params=thorough(["folder", "redis", "s3"], usual=["folder"]))
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


def on(tier: Where, **settings: str) -> contextlib.AbstractContextManager[Place]:
    """Return a host that shares by this tier."""
    # On a busy machine everything takes long.
    return host(tier.url, **({"XCACHE_REMOTE_TIMEOUT": f"{PATIENCE}s"} | tier.environment | settings))


def has_uploaded(place: Place) -> bool:
    """Wait until nothing is to be uploaded; return whether it came to that."""
    return until(lambda: not place.query("SELECT 1 FROM uploads"), 3 * PATIENCE)


def at(engine: Engine) -> Where:
    return engine.at(f"fleet{next(_NUMBERS)}")


def test_what_one_host_compiled_the_next_one_loads(engine):
    tier = at(engine)
    with on(tier) as here:
        first = train(here)
        assert first["hits"] == 0
        assert has_uploaded(here)
    with on(tier) as there:
        second = train(there)
        assert second["computed"] == first["computed"]
        assert (second["misses"], second["hits"]) == (0, first["misses"])
        # All came in one object; and it says which programs need not be lowered.
        assert (remote_of(there)["gets"], remote_of(there)["puts"]) == (1, 0)
        counted = json.loads(Shell(there).run("stats", "--json").stdout)
        assert counted["lowerings"]["skipped"] > 0


@pytest.mark.thorough
def test_a_program_with_another_name_finds_the_same_entries(folder_engine):
    tier = at(folder_engine)
    with on(tier) as here:
        first = train(here)
        assert has_uploaded(here)
    with on(tier) as there:
        source = program_path("train_a_little").read_text()
        done = there.run(source, **ON)
        assert done.returncode == 0, done.stderr
        # This host had none; what the tier was asked for also counts the lists of what programs wanted.
        said = json.loads(done.stdout)
        assert (said["misses"], said["hits"]) == (0, first["misses"])


@pytest.mark.slow
@pytest.mark.thorough
def test_programs_go_along_only_if_the_tier_is_given_them(folder_engine):
    without, with_programs = at(folder_engine), at(folder_engine)
    with_programs = with_programs._replace(url=f"{with_programs.url}?programs=1")
    for tier in (without, with_programs):
        with on(tier) as here:
            train(here)
            assert has_uploaded(here)
    with on(with_programs) as there:
        train(there)
        shell = Shell(there)
        assert "func.func public @main" in shell.say("show", "train_step", "--program")
        assert "func.func public @main" in shell.say("hlo", "train_step")
    with on(without) as there:
        train(there)
        shell = Shell(there)
        assert "stayed on the machine that lowered it" in shell.say("show", "train_step")
        for command in (
            ("show", "train_step", "--program"),
            ("hlo", "train_step"),
            ("hlo", "train_step", "--stage", "asm"),
            ("graph", "train_step", "--stage", "hlo", "-o", "-"),
        ):
            done = shell.run(*command)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
            assert "stayed on the machine that lowered it" in done.stderr
        # The executable is here, and these need no more.
        assert "HloModule" in shell.say("hlo", "train_step", "--stage", "optimized")
        assert "flops" in shell.say("cost", "train_step")
        # What is compiled here is compared with what has no program.
        source = program_path("train_a_little").read_text().replace("0.1 * g", "0.2 * g")
        assert there.run(source, **ON).returncode == 0
        assert "stayed on the machine that lowered it" in shell.say("why", "train_step")


def test_a_tier_that_is_silent_makes_no_slow_daemon():
    """The client would ask it nothing more for a while, not even what the store of its own machine has."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        tier = Where(f"redis://127.0.0.1:{server.getsockname()[1]}", {})
        with on(tier, XCACHE_REMOTE_TIMEOUT="2s") as here, talking(here) as talk:
            assert talk.put(key_of("here"), b"content") == protocol.Stored(True)
            client = Client(here.config(), "test", Launcher(here.config()))
            with contextlib.closing(client):
                began = time.monotonic()
                found, _ = client.predict(protocol.Predict("train.py", digest(b"arguments")))
                assert not found.items
                # It did wait, for longer than a daemon may take that asks nobody.
                assert time.monotonic() - began > 1.5
                client.fetch(key_of("here"))
