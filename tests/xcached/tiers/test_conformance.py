"""Every engine does the same, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from xcached.tiers import tier as tiers
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import Tier, TierError

Run = Callable[[Any], Any]
MEBIBYTE = 1024**2
MOST = 64 * MEBIBYTE
ODD_NAMES = [
    "a",
    "--",
    "0",
    "...",
    ".a",
    "a.",
    "a..b",
    "e/ab/cd-ef.v1",
    "-/-/-",
    "d/.hidden/x",
    "x" * 200,
    "l/" * 20 + "e",
]


@contextlib.asynccontextmanager
async def opened(address: str) -> AsyncIterator[Tier]:
    tier = open_tier(address, 20.0)
    try:
        yield tier
    finally:
        await tier.close()


def test_nothing_is_there_at_first(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            assert await tier.get("a/b", MOST) is None
            assert not await tier.contains("a/b")
            await tier.remove("a/b")
            await tier.remove("a/b")

    run(main())


@pytest.mark.parametrize("size", [0, 1, 100 * 1024, 512 * 1024, 512 * 1024 + 1, 20 * MEBIBYTE])
def test_what_was_put_is_got(address: str, run: Run, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    content = content[:size]

    async def main() -> None:
        async with opened(address) as tier:
            await tier.put("a/b", content)
            assert await tier.contains("a/b")
            # Exactly as many bytes as there are may be asked for.
            assert await tier.get("a/b", size) == content
            await tier.remove("a/b")
            assert not await tier.contains("a/b")
            assert await tier.get("a/b", MOST) is None

    run(main())


@pytest.mark.parametrize("size", [0, 1, 1000, 512 * 1024, 512 * 1024 + 1, 20 * MEBIBYTE])
def test_the_beginning_is_read(address: str, run: Run, size: int) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]

    async def main() -> None:
        async with opened(address) as tier:
            assert await tier.begin("a/b", 16) is None
            await tier.put("a/b", content)
            # Azurite does not answer correctly about one byte of an empty object.
            for most in {2, 16, 1000, max(2, size - 1), size + 2}:
                assert await tier.begin("a/b", most) == content[:most]
            # The part that was not read is in nobody's way.
            assert await asyncio.gather(*(tier.begin("a/b", 100) for _ in range(40))) == [content[:100]] * 40
            assert await tier.get("a/b", size) == content
            await tier.remove("a/b")
            assert await tier.begin("a/b", 16) is None

    run(main())


def test_another_tier_sees_it(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as one, opened(address) as other:
            await one.put("a", b"content")
            assert await other.get("a", MOST) == b"content"

    run(main())


def test_a_reader_sees_old_or_new(address: str, run: Run) -> None:
    versions = [b"1" * 100 * 1024, b"2" * 700 * 1024]

    async def main() -> None:
        async with opened(address) as tier:
            await tier.put("a", versions[0])
            done = False

            async def read() -> int:
                reads = 0
                while not done:
                    assert await tier.get("a", MOST) in versions
                    reads += 1
                return reads

            readers = [asyncio.create_task(read()) for _ in range(3)]
            for number in range(20):
                await tier.put("a", versions[number % 2])
            done = True
            assert all(await asyncio.gather(*readers))

    run(main())


def test_create_succeeds_once(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            if not tier.can_create:
                with pytest.raises(TierError):
                    await tier.create("a", b"")
                return
            assert await tier.create("a", b"first") is True
            assert await tier.create("a", b"second") is False
            assert await tier.get("a", MOST) == b"first"
            await tier.remove("a")
            assert await tier.create("a", b"third") is True
            await tier.put("a", b"fourth")
            assert await tier.get("a", MOST) == b"fourth"

    run(main())


def test_one_of_many_creates_succeeds(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as one, opened(address) as other:
            if not one.can_create:
                return
            tries = [tier.create("a/b", b"%d" % number) for number in range(8) for tier in (one, other)]
            created = await asyncio.gather(*tries)
            assert created.count(True) == 1
            assert await one.get("a/b", MOST) == b"%d" % (created.index(True) // 2)

    run(main())


def test_a_listing_has_names_sizes_and_times(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            if not tier.can_list:
                with pytest.raises(TierError):
                    [each async for each in tier.listed("")]
                return
            assert [each async for each in tier.listed("")] == []
            sizes = {f"e/{number % 3}/x{number}": number for number in range(30)} | {"e/0x": 5, "f": 7}
            for name, size in sizes.items():
                await tier.put(name, b"x" * size)
            for prefix in ("", "e/", "e/0", "e/0/", "e/0/x1", "e", "f", "g", "e/9/"):
                found = [each async for each in tier.listed(prefix)]
                expected = {name: size for name, size in sizes.items() if name.startswith(prefix)}
                assert {each.name: each.size for each in found} == expected, prefix
                assert len(found) == len(expected)
                for each in found:
                    assert each.modified_at is None or abs(each.modified_at - time.time()) < 60

    run(main())


def test_long_listings_are_whole(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            if not tier.can_list:
                return
            # More than Redis and S3 give at once.
            names = {f"n/{number}" for number in range(1200)}
            rest = iter(names)

            async def put() -> None:
                for name in rest:
                    await tier.put(name, b"")

            await asyncio.gather(*(put() for _ in range(8)))
            assert {each.name async for each in tier.listed("n/")} == names
            # Who stops early leaves nothing open.
            async for _ in tier.listed("n/"):
                break

    run(main())


def test_prefixes_keep_tiers_apart(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier, opened(inner(address)) as other:
            await tier.put("a", b"1")
            assert await other.get("a", MOST) is None
            await other.put("a", b"2")
            assert await tier.get("a", MOST) == b"1"

    def inner(address: str) -> str:
        if address.startswith("redis"):
            return address.removesuffix(":") + "x:"
        if address.startswith("file"):
            Path(address.removeprefix("file://"), "inner").mkdir()
        return f"{address}/inner"

    run(main())


def test_odd_names(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            for name in ODD_NAMES:
                await tier.put(name, name.encode())
            for name in ODD_NAMES:
                assert await tier.get(name, MOST) == name.encode()
            if tier.can_list:
                assert {each.name async for each in tier.listed("")} == set(ODD_NAMES)

    run(main())


@pytest.mark.parametrize(
    "name", ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "A", "a b", "a#", "ä", "a\n", "a" * 201]
)
def test_other_names_are_refused(address: str, run: Run, name: str) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            with pytest.raises(ValueError, match="not a name"):
                await tier.get(name, MOST)
            with pytest.raises(ValueError, match="not a name"):
                await tier.begin(name, 16)
            with pytest.raises(ValueError, match="not a name"):
                await tier.put(name, b"")

    run(main())


@pytest.mark.parametrize("size", [1000, 32 * MEBIBYTE])
def test_an_object_that_is_too_large_is_not_read(address: str, run: Run, size: int) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            await tier.put("a", b"x" * size)
            await asyncio.sleep(0.1)
            Path("/proc/self/clear_refs").write_text("5")
            before = peak()
            with pytest.raises(TierError) as caught:
                await tier.get("a", 999)
            assert caught.value.kind == tiers.TOO_LARGE
            assert await tier.begin("a", 999) == b"x" * 999
            assert peak() - before < 8 * MEBIBYTE
            assert await tier.get("b", 0) is None

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    run(main())


def test_a_cancelled_request_leaves_the_tier_usable(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            await tier.put("a", b"x" * 5 * MEBIBYTE)
            for _ in range(20):
                task = asyncio.create_task(tier.get("a", MOST))
                await asyncio.sleep(0.002)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            assert await tier.get("a", MOST) == b"x" * 5 * MEBIBYTE

    run(main())


def test_many_at_once(address: str, run: Run) -> None:
    async def main() -> None:
        async with opened(address) as tier:
            await asyncio.gather(*(tier.put(f"a/{number}", b"%d" % number) for number in range(100)))
            got = await asyncio.gather(*(tier.get(f"a/{number}", MOST) for number in range(100)))
            assert got == [b"%d" % number for number in range(100)]

    run(main())
