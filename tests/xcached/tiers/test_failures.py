"""Every engine says soon, and in the same words, that something is wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import Engine, Where
from support.operations import kinds
from support.places import free_port

from xcached.tiers import tier as tiers
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import TierError

Run = Callable[[Any], Any]
Use = Callable[[Where], str]
MOST = 2**20


async def put_once(url: str) -> None:
    tier = open_tier(url, 5.0)
    await tier.put("a", b"content")
    await tier.close()


def test_nobody_listens(engine: Engine, use: Use, run: Run) -> None:
    if engine.at_port is None:
        pytest.skip("it has no server")
    assert set(run(kinds(use(engine.at_port(free_port())))).values()) == {tiers.UNREACHABLE}


def test_a_server_that_never_answers(engine: Engine, use: Use, run: Run) -> None:
    if engine.at_port is None:
        pytest.skip("it has no server")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=100)) as silent:
        address = use(engine.at_port(silent.getsockname()[1]))
        assert set(run(kinds(address, 0.4)).values()) == {tiers.UNREACHABLE}


@contextlib.contextmanager
def saying(content: bytes) -> Iterator[int]:
    """Have a server say this to everybody, and hang up; give its port."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0), backlog=100)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(65536)
                        connection.sendall(content)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff" * 1000,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>\r\n\r\n",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"$100000000000\r\nx",
        b"*2147483647\r\n",
        b"*1\r\n" * 10000,
        b"*2\r\n:x\r\n:y\r\n",
    ],
    ids=[
        "nothing",
        "bytes",
        "ssh",
        "half",
        "page",
        "error",
        "redis-length",
        "redis-array",
        "redis-deep",
        "redis-types",
    ],
)
def test_another_server_is_there(engine: Engine, use: Use, run: Run, content: bytes) -> None:
    if engine.at_port is None:
        pytest.skip("it has no server")
    with saying(content) as port:
        found = run(kinds(use(engine.at_port(port))))
    # What takes only the status of an answer cannot tell, nor can a store tell an object from a page.
    assert found["put"] or content.startswith(b"HTTP/1.1 200")
    assert set(found.values()) <= {tiers.UNREACHABLE, tiers.FAILED, ""}


def test_wrong_credentials(engine: Engine, use: Use, run: Run) -> None:
    if engine.denied is None:
        pytest.skip("it has no credentials")
    assert set(run(kinds(use(engine.denied))).values()) == {tiers.DENIED}


def test_the_place_is_missing(engine: Engine, use: Use, run: Run) -> None:
    if engine.missing is None:
        pytest.skip("it makes its places by itself")
    assert set(run(kinds(use(engine.missing))).values()) == {tiers.MISSING}


def test_a_folder_that_is_missing_is_not_made(folder_engine: Engine, run: Run, tmp_path: Path) -> None:
    root = tmp_path / "mount"
    address = root.as_uri()
    run(kinds(address))
    assert not root.exists()
    root.mkdir()
    assert set(run(kinds(address)).values()) == {""}
    (root / "a").unlink(missing_ok=True)
    (root / "b").unlink()
    root.rmdir()
    # It may also go away later.
    assert set(run(kinds(address)).values()) == {tiers.MISSING}
    assert not root.exists()


_READING_AS_NOBODY = """
import asyncio, os, sys
sys.path[:0] = sys.argv[2:]
from xcached.tiers.engines import open_tier
async def main():
    tier = open_tier(sys.argv[1], 5.0)
    # Not before: the interpreter's files may be closed to others.
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    tries = [tier.get("a", 100), tier.put("a", b"x"), tier.put("c/d", b"x"), tier.create("b", b"x"), tier.remove("a")]
    for each in tries:
        try:
            print(await each)
        except Exception as error:
            print(error.kind)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    root = tmp_path / "root"
    root.mkdir(0o755)
    run(put_once(root.as_uri()))
    command = [sys.executable, "-c", _READING_AS_NOBODY, root.as_uri(), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["b'content'", *[tiers.READ_ONLY] * 4], done.stderr
    root.chmod(0o700)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [tiers.DENIED] * 5, done.stderr


def test_a_user_who_may_only_read(s3_engine: Engine, use: Use, run: Run) -> None:
    where = s3_engine.at("only-reading")
    run(put_once(use(where)))
    use(Where("", where.environment | {"AWS_ACCESS_KEY_ID": "reader"}))
    found = run(kinds(where.url, 5.0))
    assert found == {
        **dict.fromkeys(("get", "contains", "list"), ""),
        **dict.fromkeys(("put", "put of much", "create", "remove"), tiers.DENIED),
    }


def test_no_credentials(s3_engine: Engine, use: Use, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = s3_engine.at("x")
    kept = {name: value for name, value in where.environment.items() if "KEY" not in name}
    # Nobody is there whom obstore asks for credentials.
    use(Where("", kept | {"AWS_METADATA_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HOME": str(tmp_path)}))
    for name in where.environment.keys() - kept:
        monkeypatch.delenv(name, raising=False)
    assert set(run(kinds(where.url, 2.0)).values()) <= {tiers.DENIED, tiers.UNREACHABLE}


@pytest.fixture(scope="module", params=["redis", "http", "rediss", "https"])
def forwardable(request: pytest.FixtureRequest) -> Engine:
    """Engines whose port may be any."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


def test_a_server_that_comes_back(forwardable: Engine, use: Use, run: Run) -> None:
    """A tier works again when its server does, without being opened again."""
    engine = forwardable

    async def main() -> None:
        async with _forwarded(engine.port) as (port, cut):
            assert engine.at_port is not None
            tier = open_tier(use(engine.at_port(port)), 2.0)
            await tier.put("a", b"1")
            assert await tier.get("a", MOST) == b"1"
            await cut(True)
            with pytest.raises(TierError):
                await tier.get("a", MOST)
            await cut(False)
            assert await tier.get("a", MOST) == b"1"
            await tier.close()

    run(main())


@contextlib.asynccontextmanager
async def _forwarded(target: int) -> Any:
    """Forward a port to another; give it, and what cuts all connections and refuses or accepts new ones."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []
    is_cut = False

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(65536):
                writer.write(part)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_cut:
            writer.close()
            return
        reader_2, writer_2 = await asyncio.open_connection("127.0.0.1", target)
        writers.extend((writer, writer_2))
        tasks.update(asyncio.create_task(copy(*ends)) for ends in ((reader, writer_2), (reader_2, writer)))

    async def cut(value: bool) -> None:
        nonlocal is_cut
        is_cut = value
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], cut
        await cut(True)
        await asyncio.gather(*tasks, return_exceptions=True)
