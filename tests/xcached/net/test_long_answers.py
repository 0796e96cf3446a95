"""An answer that takes longer than a turn: others are answered in between, and it ends with its connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from support.conversation import key_of
from support.places import PATIENCE, digest, get_message

from xcache.wire import framing, protocol
from xcached.caller import Answer, Caller, Later, Reply, Work
from xcached.net.session import Session
from xcached.net.turns import Account, Turns

ALICE, BOB = 1, 2
LONG, SHORT = key_of("long"), key_of("short")
FOUND = Reply(protocol.Found(digest(b"a"), 1, 1.0, b"x"))


class Serving:
    """A thread that serves two users, with handlers of its own."""

    def __init__(self, handle: Callable[[protocol.Get], Answer]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stack = contextlib.ExitStack()
        self._service = SimpleNamespace(
            welcome=lambda: protocol.Welcome(protocol.VERSION, "test", 1, "/test"),
            handle=lambda _, message: handle(message),
        )
        self._server = SimpleNamespace(
            last_request=0.0,
            settings=SimpleNamespace(now=SimpleNamespace(max_requests=8, silence=60.0)),
            turns=Turns(self._loop),
            forget=lambda session: None,
        )
        self.sessions: dict[int, Session] = {}

    async def connect(self, uid: int) -> socket.socket:
        """Return the client's end of a connection that was greeted."""
        here, there = socket.socketpair()
        for end in (here, there):
            end.setblocking(False)
            self._stack.callback(end.close)
        caller = Caller(os.getpid(), uid)
        self.sessions[uid] = Session(here, caller, Account(uid), self._server, self._service, self._loop)
        await self.say(there, protocol.Hello(protocol.VERSION, "test", os.getpid(), "test.py"))
        await self.hear(there)
        return there

    async def say(self, there: socket.socket, *messages: protocol.Message) -> None:
        """Send messages."""
        await self._loop.sock_sendall(there, b"".join(framing.encode(n, each) for n, each in enumerate(messages, 1)))

    async def hear(self, there: socket.socket) -> protocol.Message:
        """Return the next answer."""
        reader, heard = framing.FrameReader(), list[protocol.Message]()
        while not heard:
            heard += [message for _, message in reader.feed(await self._loop.sock_recv(there, 65536))]
        return heard[0]

    def close(self) -> None:
        """Close all connections."""
        for session in self.sessions.values():
            session.close()
        self._stack.close()


def serving(handle: Callable[[protocol.Get], Answer], test: Callable[[Serving], object]) -> None:
    async def run() -> None:
        made = Serving(handle)
        try:
            await asyncio.wait_for(test(made), PATIENCE)
        finally:
            made.close()

    asyncio.run(run())


def steps(done: list[str], count: int) -> Work:
    try:
        for _ in range(count):
            time.sleep(0.002)
            done.append("step")
            yield
        done.append("end")
    finally:
        done.append("over")
    return FOUND


@pytest.mark.parametrize("when", ["at once", "later"])
def test_others_are_answered_in_between(when):
    done: list[str] = []
    promised = Later()

    def handle(message: protocol.Get) -> Answer:
        if message.key == SHORT:
            done.append("short")
            return FOUND
        return steps(done, 400) if when == "at once" else promised

    async def test(made: Serving) -> None:
        alice, bob = await made.connect(ALICE), await made.connect(BOB)
        # Another request on the same connection waits for its turn.
        await made.say(alice, get_message(LONG), *([get_message(SHORT)] if when == "at once" else []))
        await made.say(bob, get_message(SHORT))
        if when == "later":
            await made.hear(bob)
            promised.give(steps(done, 400))
            await made.say(bob, get_message(SHORT))
        assert await made.hear(bob) == FOUND.message
        assert "end" not in done
        assert await made.hear(alice) == FOUND.message
        assert done.count("step") == 400

    serving(handle, test)
    assert done[done.index("end") :] == ["end", "over", *(["short"] if when == "at once" else [])]


def test_it_ends_with_its_connection():
    done: list[str] = []

    async def test(made: Serving) -> None:
        alice = await made.connect(ALICE)
        account = made.sessions[ALICE].account
        await made.say(alice, get_message(LONG))
        while not done:
            await asyncio.sleep(0)
        assert account.in_hand
        alice.close()
        while "over" not in done:
            await asyncio.sleep(0)
        assert not account.in_hand
        assert not made.sessions[ALICE].is_working

    serving(lambda _: steps(done, 100_000), test)
    assert "end" not in done


def test_one_that_fails_is_refused_and_the_next_is_answered():
    def fails() -> Iterator[None]:
        yield
        raise OSError("no such luck")

    async def test(made: Serving) -> None:
        alice = await made.connect(ALICE)
        await made.say(alice, get_message(LONG))
        assert isinstance(await made.hear(alice), protocol.Refused)
        await made.say(alice, get_message(SHORT))
        assert await made.hear(alice) == FOUND.message

    serving(lambda message: FOUND if message.key == SHORT else fails(), test)
