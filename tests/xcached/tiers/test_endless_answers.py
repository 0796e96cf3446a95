"""A server whose answers do not end costs the daemon no more memory than was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from xcached.tiers.engines import open_tier
from xcached.tiers.tier import TierError

MOST = 16 * 1024
PIECE = b"%x\r\n%s\r\n" % (1024**2, bytes(1024**2))
DATE = b'ETag: "a"\r\nLast-Modified: Tue, 15 Nov 1994 12:45:26 GMT\r\n'
LENGTHS = b"Transfer-Encoding: chunked\r\nContent-Length: 100\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\n" + LENGTHS + DATE
PART = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-16383/100000000\r\n" + LENGTHS + DATE


@contextlib.asynccontextmanager
async def serving(head: bytes) -> AsyncIterator[tuple[int, list[int]]]:
    """Answer every request without an end; yield the port, and how many mebibytes each client has taken."""
    taken: list[int] = []
    answering: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering[asyncio.current_task()] = writer
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            number = len(taken)
            taken.append(0)
            writer.write(head + b"\r\n")
            # More than any buffer of the client's system holds.
            while taken[number] < 1024:
                writer.write(PIECE)
                await writer.drain()
                taken[number] += 1
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        try:
            yield server.sockets[0].getsockname()[1], taken
        finally:
            # A client may keep a connection on which it reads nothing more.
            for writer in answering.values():
                writer.transport.abort()
            await asyncio.gather(*answering)


@pytest.mark.parametrize("scheme", ["s3", "az"])
@pytest.mark.parametrize("whole", [True, False], ids=["get", "begin"])
def test_the_rest_of_an_answer_is_left(monkeypatch, run, scheme, whole):
    async def main() -> None:
        async with serving(WHOLE if whole else PART) as (port, taken):
            for name, value in {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_SKIP_SIGNATURE": "true",
                "AWS_REGION": "us-east-1",
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ACCOUNT_KEY": "YWJj",
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/account",
                "AZURE_STORAGE_ALLOW_HTTP": "true",
            }.items():
                monkeypatch.setenv(name, value)
            tier = open_tier(f"{scheme}://bucket/prefix", 30.0)
            if whole:
                with pytest.raises(TierError, match="more than the 100 bytes that the server announced"):
                    await tier.get("name", MOST)
            else:
                assert await tier.begin("name", MOST) == bytes(MOST)
            await tier.close()
            assert max(taken) < 64

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"$%d\r\n" % 2**40,
        b"$100000000000\r\n",
        b"*1000000000\r\n",
        b"*1\r\n*1000000000\r\n",
        b"$-2\r\n",
    ],
    ids=["a terabyte", "a hundred gigabytes", "many parts", "many parts of one", "less than nothing"],
)
def test_an_endless_answer_of_a_redis_is_left(run, answer):
    async def main() -> None:
        taken = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            with contextlib.suppress(ConnectionError):
                await reader.read(1)
                writer.write(answer)
                while taken < 256:
                    writer.write(b":1\r\n" * (1024**2 // 4))
                    await writer.drain()
                    taken += 1
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            tier = open_tier(f"redis://127.0.0.1:{port}/0", 30.0)
            for work in (tier.get("name", MOST), tier.begin("name", MOST), tier.contains("name")):
                with pytest.raises(TierError):
                    await work
            with pytest.raises(TierError):
                async for _ in tier.listed("name"):
                    pass
            await tier.close()
        assert taken < 64

    run(main())
