"""The check of a tier, against each engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.engines import Engine, Where

from xcache.config.remotes import remote
from xcache.wire.names import Names
from xcached.tiers import checking
from xcached.tiers.engines import open_tier
from xcached.tiers.guarded import GuardedTier
from xcached.tiers.tier import DENIED, FAILED, MISSING, READ_ONLY, UNREACHABLE, Tier, TierError

SECONDS = 20.0


async def checked(url: str, options: str = "") -> checking.Facts:
    each = remote(f"{url}{'&' if '?' in url else '?'}{options}" if options else url)
    engine = open_tier(each.url, SECONDS)
    try:
        found = await checking.checked(GuardedTier(each, engine, SECONDS), Names(""), SECONDS)
        if engine.can_list:
            assert [one async for one in engine.listed("")] == []
        return found
    except TierError:
        return found
    finally:
        await engine.close()


@pytest.mark.parametrize("options", ["", "readonly=1", "writeonly=1"])
def test_each_engine_passes_and_keeps_nothing(address, run, options):
    found = run(checked(address, options))
    assert (found["problem"], found["not_removed"]) == ("", "")


def test_what_is_wrong_has_its_kind(engine: Engine, use: Callable[[Where], str], run):
    for where, kind in ((engine.denied, DENIED), (engine.missing, MISSING)):
        if where is not None:
            assert run(checked(use(where)))["kind"] == kind


class Odd:
    """An engine that does one thing wrong."""

    can_create = can_list = False

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.objects: dict[str, bytes] = {}

    async def get(self, name: str, _most: int) -> bytes | None:
        if self.wrong == "hangs":
            await asyncio.sleep(60.0)
        return {"forgets": None, "garbles": b"x"}.get(self.wrong, self.objects.get(name))

    async def put(self, name: str, content: bytes) -> None:
        self.objects[name] = content

    async def remove(self, name: str) -> None:
        if self.wrong == "keeps":
            raise TierError(READ_ONLY, "no such method")
        del self.objects[name]


@pytest.mark.parametrize(
    ("wrong", "kind", "problem"),
    [
        ("forgets", FAILED, "what is read back is nothing"),
        ("garbles", FAILED, "what is read back is not what was written"),
        ("hangs", UNREACHABLE, "no answer within 0.1 s"),
        ("keeps", "", ""),
    ],
)
def test_an_engine_that_is_odd_is_found_out(run: Callable[[Any], Any], wrong, kind, problem):
    engine: Any = Odd(wrong)
    tier: Tier = engine
    found = run(checking.checked(GuardedTier(remote("file:///x"), tier, SECONDS), Names(""), 0.1))
    assert (found["kind"], found["problem"]) == (kind, problem)
    assert found["not_removed"] == ("no such method" if wrong == "keeps" else "")
    # What was written is gone where that is possible.
    assert bool(engine.objects) == (wrong in ("keeps", "hangs"))
