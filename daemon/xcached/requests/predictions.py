"""The requests about what a program wanted, and what it will probably want.

The first entries of a prediction, and aliases, come with the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable

from xcache.errors import ProtocolError
from xcache.wire import framing, protocol
from xcache.wire.checks import is_sound
from xcached.caller import Answer, Caller, Handlers, Reply, Work, close_all
from xcached.requests.fetches import Fetches
from xcached.requests.lookup import Lookup
from xcached.store.histories import Histories, Wanted
from xcached.store.reader import Hit
from xcached.store.writer import WriterThread

logger = logging.getLogger("xcached")

# The most bytes of entries in a prediction: inline (less if the list is long), and in files.
_INLINE_BYTES, _FILE_BYTES = protocol.MAX_FRAME // 2, 16 * 1024 * 1024
# Items looked up and listed: more than most programs want, and only a moment's work.
_MOST_LISTED = 500
# The most aliases of one program, the most bytes of all, and msgpack's bytes for each.
_MOST_ALIASES, _ALIAS_BYTES, _ALIAS_HEADER_BYTES = 4, protocol.MAX_FRAME // 4, 16
# An entry that comes along makes its item at most this many bytes longer, with its key in the list of entries.
_LONGEST_ITEM_BYTES = 220


class Predictions:
    """Predicts on the serving thread, and has the writer thread remember histories."""

    def __init__(
        self,
        histories: Histories,
        lookup: Lookup,
        writer: WriterThread,
        signers: Callable[[], Iterable[int]],
        fetches: Fetches | None,
    ) -> None:
        """``signers`` returns those whose histories count where the user has none."""
        self._signers = signers
        self._fetches = fetches
        self._histories = histories
        self._lookup = lookup
        self._writer = writer
        self.handlers: Handlers = {protocol.Predict: self._predict, protocol.Remember: self._remember}

    def _remember(self, caller: Caller, message: protocol.Remember) -> Answer:
        def remember() -> protocol.Message | None:
            if not is_sound(message):
                return protocol.Refused("protocol error", "the list of the run is malformed")
            self._histories.remember(caller.uid, message)
            return None

        return self._writer.call(remember, caller.uid)

    def _predict(self, caller: Caller, message: protocol.Predict) -> Work:
        wanted, options = self._wanted(caller, message)
        if not wanted and self._fetches is not None:
            asked = self._fetches.fetch_history(caller, message, lambda: self._predict_from_here(caller, message))
            if asked is not None:
                return asked
        return (yield from self._prediction(caller, wanted, options))

    def _predict_from_here(self, caller: Caller, message: protocol.Predict) -> Work:
        """Predict after the remote stores were asked."""
        return self._prediction(caller, *self._wanted(caller, message))

    def _wanted(self, caller: Caller, message: protocol.Predict) -> tuple[list[Wanted], dict[str, bytes]]:
        return self._histories.predict(caller.uid, [*self._signers()], message, _MOST_LISTED)

    def _prediction(self, caller: Caller, wanted: Iterable[Wanted], options: dict[str, bytes]) -> Work:
        """Return the items a program will probably want, of those that a Get would find."""
        prediction = protocol.Prediction([], options, {}, [], [], [], self._lookup.structures(caller))
        # Many items share few of these, so each is listed once.
        numbers: dict[str, int] = {}
        predicted: list[tuple[Wanted, Hit]] = []
        for item in wanted:
            hit = self._lookup.to_load_ahead(caller, str(item["key"]))
            if hit is not None:
                made_with = f"{hit.flags} {hit.platform} {hit.toolchain}"
                prediction.items.append(item | {"made_with": numbers.setdefault(made_with, len(numbers))})
                predicted.append((prediction.items[-1], hit))
            yield
        prediction.made_with.extend(numbers)
        try:
            listed = len(framing.encode(0, prediction)) + len(predicted) * _LONGEST_ITEM_BYTES
        except ProtocolError:
            # The stored history is so long that its list does not fit into a frame.
            return Reply(protocol.Prediction([], {}, {}, [], [], [], None))
        room = protocol.MAX_FRAME - listed
        room -= yield from self._add_aliases(
            caller, prediction, dict.fromkeys(hit.program for _, hit in predicted), room
        )
        return (yield from self._with_entries(caller, prediction, predicted, min(_INLINE_BYTES, room)))

    def _add_aliases(
        self, caller: Caller, prediction: protocol.Prediction, programs: Iterable[str], room: int
    ) -> Generator[None, None, int]:
        """Add aliases of these programs as far as there is room; return their bytes."""
        left = most = max(0, min(_ALIAS_BYTES, room))
        for program in programs:
            yield
            for alias in self._lookup.aliases_of(caller, [program], _MOST_ALIASES):
                texts = alias.structure, alias.program, alias.seal
                size = _ALIAS_HEADER_BYTES + len(alias.facts) + sum(len(text.encode()) for text in texts)
                if size > left:
                    return most - left
                prediction.aliases.append([*alias])
                left -= size
        return most - left

    def _with_entries(
        self, caller: Caller, prediction: protocol.Prediction, predicted: list[tuple[Wanted, Hit]], room_inline: int
    ) -> Generator[None, None, Reply]:
        """Hand over the first entries, as far as there is room."""
        # By whether an entry comes inline or in a file.
        room, files = {True: room_inline, False: _FILE_BYTES}, protocol.MAX_PREDICTED_FILES
        descriptors: list[int] = []
        try:
            for item, hit in predicted:
                yield
                is_inline = hit.inline_bytes is not None
                room[is_inline] -= max(hit.stored_size, 0) if hit.inline_bytes is None else hit.inline_bytes
                files -= not is_inline
                if room[is_inline] < 0 or (files < 0 and not is_inline):
                    continue
                key = str(item["key"])
                reply = self._lookup.hand_over(caller, key, hit, ahead=True)
                if reply is None or not isinstance(reply.message, protocol.Found):
                    continue
                answer = reply.message
                item |= {name: getattr(answer, name) for name in ("digest", "compile_seconds", "stored_size", "offset")}
                if answer.payload is not None:
                    prediction.payloads[key] = answer.payload
                else:
                    prediction.files.append(key)
                    descriptors += reply.descriptors
        except OSError as error:
            logger.warning("no more entries are handed over ahead: %s", error)
        except BaseException:
            close_all(descriptors)
            raise
        return Reply(prediction, tuple(descriptors))
