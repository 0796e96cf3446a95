"""Clients that wait until the remote stores have been asked. Belongs to the serving thread."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from xcache.wire import ledger, protocol
from xcached.caller import Answer, Caller, Later, Process, Reply, Work
from xcached.requests.patience import Patience

if TYPE_CHECKING:
    from xcached.tiers.tiers import Tiers

logger = logging.getLogger("xcached")

# Seconds between heartbeats to waiting clients, which give the daemon up after a second of silence.
_HEARTBEAT_SECONDS = 0.25
# Clients are told that this is what they wait for.
_NAMED = "remote stores"
# Questions of one user that are asked at once where several users share a daemon: the engines have few connections, and
# a store that answers one user late is left alone for all. Others wait here, and in the end are not asked at all.
_MOST_OF_A_USER = 8
# A question that had to wait for so much of its time is of no use any more.
_WORTH_ASKING = 0.5
# Waits of one user: each costs a heartbeat.
_MOST_WAITING = 1000
_TOO_MANY = ledger.with_detail("remote trouble", "too many programs of this user wait for remote stores")
_NO_ANSWER = ledger.with_detail("remote trouble", "no answer came in time")
_TOO_SLOW = ledger.with_detail("remote trouble", "the program has waited for remote stores in vain for too long")


# Asks the tiers within so many seconds, and calls the function when nothing of that goes on.
_Begin = Callable[[float, Callable[[], None]], Future[str]]


class _Waiter:
    """A client that waits, and what to answer it afterwards."""

    def __init__(self, caller: Caller, then: Callable[[str], Answer], *, is_told: bool) -> None:
        self.caller = caller
        self.then = then
        # It understands heartbeats: it waits for other programs' compiles, too.
        self.is_told = is_told
        self.since = time.monotonic()
        self.answer = Later()


class _Question:
    """A question to the tiers, and the clients that wait for its answer."""

    def __init__(self, uid: int, seconds: float, begin: _Begin) -> None:
        self.uid = uid
        self.since = time.monotonic()
        self.seconds = seconds
        self.until = self.since + seconds
        self.begin = begin
        self.waiters: list[_Waiter] = []


class Fetches:
    """Has each entry looked for once, however many clients want it."""

    def __init__(
        self,
        tiers: Tiers,
        expected: Callable[[Caller, protocol.Get], float | None],
        longest: Callable[[], float],
        patience: Patience,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        *,
        shared: bool = False,
    ) -> None:
        """``expected`` returns compile times, ``longest`` the setting. ``shared`` says that users share the daemon.

        ``call_soon`` has a function called on the serving thread, from any other.
        """
        self._tiers = tiers
        self._expected = expected
        self._longest = longest
        self._patience = patience
        self._call_soon = call_soon
        self._call_later = call_later
        self._questions: dict[str, _Question] = {}
        # By process: the question that its prediction waits for, which will probably bring most of its programs.
        self._histories: dict[Process, str] = {}
        # The waits of each connection, and their number for each user.
        self._of_caller: dict[Caller, list[_Question]] = {}
        self._wait_counts: Counter[int] = Counter()
        self._ticking = self._closed = False
        self._shared = shared
        # By user: how many questions the tiers were asked, and those that wait for that.
        self._asked: Counter[int] = Counter()
        self._queued: dict[int, deque[tuple[str, _Question]]] = {}

    def fetch(
        self, caller: Caller, wanted: protocol.Get, again: Callable[[], Answer], then: Callable[[str], Answer]
    ) -> Later | str:
        """Ask the tiers for an entry, and have ``then`` answer afterwards; or return why asking them is of no use.

        ``then`` gets a cause of the miss as ``Tiers.fetch`` has it, and so is what is returned.
        While what the process will want is being asked for, the entry may come with that, and ``again`` handles the
        request once more when that is here.
        """
        if self._wait_counts[caller.uid] >= _MOST_WAITING:
            return _TOO_MANY
        about = self._histories.get(caller.process)
        if about is not None:
            return self._wait(self._questions[about], caller, lambda _: again(), is_told=wanted.wait > 0)
        if not self._tiers.may_have_some or self._closed:
            return self._tiers.trouble
        if not self._patience.is_left(caller.process):
            return _TOO_SLOW
        expected = self._expected(caller, wanted)
        seconds = self._longest() if expected is None else min(expected, self._longest())

        def begin(left: float, ended: Callable[[], None]) -> Future[str]:
            return self._tiers.fetch(wanted.key, wanted.unusable, left, ended)

        question = self._question(caller, self._about(caller, wanted.key), seconds, begin)
        return self._wait(question, caller, then, is_told=wanted.wait > 0)

    def fetch_history(self, caller: Caller, wanted: protocol.Predict, then: Callable[[], Answer]) -> Later | None:
        """Ask the tiers what a program wanted on other machines; None if asking them is of no use."""
        if not self._tiers.may_have_some or self._closed or self._wait_counts[caller.uid] >= _MOST_WAITING:
            return None
        about = self._about(caller, f"{wanted.program}\0{wanted.arguments}")

        def begin(left: float, ended: Callable[[], None]) -> Future[str]:
            return self._tiers.fetch_history(wanted.program, wanted.arguments, left, ended)

        question = self._question(caller, about, self._longest(), begin)
        self._histories[caller.process] = about
        return self._wait(question, caller, lambda _: then(), is_told=False)

    def leave(self, caller: Caller) -> None:
        """Forget what a connection that has ended waited for."""
        for question in self._of_caller.pop(caller, ()):
            left = [waiter for waiter in question.waiters if waiter.caller is not caller]
            self._count_waits(caller.uid, len(left) - len(question.waiters))
            question.waiters = left

    def close(self) -> None:
        """Answer all as if nothing had been found, and ask no more, because the daemon is leaving."""
        self._closed = True
        for about, question in list(self._questions.items()):
            self._answer(about, question)

    def _about(self, caller: Caller, wanted: str) -> str:
        """Return the name of a question: one user's, which may have to wait, is not another's."""
        return f"{caller.uid}\0{wanted}" if self._shared else wanted

    def _question(self, caller: Caller, about: str, seconds: float, begin: _Begin) -> _Question:
        question = self._questions.get(about)
        if question is None:
            question = self._questions[about] = _Question(caller.uid, seconds, begin)
            # The tiers keep to the time, too; but their thread may be busy.
            self._call_later(seconds, lambda: self._answer(about, question, _NO_ANSWER))
            if self._shared and self._asked[question.uid] >= _MOST_OF_A_USER:
                self._queued.setdefault(question.uid, deque()).append((about, question))
            else:
                self._begin(about, question)
        return question

    def _begin(self, about: str, question: _Question) -> None:
        self._asked[question.uid] += 1

        def done(answer: Future[str]) -> None:
            self._answer(about, question, _cause(answer))

        def ended() -> None:
            # Not before: a tier that is late for the program is still busy with the question.
            self._call_soon(lambda: self._end(question.uid))

        left = max(0.0, question.until - time.monotonic())
        question.begin(left, ended).add_done_callback(lambda answer: self._call_soon(lambda: done(answer)))

    def _end(self, uid: int) -> None:
        """Note that the tiers are done with a question of a user, and ask the next."""
        self._asked[uid] -= 1
        queued = self._queued.get(uid, deque())
        while queued and self._asked[uid] < _MOST_OF_A_USER:
            about, question = queued.popleft()
            left = question.until - time.monotonic()
            if question.waiters and left > _WORTH_ASKING * question.seconds:
                self._begin(about, question)
        if not queued:
            self._queued.pop(uid, None)
        if not self._asked[uid]:
            del self._asked[uid]

    def _wait(self, question: _Question, caller: Caller, then: Callable[[str], Answer], *, is_told: bool) -> Later:
        waiter = _Waiter(caller, then, is_told=is_told)
        question.waiters.append(waiter)
        self._of_caller.setdefault(caller, []).append(question)
        self._count_waits(caller.uid, 1)
        if not self._ticking:
            self._ticking = True
            self._call_later(_HEARTBEAT_SECONDS, self._tick)
        return waiter.answer

    def _answer(self, about: str, question: _Question, cause: str = "") -> None:
        if self._questions.get(about) is not question:
            return
        del self._questions[about]
        for process in [process for process, awaited in self._histories.items() if awaited == about]:
            del self._histories[process]
        for waiter in question.waiters:
            self._count_waits(waiter.caller.uid, -1)
            theirs = self._of_caller[waiter.caller]
            theirs.remove(question)
            if not theirs:
                del self._of_caller[waiter.caller]
        # Afterwards: an answer may reveal that a client has gone.
        for waiter in question.waiters:
            waiter.answer.give(self._answered(waiter, cause))

    def _count_waits(self, uid: int, more: int) -> None:
        self._wait_counts[uid] += more
        if not self._wait_counts[uid]:
            del self._wait_counts[uid]

    def _answered(self, waiter: _Waiter, cause: str) -> Work:
        """Answer a client in its user's turn: many may have waited."""
        answer = waiter.then(cause)
        if isinstance(answer, Generator):
            answer = yield from answer
        has_come = isinstance(answer, Reply) and _has_brought(answer.message)
        self._patience.note(waiter.caller.process, time.monotonic() - waiter.since, in_vain=not has_come)
        return answer

    def _tick(self) -> None:
        now = time.monotonic()
        for question in list(self._questions.values()):
            told = protocol.Wait(os.getpid(), _NAMED, now - question.since, max(0.0, question.until - now))
            for waiter in list(question.waiters):
                if waiter.is_told:
                    waiter.answer.say(told)
        self._ticking = bool(self._questions)
        if self._ticking:
            self._call_later(_HEARTBEAT_SECONDS, self._tick)


def _cause(done: Future[str]) -> str:
    if done.cancelled():
        return ""
    if error := done.exception():
        logger.error("the remote stores could not be asked", exc_info=error)
        return ""
    return done.result()


def _has_brought(message: protocol.Message) -> bool:
    return isinstance(message, protocol.Found) or (isinstance(message, protocol.Prediction) and bool(message.items))
