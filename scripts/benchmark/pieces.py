"""What a hit of 4 KiB is made of: each piece alone, in this process, beside the whole of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from micro import KIB, Times, content, get_of, put_of, timed
from stores import key

from xcache import payload, protocol
from xcached.store import Source, Store, Writer

_TURNS = 2000


def pieces(folder: Path) -> Times:
    """Seconds for each piece, many times. Each has the processor's caches for itself: in a daemon it takes longer."""
    raw, digest = content(4 * KIB), key(-4)
    sealed = payload.seal(digest, raw)
    question = protocol.encode(1, get_of(digest))
    (folder / "pieces").mkdir(mode=0o700)
    store = Store(folder / "pieces", 0)
    with contextlib.closing(store):
        message = put_of(digest, sealed, len(raw), b"program")
        sources = Source(message.digest, len(sealed), sealed, None), Source(message.program_digest, 7, b"program", None)
        with store.transaction():
            store.put(message, *sources, Writer(0, 0, "bench"))
        (hit,) = store.find(digest)
        answer = protocol.encode(1, hit.answer)

        def look_up_anew() -> object:
            store._found.clear()
            return store.find(digest)

        works = {
            "client: write the question": lambda: protocol.encode(1, get_of(digest)),
            "daemon: read it": lambda: protocol.decode(question[4:]),
            "daemon: look it up, the first time": look_up_anew,
            "daemon: look it up again": lambda: store.find(digest),
            "daemon: write the answer": lambda: protocol.encode(1, hit.answer),
            "client: read it": lambda: protocol.decode(answer[4:]),
            "client: verify and decompress": lambda: payload.open_sealed(digest, hit.digest, sealed),
        }
        times: Times = {name: [] for name in works}
        for _ in range(_TURNS):
            for name, work in works.items():
                timed(times[name], work)
    return times
