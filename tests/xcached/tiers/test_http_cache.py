"""Only HTTP caches do this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import SECRET, Engine, kind_of, status_of, using

from xcached.tiers import tier as tiers
from xcached.tiers.tier import Tier

Run = Callable[[Any], Any]
MOST = 2**21


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(http_engine: Engine) -> Path:
    assert http_engine.folder is not None
    return http_engine.folder


@pytest.fixture
def at(http_engine: Engine) -> Callable[[str], str]:
    return lambda path: f"http://127.0.0.1:{http_engine.port}/{path}"


def test_the_layout(folder: Path, at: Callable[[str], str], run: Run) -> None:
    large = b"x" * 600_000

    async def use(tier: Tier) -> None:
        await tier.put("small", b"content")
        await tier.put("large", large)
        await tier.put("empty", b"")

    run(using(at("open/layout"), use))
    root = folder / "open" / "layout"
    # Written out: tag of stdout_raw, its length.
    assert (root / "ac" / sha256(b"small")).read_bytes() == b"\x2a\x07content"
    digest = b"\x0a\x40" + sha256(large).encode() + b"\x10\xc0\xcf\x24"
    file = b"\x0a\x06object" + b"\x12" + bytes([len(digest)]) + digest
    assert (root / "ac" / sha256(b"large")).read_bytes() == b"\x12" + bytes([len(file)]) + file
    assert (root / "cas" / sha256(large)).read_bytes() == large
    assert {each.name for each in (root / "cas").iterdir()} == {sha256(large), sha256(b"")}


@pytest.mark.parametrize(
    "garbage", [b"", b"<html></html>", b"\x2a\x08content", b"\x2a\x00", b"\xff" * 100, b"x" * 2**20]
)
def test_garbage_in_place_of_a_message(folder: Path, at: Callable[[str], str], run: Run, garbage: bytes) -> None:
    async def use(tier: Tier) -> None:
        await tier.put("a", b"content")
        (folder / "open" / "garbage" / "ac" / sha256(b"a")).write_bytes(garbage)
        assert await kind_of(tier.get("a", MOST)) == tiers.FAILED
        await tier.put("a", b"content")
        assert await tier.get("a", MOST) == b"content"

    run(using(at("open/garbage"), use))


@pytest.mark.parametrize("spoiled", [b"", b"x" * 599_999, b"x" * 600_001, b"y" * 600_000])
def test_another_content_than_its_name_says(folder: Path, at: Callable[[str], str], run: Run, spoiled: bytes) -> None:
    content = b"x" * 600_000

    async def use(tier: Tier) -> None:
        await tier.put("a", content)
        (folder / "open" / "spoiled" / "cas" / sha256(content)).write_bytes(spoiled)
        assert await kind_of(tier.get("a", MOST)) == tiers.FAILED

    run(using(at("open/spoiled"), use))


def test_a_content_that_the_cache_dropped(folder: Path, at: Callable[[str], str], run: Run) -> None:
    content = b"x" * 600_000

    async def use(tier: Tier) -> None:
        await tier.put("a", content)
        (folder / "open" / "dropped" / "cas" / sha256(content)).unlink()
        assert await tier.get("a", MOST) is None
        assert not await tier.contains("a")

    run(using(at("open/dropped"), use))


def test_a_cache_that_cannot_be_written(at: Callable[[str], str], run: Run) -> None:
    async def use(tier: Tier) -> None:
        assert await tier.get("a", MOST) is None
        assert await kind_of(tier.put("a", b"x")) == tiers.READ_ONLY
        assert await kind_of(tier.remove("a")) == tiers.READ_ONLY

    run(using(at("fixed"), use))


@pytest.mark.parametrize(
    ("path", "kind"),
    [("full", tiers.FULL), ("small", tiers.TOO_LARGE), ("closed", tiers.DENIED), ("moved", tiers.FAILED)],
)
def test_refusals(at: Callable[[str], str], run: Run, path: str, kind: str) -> None:
    async def use(tier: Tier) -> None:
        assert await kind_of(tier.put("a", b"x" * 100_000)) == kind

    run(using(at(path), use))


def test_redirects_are_not_followed(at: Callable[[str], str], run: Run) -> None:
    async def use(tier: Tier) -> None:
        assert await kind_of(tier.get("a", MOST)) == tiers.FAILED
        assert await kind_of(tier.contains("a")) == tiers.FAILED

    run(using(at("moved"), use))


def test_a_header_is_sent(at: Callable[[str], str], run: Run) -> None:
    async def use(tier: Tier) -> None:
        await tier.put("a", b"x")
        assert await tier.get("a", MOST) == b"x"

    run(using(at(f"header?header=x-key:{SECRET}"), use))
    assert run(using(at("header?header=x-key:wrong"), lambda tier: kind_of(tier.get("a", MOST)))) == tiers.DENIED
    assert status_of(at("header/x")) == 403
