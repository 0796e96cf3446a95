"""Single requests: hits, misses and puts of many sizes, by many clients, with many entries in the store."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from peers import Daemon, apart, rotated, socket_of
from servers import Echo, Redis, get_frame, set_frame
from stores import key

from xcache._version import __version__
from xcache.client.client import Client
from xcache.client.contents import SealedEntry
from xcache.config import config
from xcache.wire import envelope, framing, hashing, protocol

HERE = Path(__file__).parent
KIB, MIB = 1024, 1024**2
# The most requests of one size: more would say no more.
_MOST = 500
COMPONENTS = {name: hashing.digest(name.encode()) for name in protocol.DESCRIBED_COMPONENTS}
Times = dict[str, list[float]]


def content(size: int, seed: int = 0) -> bytes:
    """Return bytes that compress to about 40 %, as executables for accelerators do."""
    rows = np.zeros((-(-size // 64), 64), np.uint8)
    rows[:, :22] = np.random.default_rng(seed).integers(0, 256, (len(rows), 22), np.uint8)
    rows[:, 22:] = np.arange(42)
    return rows.tobytes()[:size]


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    """Do something and note how long it took."""
    start = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - start)
    return result


def client_of(store: Path) -> Client:
    """Return a real client of a running daemon."""
    settings = {
        "XCACHE_DIR": str(store),
        "XCACHE_SOCKET": str(socket_of(store)),
        "XCACHE_TIMEOUT": "60s",
        "XDG_CONFIG_HOME": str(store / "nothing"),
        "HOME": os.environ.get("HOME", "/"),
    }
    return Client(config.load(settings), __version__)


def get_of(digest: str) -> protocol.Get:
    """Return a Get that waits for no lease."""
    return protocol.Get(digest, 0.0, "jit_measured", COMPONENTS["options"])


def put_of(digest: str, sealed: bytes, raw_size: int, program: bytes) -> protocol.Put:
    """Return the message with which a client hands over an entry."""
    return protocol.Put(
        key=digest,
        overwrite=False,
        module_name="jit_measured",
        platform="cpu",
        device_kind="cpu",
        jaxlib_version="0.10.2",
        codec=envelope.CODEC,
        raw_size=raw_size,
        compile_seconds=1.0,
        digest=hashing.digest(sealed),
        stored_size=len(sealed),
        program_digest=hashing.digest(digest.encode()),
        program_raw_size=len(program),
        program_stored_digest=hashing.digest(program),
        program_stored_size=len(program),
        components=COMPONENTS | {"program": hashing.digest(digest.encode())},
        details={name: name for name in COMPONENTS},
        payload=None,
        program=None,
    )


def hit(client: Client, digest: str) -> bytes:
    """Do all of a hit but the deserialization: ask, receive, verify, decompress."""
    found = client.get(get_of(digest))
    if not isinstance(found, SealedEntry):
        raise RuntimeError(f"no entry: {found}")
    return envelope.open_sealed(digest, found.digest, found.sealed)


@contextlib.contextmanager
def redis_of(folder: Path, *, synced: bool) -> Iterator[Redis | None]:
    """Run a redis; yield None where it is not installed."""
    try:
        server = Redis(folder, synced=synced)
    except FileNotFoundError:
        yield None
        return
    try:
        yield server
    finally:
        server.stop()


def by_size(folder: Path, sizes: list[int], seconds: float) -> dict[str, dict[str, Times]]:
    """Measure a hit and a put for each size, by one client; beside them files, redis and a bare round trip."""
    store = folder / "sizes"
    store.mkdir(mode=0o700)
    found: dict[str, dict[str, Times]] = {}
    daemon = Daemon(store, XCACHE_MAX_SIZE="0")
    with (
        contextlib.closing(_Stopping(daemon)),
        redis_of(folder, synced=False) as redis,
        redis_of(folder, synced=True) as synced,
        contextlib.closing(client_of(store)) as client,
    ):
        servers = [server.pid for server in (daemon, redis, synced) if server]
        for size in sizes:
            hits: Times = defaultdict(list)
            puts: Times = defaultdict(list)
            _one_size(size, seconds, folder, client, redis, synced, servers, hits, puts)
            found[str(size)] = {"hit": dict(hits), "put": dict(puts)}
    return found


class _Stopping:
    def __init__(self, daemon: Daemon) -> None:
        self.close = daemon.stop


def _one_size(
    size: int,
    seconds: float,
    folder: Path,
    client: Client,
    redis: Redis | None,
    synced: Redis | None,
    servers: list[int],
    hits: Times,
    puts: Times,
) -> None:
    raw, digest = content(size), key(-size)
    sealed = envelope.seal(digest, raw)
    client.put(put_of(digest, sealed, size, b"program"), sealed, b"program")
    file = folder / "file"
    file.write_bytes(sealed)
    head = len(sealed) - len(envelope.compress(raw))

    def read() -> bytes:
        with file.open("rb") as opened:
            return zstandard.ZstdDecompressor().decompress(memoryview(opened.read())[head:])

    def write(aside: Path) -> None:
        with aside.open("wb") as opened:
            opened.write(sealed)
            opened.flush()
            os.fsync(opened.fileno())
        aside.rename(folder / "written")

    readers = redis.client() if redis else None
    writers = synced.client() if synced else None
    echo = Echo(folder, len(sealed) + 90) if len(sealed) <= protocol.INLINE_LIMIT else None
    bare = echo.client() if echo else None
    request = framing.encode(1, get_of(digest))
    name = digest.encode()
    if readers:
        readers.set(name, sealed)
    ways: dict[str, Callable[[], bytes | None]] = {"xcache": lambda: hit(client, digest), "file": read}
    if readers:
        ways["redis"] = lambda: zstandard.ZstdDecompressor().decompress(readers.get(name)[head:])
    if echo and bare:
        ways["round trip"] = lambda: echo.round_trip(bare, request)
    with contextlib.ExitStack() as stack:
        for opened in (readers, writers, bare):
            if opened:
                stack.callback(opened.close)
        if echo:
            stack.callback(echo.stop)
            # Only small hits are measured apart, and beside a bare round trip.
            stack.enter_context(apart(*servers, echo.pid))
        until, turn = time.monotonic() + seconds, 0
        while turn < 5 or (time.monotonic() < until and turn < _MOST):
            turn += 1
            # The order changes, so that no one always comes behind a put, or behind the same other.
            order = rotated(ways, turn + turn // 10)
            for way in order if turn % 2 else reversed(order):
                if timed(hits[way], ways[way]) != (None if way == "round trip" else raw):
                    raise RuntimeError("something else came back")
            # A put waits for a sync: a tenth as many puts as hits are enough.
            if turn % 10 == 1 or size >= MIB:
                fresh = key(-size * 10_000 - turn)
                again = sealed[:8] + bytes.fromhex(fresh) + sealed[40:]
                message = put_of(fresh, again, size, b"program")
                timed(puts["xcache"], lambda: client.put(message, again, b"program"))  # noqa: B023 - called at once
                timed(puts["file"], lambda: write(folder / "aside"))
                if writers:
                    timed(puts["redis"], lambda: writers.set(b"same", sealed))


def by_clients(folder: Path, clients: list[int], seconds: float, rounds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure hits, misses and puts of 4 KiB per second: one request of each client is always under way."""
    store = folder / "clients"
    store.mkdir(mode=0o700)
    raw, digest = content(4 * KIB), key(-1)
    sealed = envelope.seal(digest, raw)
    name = digest.encode()
    hello = framing.encode(1, protocol.Hello(protocol.VERSION, __version__, os.getpid(), "bench"))
    found: dict[str, Any] = {"hit": defaultdict(dict), "miss": defaultdict(dict), "put": defaultdict(dict)}
    with (
        contextlib.closing(_Stopping(Daemon(store, XCACHE_MAX_SIZE="0"))),
        redis_of(folder, synced=False) as redis,
        redis_of(folder, synced=True) as synced,
        contextlib.closing(client_of(store)) as client,
    ):
        client.put(put_of(digest, sealed, len(raw), b"program"), sealed, b"program")
        if redis:
            opened = redis.client()
            opened.set(name, sealed)
            opened.close()
        made = 0
        for count in clients:
            for _ in range(rounds):
                fresh = [key(-(10**9) - made - n) for n in range(4000)]
                made += len(fresh)
                frames = {
                    "hit": [framing.encode(2, get_of(digest))],
                    "miss": [framing.encode(2, get_of(other)) for other in fresh[:500]],
                    "put": [_put_frame(other, sealed) for other in fresh],
                }
                theirs = {
                    "hit": [get_frame(name)],
                    "miss": [get_frame(other.encode()) for other in fresh[:500]],
                    "put": [set_frame(other.encode(), sealed) for other in fresh],
                }
                for kind, ours in frames.items():
                    results = {"xcache": _drive(socket_of(store), "xcache", kind, hello, ours, count, seconds)}
                    server = synced if kind == "put" else redis
                    if server:
                        results["redis"] = _drive(server.path, "redis", kind, b"", theirs[kind], count, seconds)
                    for peer, result in results.items():
                        found[kind][peer].setdefault(str(count), []).append(result)
    return {kind: dict(values) for kind, values in found.items()}


def _put_frame(fresh: str, sealed: bytes) -> bytes:
    again = sealed[:8] + bytes.fromhex(fresh) + sealed[40:]
    message = put_of(fresh, again, 4 * KIB, b"program")
    return framing.encode(2, message._replace(payload=again, program=b"program"))


def _drive(path: Path, peer: str, kind: str, hello: bytes, frames: list[bytes], clients: int, seconds: float) -> Any:
    task = {
        "socket": str(path),
        "kind": f"{peer} once" if kind == "put" else peer,
        "hello": base64.b64encode(hello).decode(),
        "frames": [base64.b64encode(frame).decode() for frame in frames],
        "clients": clients,
        "seconds": seconds,
    }
    command = [sys.executable, str(HERE / "load.py")]
    done = subprocess.run(command, input=json.dumps(task), text=True, stdout=subprocess.PIPE, check=True, timeout=300)
    result = json.loads(done.stdout)
    # An answer of another kind would be quick, and wrong.
    due = {"hit": ("Found", "$"), "miss": ("Missing", "$-1"), "put": ("Stored", "+OK")}[kind][peer == "redis"]
    if due not in result["first answer"]:
        raise RuntimeError(f"{peer} answered a {kind} with {result['first answer']!r}")
    return result
