"""Two users and root share a daemon; one of them floods it. The other's answers, entries and share stay theirs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.conversation import Conversation, key_of
from support.environments import Environment
from support.hostile import Hostile
from support.places import TESTS, Place, digest, get_message, put_message
from support.users import ALICE, BOB, Machine, become

from xcache.wire import framing, protocol

KINDS = list(Hostile(Place(Path("/")), "", []).floods)
# The bars of the long form: they hold on a machine with little else to do.
MEDIAN, LONGEST = 0.25, 2.0
# The daemon's own 50 MB; for each user 8 MB in hand (taken apart, up to ten times as much), 32 MB of answers that
# nobody reads, 256 connections with 128 KB, 10,000 leases, 4 MB of toolchains; and SQLite's pages.
MOST_MEMORY = 400e6
QUOTA = 60_000_000
# Rounds in which the order of answers is judged, at most.
ROUNDS = 8
# The floods of the short form; the last is a mixture.
SHORT = (
    "gets on every connection",
    "descriptors that nobody takes",
    "small puts",
    "connections that say something",
    "anything",
)


class Neighbour:
    """An honest user: one connection that stays, others that come and go, and entries to be found."""

    def __init__(self, place: Place, uid: int, root: Path) -> None:
        self.place, self.uid = place, uid
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.entries: dict[str, bytes] = {}
        self.environment = Environment(root / f"venv-{uid}", "1.0")
        # Toolchains that others announce count, too: a digest does not say which user has it where.
        self._components = {name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}
        self._choose = random.Random(uid)
        self._asked = 0
        self._talk = self._connected()

    def prepare(self) -> None:
        """Store something, small and large."""
        for number in range(40):
            self.put(f"{self.uid} {number}", 200_000 if number % 8 == 0 else 2000)

    def put(self, name: str, size: int) -> None:
        """Store something of this user's."""
        content = random.Random(name).randbytes(size)
        answer = self._talk.put(key_of(name), content, b"program", components=self._components)
        if answer == protocol.Stored(True):
            self.entries[key_of(name)] = content
        else:
            self.wrong.append(f"a put was answered with {answer}")

    def ask(self) -> None:
        """Ask one question, note how long the answer takes, and whether it is right."""
        self._asked += 1
        number, began = self._asked, time.monotonic()
        try:
            self._ask(number)
        except (OSError, AssertionError) as error:
            self.wrong.append(f"question {number}: {error!r}")
        self.seconds.append(time.monotonic() - began)

    def _ask(self, number: int) -> None:
        match number % 6:
            case 0:
                key, content = self._choose.choice(list(self.entries.items()))
                if self._talk.get(key) != content:
                    self.wrong.append(f"{key[:12]} is not found")
            case 1:
                if self._talk.get(key_of(f"{self.uid} nothing {number}")) is not None:
                    self.wrong.append("something is found that nobody stored")
            case 2:
                self.put(f"{self.uid} new {number}", 3000)
            case 3:
                self.put(f"{self.uid} large {number}", 100_000)
            case 4:
                with contextlib.closing(self._connected()) as talk:
                    talk.status()
            case 5:
                answer = self._talk.ask(self.environment.announcement())
                if answer != protocol.Done():
                    self.wrong.append(f"a toolchain was answered with {answer}")

    def check(self) -> None:
        """Everything that was acknowledged is there."""
        missing = [key for key, content in self.entries.items() if self._talk.get(key) != content]
        if missing:
            self.wrong.append(f"{len(missing)} of {len(self.entries)} entries are gone")
            self.entries = {key: content for key, content in self.entries.items() if key not in missing}

    def close(self) -> None:
        """Hang up."""
        self._talk.close()

    def _connected(self) -> Conversation:
        return connected(self.place, self.uid)


def connected(place: Place, uid: int) -> Conversation:
    """Connect as a user."""
    # The kernel reports who connected by the effective uid at that moment.
    os.seteuid(uid)
    try:
        talk = tried(place)
    finally:
        os.seteuid(0)
    talk.greet()
    return talk


def tried(place: Place) -> Conversation:
    """A connection, also where the queue is full for a moment: a client tries as long."""
    until = time.monotonic() + 1.0
    while True:
        try:
            return Conversation(place)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.002)


@contextlib.contextmanager
def flood(machine: Machine, kind: str, seed: int, victims: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Bob floods for as long as the block lasts, and has begun when it is entered."""
    home = machine.place.root / f"home-{BOB}"
    home.mkdir(exist_ok=True)
    os.chown(home, BOB, BOB)
    child = subprocess.Popen(
        [
            *become(BOB),
            sys.executable,
            str(TESTS / "support" / "hostile.py"),
            str(machine.place.root),
            kind,
            str(seed),
            *victims,
        ],
        env=machine.place.with_support,
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        try:
            # Each of its threads has been round once.
            assert child.stdout.read(4) == b"...."
            os.set_blocking(child.stdout.fileno(), False)
            yield child
        finally:
            child.kill()


def daemon_pid(machine: Machine) -> int:
    """The daemon's process."""
    return machine.place.daemon_pid()


def peak_memory(pid: int) -> float:
    """The most that a process ever had in memory, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def connections(machine) -> Iterator[list[tuple[int, Conversation]]]:
    """Sixty connections of Bob's and twenty of Alice's, in any order, with the daemon of a machine."""
    machine.start()
    users = [BOB] * 60 + [ALICE] * 20
    random.Random(1).shuffle(users)
    with contextlib.ExitStack() as stack:
        made = [(uid, connected(machine.place, uid)) for uid in users]
        for _, talk in made:
            stack.callback(talk.close)
        yield made


def best_of_rounds(share: Callable[[int], float]) -> float:
    """The smallest share of several rounds.

    The daemon charges its users by the clock: a moment in which other programs have the processor counts as work of
    the user who is served then, and spoils the order of that round. One queue for all spoils that of every round.
    """
    shares = []
    for number in range(ROUNDS):
        shares.append(share(number))
        if shares[-1] < 1 / 2:
            break
    return min(shares)


def test_questions_are_answered_before_most_that_a_neighbour_asked_at_the_same_time(machine, connections):
    """The numbers of leases are the order in which the daemon answered."""
    pid = daemon_pid(machine)

    def answered_earlier(number: int) -> float:
        asked = {BOB: range(8 * number + 2, 8 * number + 10), ALICE: range(8 * number + 2, 8 * number + 3)}
        os.kill(pid, signal.SIGSTOP)
        try:
            for place, (uid, talk) in enumerate(connections):
                questions = [(n, get_message(key_of(f"{place} {n}"), 600.0)) for n in asked[uid]]
                talk.raw(b"".join(framing.encode(*question) for question in questions))
        finally:
            os.kill(pid, signal.SIGCONT)
        leases: dict[int, list[int]] = {BOB: [], ALICE: []}
        for uid, talk in connections:
            leases[uid] += [answer.lease for answer in talk.answers(asked[uid]).values()]
        assert all(leases[BOB] + leases[ALICE])
        return sum(lease < max(leases[ALICE]) for lease in leases[BOB]) / len(leases[BOB])

    assert best_of_rounds(answered_earlier) < 1 / 2


def test_an_entry_is_written_before_most_that_a_neighbour_sent_earlier(machine, connections):
    """All wait for the writer thread, which waits for another process's lock on the database."""
    # Bob's come first.
    in_order = sorted(connections, key=lambda connection: connection[0], reverse=True)

    def written_earlier(number: int) -> float:
        sent = {BOB: range(11 * number + 2, 11 * number + 12), ALICE: range(11 * number + 2, 11 * number + 3)}
        status = 11 * number + 12
        before = machine.place.query("SELECT coalesce(max(used_order), 0) FROM entries")[0][0]
        with contextlib.closing(sqlite3.connect(machine.place.dir / "store.db", isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")
            for place, (uid, talk) in enumerate(in_order):
                puts = [(n, put_message(key_of(f"{place} {n}"), b"executable", b"program")) for n in sent[uid]]
                # A status is answered at once; then all before it is in the writer thread's queue.
                talk.raw(b"".join(framing.encode(*put) for put in [*puts, (status, protocol.AskStatus())]))
                assert isinstance(talk.answer(status), protocol.Status)
            database.execute("ROLLBACK")
        for uid, talk in in_order:
            assert set(talk.answers(sent[uid]).values()) == {protocol.Stored(True)}
        query = "SELECT writer_uid FROM entries WHERE used_order > ? ORDER BY used_order"
        written = [uid for (uid,) in machine.place.query(query, before)]
        last = max(place for place, uid in enumerate(written) if uid == ALICE)
        return written[:last].count(BOB) / written.count(BOB)

    assert best_of_rounds(written_earlier) < 1 / 2


@pytest.mark.thorough
@pytest.mark.slow
def test_neighbours(machine, campaign):
    """Rounds of floods; between them everything that was acknowledged is looked for."""
    machine.start(XCACHE_MAX_SIZE="200000000", XCACHE_USER_QUOTA=str(QUOTA))
    pid = daemon_pid(machine)
    rounds = min(campaign.rounds(len(SHORT)), 20 * len(KINDS))
    kinds = SHORT if rounds <= len(SHORT) else [KINDS[number % len(KINDS)] for number in range(rounds)]
    is_long = campaign.is_long
    users = [Neighbour(machine.place, uid, machine.place.root) for uid in (ALICE, 0)]
    everything: dict[str, list[float]] = {}
    try:
        for user in users:
            user.prepare()
        victims = list(users[0].entries)[:20]
        for number, kind in enumerate(kinds[:rounds]):
            with flood(machine, kind, campaign.seed + number, victims) as child:
                for question in range(120 if is_long else 24):
                    users[question % 2].ask()
                    campaign.counts["requests answered"] += 1
                # A daemon that had thrown it out would be no neighbour either.
                assert child.poll() is None
            campaign.fault()
            for user in users:
                user.check()
                campaign.checked(len(user.entries))
                for what in user.wrong:
                    campaign.problem("losses" if "entries" in what else "other problems", f"{kind}: {user.uid}: {what}")
                user.wrong.clear()
                seconds, user.seconds = user.seconds, []
                everything.setdefault(kind, []).extend(seconds)
                if is_long and (statistics.median(seconds) > MEDIAN or max(seconds) > LONGEST):
                    slow = f"median {statistics.median(seconds):.3f} s, longest {max(seconds):.3f} s"
                    campaign.problem("other problems", f"{kind}: {user.uid}: {slow}")
            if peak_memory(pid) > MOST_MEMORY:
                campaign.problem("other problems", f"{kind}: the daemon took {peak_memory(pid) / 1e6:.0f} MB")
        ((theirs,),) = machine.place.query("SELECT coalesce(sum(footprint), 0) FROM entries WHERE writer_uid = ?", BOB)
        if theirs > QUOTA:
            campaign.problem("other problems", f"the flood's user has {theirs} bytes of {QUOTA}")
        assert daemon_pid(machine) == pid, "the daemon is another one"
        log = (machine.place.dir / "daemon.log").read_text()
        if "Traceback" in log:
            campaign.problem("other problems", log[log.index("Traceback") :][:2000])
    finally:
        for user in users:
            user.close()
    for kind, seconds in everything.items():
        longest, median = max(seconds), statistics.median(seconds)
        campaign.note(f"{kind}: {len(seconds)} answers, median {median * 1000:.1f} ms, longest {longest * 1000:.0f} ms")
    campaign.note(f"the daemon's peak: {peak_memory(pid) / 1e6:.0f} MB")
    campaign.judge()
