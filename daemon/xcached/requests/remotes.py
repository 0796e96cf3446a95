"""The requests about the remote stores themselves. Only an administrator may look there, and change what is there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from xcache.wire import commands, protocol
from xcached.caller import Answer, Caller, Handlers, Reply
from xcached.requests.trust import NOT_PERMITTED, Trust
from xcached.store.writer import WriterThread

if TYPE_CHECKING:
    from xcached.tiers.sharing import Sharing

_NONE = protocol.Refused("no remote store", "it has no remote store: the setting remote named none when it began")
_M = TypeVar("_M")


class RemoteRequests:
    """Has the tiers' thread do what is asked, and the writer thread queue uploads."""

    def __init__(self, sharing: Sharing | None, writer: WriterThread, trust: Trust) -> None:
        self._writer = writer
        self._trust = trust
        self._sharing = sharing
        self.handlers: Handlers = {
            commands.CheckRemotes: self._handler(lambda sharing, _, message: sharing.manager.check(message)),
            commands.AskObjects: self._handler(lambda sharing, _, message: sharing.manager.list(message)),
            commands.DescribeEntries: self._handler(lambda sharing, _, message: sharing.manager.describe(message)),
            commands.RemoveObjects: self._handler(lambda sharing, _, message: sharing.manager.remove(message)),
            commands.Push: self._handler(self._push),
        }

    def _handler(
        self, answer: Callable[[Sharing, int, _M], Future[protocol.Message]]
    ) -> Callable[[Caller, _M], Answer]:
        def handle(caller: Caller, message: _M) -> Answer:
            if not self._trust.administers(caller.uid):
                return Reply(NOT_PERMITTED)
            return Reply(_NONE) if self._sharing is None else answer(self._sharing, caller.uid, message)

        return handle

    def _push(self, sharing: Sharing, uid: int, message: commands.Push) -> Future[protocol.Message]:
        def push() -> Generator[None, None, protocol.Message]:
            wanted = [tier for tier in sharing.uploads.tiers if message.remote in ("", tier)]
            pushed: list[dict[str, protocol.Scalar]] = []
            for tier in wanted:
                pushed.append((yield from sharing.uploads.push(tier, even_quick=message.even_quick)))  # noqa: PERF401 - it yields
            return commands.Pushed(pushed)

        return self._writer.call_by_steps(push(), uid)
