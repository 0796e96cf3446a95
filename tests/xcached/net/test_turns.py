"""The thread that serves: users in turn, and none with more in hand than a bound."""

from __future__ import annotations

import contextlib
import os
import select
import sqlite3
import time
from collections.abc import Callable

import pytest
from support.conversation import Conversation, key_of, talking
from support.places import put_message

from xcache.wire import framing, protocol
from xcached.net.turns import MOST_IN_HAND_BYTES, Account, Turns

ALICE, BOB = 1, 2


class Loop:
    """A minimal event loop: a list of calls to make next."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        """Add a call."""
        self.calls.append(call)

    def run(self) -> None:
        """Make the calls until none is left."""
        while self.calls:
            self.calls.pop(0)()


class Speaker:
    """A connection with so many requests; ``answered`` gets one item for each."""

    def __init__(self, account: Account, answered: list[Speaker], requests: int) -> None:
        self.account = account
        self.answered = answered
        self.requests = requests
        self.dropped = False
        self.then: Callable[[], None] = lambda: None

    def serve(self, until: float) -> bool:
        """Answer one request."""
        self.requests -= 1
        self.answered.append(self)
        self.then()
        return self.requests > 0

    def update_reading(self) -> None:
        """Do nothing: there is nothing to read."""

    def drop(self) -> None:
        """Remember that the connection was dropped."""
        self.dropped = True


@pytest.fixture
def turns():
    """Turns on a loop that the test runs."""
    loop = Loop()
    made = Turns(loop)
    made.loop = loop
    return made


def test_between_a_question_and_its_answer_a_flood_gets_one_answer_more(turns):
    answered: list[Speaker] = []
    bob, alice = Account(BOB), Speaker(Account(ALICE), answered, 1)
    flood = [Speaker(bob, answered, 50) for _ in range(100)]

    def alice_asks() -> None:
        if len(answered) == 1000:
            turns.serve_or_queue(alice)

    for speaker in flood:
        speaker.then = alice_asks
        turns.serve_or_queue(speaker)
    turns.loop.run()
    assert len(answered) == 5001
    assert answered.index(alice) - 1000 <= 1
    # And the flood's own connections took turns.
    assert len({id(speaker) for speaker in answered[-100:]}) > 50


def test_an_error_in_one_connection_ends_that_one_only(turns):
    answered: list[Speaker] = []
    bad, good = Speaker(Account(BOB), answered, 5), Speaker(Account(ALICE), answered, 5)

    def fail() -> None:
        raise RuntimeError("a defect")

    bad.then = fail
    turns.serve_or_queue(bad)
    turns.serve_or_queue(good)
    turns.loop.run()
    assert (bad.dropped, good.dropped, good.requests) == (True, False, 0)


@pytest.fixture
def locked_store(place):
    """A daemon whose writer waits, because another process has locked the database."""
    place.start_daemon()
    with talking(place) as talk:
        talk.put(key_of("here"), b"here")
    with contextlib.closing(sqlite3.connect(place.dir / "store.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield place
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")


def test_one_users_unwritten_bytes_are_bounded_and_all_puts_are_answered(locked_store):
    """Thirty programs store 64 entries each at once, while nothing can be written: 120 MB are offered."""
    frames = [
        framing.encode(2 + n, put_message(key_of(f"{n}"), os.urandom(30_000), os.urandom(30_000))) for n in range(64)
    ]
    talks = [Conversation(locked_store) for _ in range(30)]
    try:
        for talk in talks:
            talk.greet()
            talk.socket.setblocking(False)
        left = {talk: memoryview(b"".join(frames)) for talk in talks}
        taken = 0
        # Until nothing more is taken.
        while ready := select.select([], list(left_sockets(left)), [], 0.5)[1]:
            for talk in talks:
                if talk.socket in ready and left[talk]:
                    with contextlib.suppress(BlockingIOError):
                        sent = talk.socket.send(left[talk])
                        taken += sent
                        left[talk] = left[talk][sent:]
        in_sockets = 30 * 512 * 1024
        assert taken < MOST_IN_HAND_BYTES + in_sockets, f"{taken / 1e6:.0f} MB"
    finally:
        for talk in talks:
            talk.close()


def left_sockets(left: dict[Conversation, memoryview]) -> list[object]:
    return [talk.socket for talk, data in left.items() if data]


def test_large_messages_of_one_user_are_read_a_few_at_a_time_and_all_answered(place):
    """Each of them, half sent, reserves room; those beyond wait until there is some, and none is given up."""
    place.start_daemon()
    items = [
        {"key": key_of(f"{n}"), "options": "o", "devices": "x" * 250, "platform": "cpu", "seconds": 0.1}
        for n in range(1500)
    ]
    talks = [Conversation(place) for _ in range(40)]
    try:
        for talk in talks:
            talk.greet()
        frames = [
            framing.encode(2, protocol.Remember(f"program {n}", "", items, {"o": b"o"})) for n, _ in enumerate(talks)
        ]
        assert len(frames[0]) > 500_000
        for talk in talks:
            talk.socket.setblocking(False)
        rest = {}
        for talk, frame in zip(talks, frames, strict=True):
            sent = talk.socket.send(frame[:-1])
            rest[talk] = memoryview(frame)[sent:]
        deadline = time.monotonic() + 60
        while any(rest.values()):
            assert time.monotonic() < deadline
            waiting = [talk.socket for talk, data in rest.items() if data]
            for talk in talks:
                if talk.socket in select.select([], waiting, [], 1)[1]:
                    with contextlib.suppress(BlockingIOError):
                        rest[talk] = rest[talk][talk.socket.send(rest[talk]) :]
        for talk in talks:
            talk.socket.setblocking(True)
            assert talk.answer(2) == protocol.Done()
    finally:
        for talk in talks:
            talk.close()


def test_a_user_who_hangs_up_does_not_thereby_have_more_in_hand(locked_store):
    """A put counts against its user until it is written, whether anybody waits for the answer or not."""
    frames = [
        framing.encode(2 + n, put_message(key_of(f"{n}"), os.urandom(30_000), os.urandom(30_000))) for n in range(64)
    ]
    taken = 0
    for _ in range(20):
        with talking(locked_store) as talk:
            talk.socket.setblocking(False)
            data = memoryview(b"".join(frames))
            while data and select.select([], [talk.socket], [], 0.05)[1]:
                sent = talk.socket.send(data)
                taken += sent
                data = data[sent:]
    assert taken < MOST_IN_HAND_BYTES + 20 * 512 * 1024, f"{taken / 1e6:.0f} MB"


def test_programs_find_what_is_stored_while_their_users_puts_wait(locked_store):
    big = put_message(key_of("x"), os.urandom(30_000), os.urandom(30_000))
    with contextlib.ExitStack() as stack:
        asking = stack.enter_context(talking(locked_store))
        for _ in range(3):
            storing = stack.enter_context(talking(locked_store))
            storing.socket.setblocking(False)
            data = memoryview(b"".join(framing.encode(n, big) for n in range(2, 66)))
            while data and select.select([], [storing.socket], [], 0.2)[1]:
                data = data[storing.socket.send(data) :]
        # After ten seconds the writer gives up, and refuses the puts.
        asking.socket.settimeout(5)
        assert asking.get(key_of("here")) == b"here"
        assert asking.get(key_of("x")) is None
        assert asking.ask(protocol.AskAlias(key_of("x"))) == protocol.NoAlias()
        assert asking.status()["entries"] == 1
