"""Mutate bytes, and messages token by token. The same seed and number give the same cases everywhere."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Sequence
from typing import Any

import zstandard

from support.tokens import ALIKE, ODD_TOKENS, kind_of, more_by, tokens
from xcache.wire import protocol

LONGEST = 1 << 16
_EDGES = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 127, 128, 255, 256, 1023, 1025, 4095, 4097, 65535, 65536),
    *(protocol.MAX_FRAME, protocol.MAX_FRAME + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**53 + 1, 2**63 - 1, 2**63),
    2**64 - 1,
)
_BYTES = bytes.fromhex("00 01 7f 80 81 90 91 a0 bf c0 c1 c4 c6 c7 c9 ca cb cf d3 d4 d8 d9 db dc dd de df e0 fe ff")
_NUMBERS = [struct.Struct(shape) for shape in (">B", ">H", "<H", ">I", "<I", ">Q", "<Q")]


class Mutator:
    """Makes mutated copies of samples; ``words`` are pieces with a meaning in their format."""

    def __init__(self, seed: int, samples: Sequence[bytes], words: Sequence[bytes] = ()) -> None:
        self._chance = random.Random(seed).random
        self._samples = list(samples)
        self._words = list(words) or [b"\0"]
        self._ways = [
            *(self._flip, self._set, self._insert, self._delete, self._repeat, self._splice, self._length),
            *(self._word, self._word, self._cut),
        ]

    def case(self) -> bytes:
        """Return the next case."""
        return self.spoiled(self.one_of(self._samples))

    def spoiled(self, sample: bytes) -> bytes:
        """Return a copy with one to four mutations."""
        data = bytearray(sample)
        for _ in range(1 + self.below(4)):
            self.one_of(self._ways)(data)
        return bytes(data[:LONGEST])

    def below(self, limit: int) -> int:
        """Return a number from 0 to ``limit`` - 1."""
        return int(self._chance() * limit)

    def one_of(self, things: Sequence[Any]) -> Any:
        """Return one of them."""
        return things[int(self._chance() * len(things))]

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.below(len(data))] ^= 1 << self.below(8)

    def _set(self, data: bytearray) -> None:
        if data:
            data[self.below(len(data))] = self.one_of(_BYTES)

    def _insert(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        data[at:at] = bytes(self.below(256) for _ in range(1 + self.below(8)))

    def _delete(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        del data[at : at + 1 + self.below(8)]

    def _repeat(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        data[at:at] = data[at : at + 1 + self.below(64)] * (1 + self.below(3))

    def _splice(self, data: bytearray) -> None:
        other = self.one_of(self._samples)
        here, there = self.below(len(data) + 1), self.below(len(other) + 1)
        data[here : here + self.below(32)] = other[there : there + self.below(64)]

    def _length(self, data: bytearray) -> None:
        shape = self.one_of(_NUMBERS)
        if len(data) >= shape.size:
            shape.pack_into(data, self.below(len(data) - shape.size + 1), self.one_of(_EDGES) % 256**shape.size)

    def _word(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        word = self.one_of(self._words)
        data[at : at + self.one_of((0, len(word)))] = word

    def _cut(self, data: bytearray) -> None:
        if not self.below(4):
            del data[self.below(len(data) + 1) :]


class MessageMutator(Mutator):
    """Mutates the bodies of frames token by token, which keeps most of a message, and then some bytes."""

    def __init__(
        self, seed: int, messages: Sequence[protocol.Message], samples: Sequence[bytes], request: int = 1
    ) -> None:
        super().__init__(seed, samples, ODD_TOKENS)
        self._tokens = [tokens([request, type(message).__name__, *message]) for message in messages]

    def case(self) -> bytes:
        """Return a body."""
        kind = self.below(8)
        if not kind:
            return super().case()
        body = b"".join(self._odd_tokens())
        return body if kind < 6 else self.spoiled(body)

    def _odd_tokens(self) -> list[bytes]:
        chosen = list(self.one_of(self._tokens))
        for _ in range(1 + self.below(2)):
            # The first three are the array, the request and the name: only if they are well, the rest is looked at.
            at = min(len(chosen) - 1, (3 if self.below(6) else 0) + self.below(max(1, len(chosen) - 3)))
            way = self.below(10)
            if way < 5:
                chosen[at] = self.one_of(ALIKE[kind_of(chosen[at])])
            elif way < 7:
                chosen[at] = self.one_of(ODD_TOKENS)
            elif way == 7:
                chosen[at] = self.one_of(self.one_of(self._tokens))
            elif way == 8:
                chosen.insert(at, chosen[at])
                chosen[0] = more_by(chosen[0], 1)
            else:
                del chosen[at]
                chosen[0] = more_by(chosen[0], -1) if chosen else b""
                if not chosen:
                    break
        return chosen


class StreamMutator(MessageMutator):
    """Makes streams of some frames, most of them valid."""

    def case(self) -> bytes:
        """Return a stream."""
        stream = b"".join(self._frame() for _ in range(1 + self.below(4)))
        return stream if self.below(3) else self.spoiled(stream)

    def _frame(self) -> bytes:
        body = b"".join(self.one_of(self._tokens)) if self.below(3) else super().case()
        return struct.pack(">I", len(body)) + body


class PrefixedMutator(StreamMutator):
    """Makes streams after two bytes that say how to deliver them."""

    def case(self) -> bytes:
        """Return two bytes and a stream; the samples have such bytes already."""
        if not self.below(8):
            return self.spoiled(self.one_of(self._samples))
        return bytes((self.below(256), self.below(256))) + super().case()


class EnvelopeMutator(Mutator):
    """Mutates sealed contents; in every other one, envelope and frame agree on a false size."""

    def case(self) -> bytes:
        """Return an envelope."""
        sealed = self.one_of(self._samples)
        if self.below(2) and len(sealed) > 60:
            sealed = self._lying(sealed)
            if self.below(2):
                return sealed
        return self.spoiled(sealed)

    def _lying(self, sealed: bytes) -> bytes:
        (true,) = struct.unpack_from(">Q", sealed, 40)
        size = self.one_of((true, true, true - 1, true + 1, self.one_of(_EDGES), self.one_of(_EDGES) + 256)) % 2**64
        frame = bytearray(sealed[48:])
        with contextlib.suppress(zstandard.ZstdError):
            # The content size as 8 bytes, in one segment, with or without checksum and dictionary.
            descriptor = 0xE0 | self.one_of((0, 4, 4, 4)) | self.one_of((0, 0, 0, 1))
            named = b"\x07" if descriptor & 1 else b""
            head = bytes([descriptor]) + named + struct.pack("<Q", size)
            frame[4 : zstandard.frame_header_size(bytes(frame))] = head
        return sealed[:40] + struct.pack(">Q", size) + frame
