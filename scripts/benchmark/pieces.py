"""The pieces of a hit of 4 KiB and of one of 1 MiB, each measured alone, in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import zstandard
from micro import KIB, MIB, Times, content, get_of, put_of, timed
from stores import key

from xcache.wire import envelope, framing, hashing
from xcached.store.entries import Source, Writer
from xcached.store.store import Store

_TURNS, _TURNS_OF_LARGE = 2000, 300


def pieces(folder: Path) -> dict[str, Times]:
    """Measure both, by their size in bytes."""
    return {str(4 * KIB): _small(folder), str(MIB): _large(folder)}


def _small(folder: Path) -> Times:
    """Seconds for each piece, many times. Each has the processor's caches for itself: in a daemon it takes longer."""
    raw, digest = content(4 * KIB), key(-4)
    sealed = envelope.seal(digest, raw)
    question = framing.encode(1, get_of(digest))
    (folder / "pieces").mkdir(mode=0o700)
    store = Store(folder / "pieces")
    with contextlib.closing(store):
        message = put_of(digest, sealed, len(raw), b"program")
        sources = Source(message.digest, len(sealed), sealed, None), Source(message.program_digest, 7, b"program", None)
        with store.transaction():
            store.put(message, *sources, Writer(0, 0, "bench"))
        (hit,) = store.reader.find(digest)
        answer = framing.encode(1, hit.answer(sealed))

        works = {
            "client: write the question": lambda: framing.encode(1, get_of(digest)),
            "daemon: read it": lambda: framing.decode(question[4:]),
            "daemon: look it up": lambda: store.reader.find(digest),
            "daemon: write the answer": lambda: framing.encode(1, hit.answer(sealed)),
            "client: read it": lambda: framing.decode(answer[4:]),
            "client: verify and decompress": lambda: envelope.open_sealed(digest, hit.digest, sealed),
        }
        return _measured(works, _TURNS)


def _large(folder: Path) -> Times:
    """Return the seconds for each piece that a large hit adds to the round trip: read the file, check, decompress."""
    raw, digest = content(MIB), key(-MIB)
    sealed = envelope.seal(digest, raw)
    frame = memoryview(sealed)[len(sealed) - len(envelope.compress(raw)) :]
    expected = hashing.digest(sealed)
    file = folder / "piece"
    file.write_bytes(sealed)
    works = {
        "open and read the file": file.read_bytes,
        "decompress": lambda: zstandard.ZstdDecompressor().decompress(frame),
        "compute the digest": lambda: hashing.digest(sealed),
        "both": lambda: envelope.open_sealed(digest, expected, sealed),
    }
    return _measured(works, _TURNS_OF_LARGE)


def _measured(works: dict[str, Callable[[], object]], turns: int) -> Times:
    times: Times = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            timed(times[name], work)
    return times
