"""The announcement of a program's toolchain: which files it consists of."""

from __future__ import annotations

import asyncio

from xcache.wire import protocol
from xcache.wire.hashing import is_digest
from xcached.caller import Answer, Caller, Handlers, Later, Reply
from xcached.toolchains.toolchains import Toolchains

# Seconds to wait for a check of files on a slow file system: after an announcement, and longer when the check decides
# which entries are served.
_CHECK_SECONDS, _DECISIVE_CHECK_SECONDS = 0.2, 2.0


class Announcements:
    """Answers once the toolchain's files have been looked at, if that decides what is served."""

    def __init__(self, toolchains: Toolchains) -> None:
        self._toolchains = toolchains
        self._loop = asyncio.get_running_loop()
        self.handlers: Handlers = {protocol.Announce: self._announce}

    def _announce(self, caller: Caller, message: protocol.Announce) -> Answer:
        if not is_digest(message.toolchain):
            return Reply(protocol.Refused("protocol error", f"{message.toolchain[:80]!r} is not a digest"))
        look = self._toolchains.announce(message, caller)
        if look is None:
            return Reply(protocol.Refused("protocol error", "the list of files is malformed"))
        if not look.decides:
            return Reply(protocol.Done())
        # A check that decides what is served is worth a longer wait.
        is_stale = self._toolchains.is_stale(message.toolchain, caller.uid)
        answer, done = Later(), Reply(protocol.Done())
        look.done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(answer.give, done))
        self._loop.call_later(_DECISIVE_CHECK_SECONDS if is_stale else _CHECK_SECONDS, answer.give, done)
        return answer
