"""What passes between the socket and the service: who asks, and the answer now or later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from xcache import protocol


class Caller:
    """One connection: what the kernel says of who is there, what they say of themselves, and what they are loading."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        self.program = ""
        # Key and digest of what was begun to be loaded.
        self.loading: dict[str, str] = {}
        # How many leases are held.
        self.leases = 0


class Reply(NamedTuple):
    """An answer, and a descriptor that goes with it."""

    message: protocol.Message
    descriptor: int | None = None


class Later:
    """An answer that comes later, with word of it before. Whoever has asked connects ``say`` and ``give``."""

    def __init__(self) -> None:
        self._said: protocol.Message | None = None
        self._say: Callable[[protocol.Message], None] | None = None
        self._give: Callable[[Reply], None] | None = None

    def connect(self, say: Callable[[protocol.Message], None], give: Callable[[Reply], None]) -> None:
        """Where the word of it and the answer go; what was said already goes there now."""
        self._say, self._give = say, give
        if self._said is not None:
            say(self._said)

    def say(self, message: protocol.Message) -> None:
        """A word before the answer."""
        self._said = message
        if self._say is not None:
            self._say(message)

    def give(self, reply: Reply) -> None:
        """The answer."""
        if self._give is not None:
            self._give(reply)


# None: a note that has no answer.
Answer = Reply | Later | Future[protocol.Message] | None
