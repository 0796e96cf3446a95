"""One daemon with a remote store for all users of a machine: what no user may have an administrator remove."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis
from support import parcels
from support.conversation import key_of
from support.engines import SECRET
from support.places import PATIENCE, digest, free_port, get_message, until
from support.users import ALICE, BOB, DAEMON, KEY, command, talking_as

from xcache.wire import commands, protocol
from xcache.wire.names import Names

TOOLCHAIN = digest(b"a toolchain that only other machines have")
# Everybody can read in the remote store which toolchains there are.
GONE = f"""
from support.environments import Environment
fake = Environment(Path.cwd() / "fake", "1.0")
said.append(text(talk.ask(fake.announcement()._replace(toolchain={TOOLCHAIN!r}))))
parts = {{name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}}
said.append(text(talk.put(KEY, b"x", components=parts | {{"toolchain": {TOOLCHAIN!r}}})))
fake.library.unlink()
"""
STALE = "SELECT 1 FROM toolchains WHERE stale_since IS NOT NULL"


@pytest.mark.parametrize("writers", ["", "alice"])
def test_only_who_is_trusted_says_that_a_toolchain_is_stale(machine, writers):
    tier = machine.place.root / "tier"
    put = parcels.put(key=KEY)
    put = put._replace(components=put.components | {"toolchain": TOOLCHAIN})
    object_of_others = tier / Names("").entry(KEY)
    object_of_others.parent.mkdir(parents=True)
    object_of_others.write_bytes(parcels.packed(put, namespace="", signer=None))
    for folder in (tier, *tier.rglob("*")):
        os.chown(folder, DAEMON, DAEMON)
    settings = {"XCACHE_REMOTE": f"file://{tier}?trust=tier", "XCACHE_TRUSTED_WRITERS": writers and str(ALICE)}
    machine.start(**settings)
    assert machine.talk(ALICE, GONE) == ["Done", "Stored"]
    assert until(lambda: machine.place.query(STALE))
    status, said, complaints = command(machine, 0, "remote", "gc", "--stale", "--json", **settings)
    assert (status, complaints) == (0, "")
    assert json.loads(said)["remotes"][0]["removed"] == bool(writers)
    assert object_of_others.exists() != bool(writers)


CROWD = """
import os, secrets, time
until = time.time() + 8.0
def ask():
    talk = speaker()
    talk.socket.settimeout(3.0)
    for _ in range(32):
        talk.say(get_message(secrets.token_hex(32)))
    for _ in range(32):
        talk.hear()
for _ in range(24):
    if not os.fork():
        # Each has patience of its own.
        while time.time() < until:
            if not os.fork():
                try:
                    ask()
                finally:
                    os._exit(0)
            os.wait()
        os._exit(0)
for _ in range(24):
    os.wait()
"""


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    try:
        while content := await reader.read(65536):
            await asyncio.sleep(seconds)
            writer.write(content)
    finally:
        writer.close()


Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def serving(connect: Connected) -> Iterator[int]:
    """Have a server on a thread of its own; give its port."""
    found, listening, ends = free_port(), threading.Event(), list[Callable[[], object]]()

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ends.append(lambda: loop.call_soon_threadsafe(over.set))
        server = await asyncio.start_server(connect, "127.0.0.1", found)
        listening.set()
        await over.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert listening.wait(PATIENCE)
        yield found
    finally:
        ends[0]()
        thread.join()


@contextlib.contextmanager
def far_away(port: int) -> Iterator[int]:
    """Give a port at which another one is 100 ms away."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, there[1], 0.1), pass_on(there[0], writer, 0.0), return_exceptions=True)

    with serving(connect) as found:
        yield found


# Two dozen processes that do nothing but ask are much beside other tests.
@pytest.mark.thorough
def test_no_user_keeps_the_remote_store_from_others(machine, redis_engine):
    """Alice asks for far more than can be asked there at once, and Bob for one entry after the other."""
    keys = [digest(b"%d" % number) for number in range(3)]
    with contextlib.closing(redis.Redis(port=redis_engine.port, password=SECRET)) as client:
        for key in keys:
            entry = parcels.packed(parcels.put(key=key), namespace="", signer=None)
            client.set(f"far:{Names('').entry(key)}", entry)
    with far_away(redis_engine.port) as port:
        address = redis_engine.at("far", port).url
        machine.start(XCACHE_REMOTE=f"{address}&trust=tier&readonly=1")
        crowd = threading.Thread(target=machine.talk, args=(ALICE, CROWD))
        crowd.start()
        time.sleep(3.0)
        found = [machine.talk(BOB, f"said.append(talk.get({key!r}) is not None)") for key in keys]
        crowd.join()
    assert found == [[True]] * 3


# Alice has compiled them in no time, so that nobody waits long for one of them.
TINY = """
for n in range(4):
    talk.put(key_of(f"tiny {n}"), b"x", b"p%d" % n, compile_seconds=0.001)
talk.ask(commands.Clear())
"""


def test_what_one_users_programs_are_worth_closes_the_store_for_nobody(machine, redis_engine):
    """Alice asks for what is not worth the way to the store, and Bob for what is there, in turns."""
    keys = [digest(b"%d" % number) for number in range(4)]
    with contextlib.closing(redis.Redis(port=redis_engine.port, password=SECRET)) as client:
        for key in keys:
            entry = parcels.packed(parcels.put(key=key), namespace="", signer=None)
            client.set(f"worth:{Names('').entry(key)}", entry)
    with far_away(redis_engine.port) as port, contextlib.ExitStack() as stack:
        address = redis_engine.at("worth", port).url
        machine.start(XCACHE_REMOTE=f"{address}&trust=tier&readonly=1", XCACHE_REMOTE_TIMEOUT="30s")
        machine.talk(ALICE, TINY)
        alice, bob = (stack.enter_context(talking_as(machine, uid)) for uid in (ALICE, BOB))
        for number, key in enumerate(keys):
            assert isinstance(alice.ask(get_message(key_of(f"tiny {number}"))), protocol.Missing)
            assert isinstance(bob.ask(get_message(key)), protocol.Found), number


@pytest.mark.parametrize("kind", [commands.AskPresence, commands.Fetch])
def test_what_a_user_asks_of_the_store_before_a_run_ends_with_the_connection(machine, kind):
    """Alice asks for eight hundred entries on each of many connections and leaves, and Bob then asks for one."""
    asked: list[str] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                asked.append(head.decode().split()[1])
                await asyncio.sleep(0.05)
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    with serving(connect) as port:
        machine.start(XCACHE_REMOTE=f"http://127.0.0.1:{port}?trust=tier&readonly=1")
        with contextlib.ExitStack() as stack:
            for speaker in range(40):
                alice = stack.enter_context(talking_as(machine, ALICE))
                for request in range(8):
                    names = [b"%d %d %d" % (speaker, request, number) for number in range(commands.MAX_KEYS)]
                    alice.say(kind([*map(digest, names)], 600.0))
            assert until(lambda: len(asked) > 20)
        with talking_as(machine, BOB) as bob:
            for number in range(10):
                (found,) = bob.ask(kind([key_of(f"bob {number}")], PATIENCE)).entries
                assert found[0] == "missing"

        def is_over() -> bool:
            seen = len(asked)
            time.sleep(1.0)
            return len(asked) == seen

        assert until(is_over)
