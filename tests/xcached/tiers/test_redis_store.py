"""Only Redis does this."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from support.engines import SECRET, Engine, kind_of, using

from xcached.tiers import redis_store
from xcached.tiers import tier as tiers
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import Tier

Run = Callable[[Any], Any]
MOST = 2**20


@pytest.fixture
def client(redis_engine: Engine) -> Iterator[Any]:
    """Somebody else who uses the same Redis."""
    with contextlib.closing(redis.Redis(port=redis_engine.port, password=SECRET)) as made:
        yield made


def test_the_socket_of_a_redis(redis_engine: Engine, run: Run, client: Any) -> None:
    address = f"redis+unix://default:{SECRET}@{redis_engine.folder}/r?db=3&prefix=unix:"
    run(using(address, lambda tier: tier.put("a/b", b"content")))
    client.select(3)
    assert client.get("unix:a/b") == b"content"


def test_the_default_prefix_and_the_database_in_the_path(redis_engine: Engine, run: Run, client: Any) -> None:
    address = f"redis://:{SECRET}@127.0.0.1:{redis_engine.port}/4"
    run(using(address, lambda tier: tier.put("a", b"content")))
    client.select(4)
    assert client.keys() == [b"xcache:a"]


def test_objects_expire(redis_engine: Engine, run: Run, client: Any) -> None:
    address = redis_engine.at("ttl").url

    async def use(tier: Tier) -> None:
        await tier.put("a", b"1")
        assert await tier.create("b", b"2")
        assert 29 * 86400 < client.ttl("ttl:a") <= 30 * 86400
        assert 29 * 86400 < client.ttl("ttl:b") <= 30 * 86400

    run(using(address + "&ttl=30d", use))

    async def wait(tier: Tier) -> None:
        await tier.put("c", b"")
        assert await tier.contains("c")
        await asyncio.sleep(0.3)
        assert not await tier.contains("c")

    run(using(address + "&ttl=200ms", wait))

    async def keep(tier: Tier) -> None:
        await tier.put("a", b"1")
        assert client.ttl("ttl:a") == -1

    run(using(address, keep))


def test_a_full_redis(redis_engine: Engine, run: Run, client: Any) -> None:
    async def use(tier: Tier) -> None:
        await tier.put("a", b"x" * 1000)
        client.config_set("maxmemory", "1mb")
        try:
            assert await kind_of(tier.put("b", b"x" * 5 * MOST)) == tiers.FULL
            assert await kind_of(tier.create("b", b"x" * 5 * MOST)) == tiers.FULL
            assert await tier.get("a", MOST) == b"x" * 1000
            await tier.remove("a")
        finally:
            client.config_set("maxmemory", "0")

    run(using(redis_engine.at("full").url, use))


def test_a_replica(redis_engine: Engine, run: Run, client: Any) -> None:
    async def use(tier: Tier) -> None:
        await tier.put("a", b"x")
        client.replicaof("127.0.0.1", "1")
        try:
            assert await kind_of(tier.put("a", b"y")) == tiers.READ_ONLY
            assert await kind_of(tier.remove("a")) == tiers.READ_ONLY
            assert await tier.get("a", MOST) == b"x"
        finally:
            client.replicaof("NO", "ONE")

    run(using(redis_engine.at("replica").url, use))


def test_a_user_who_may_only_read(redis_engine: Engine, run: Run, client: Any) -> None:
    client.acl_setuser(
        "reader", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+@read", "+multi", "+exec"]
    )
    address = redis_engine.at("acl").url.replace("default:", "reader:")

    async def use(tier: Tier) -> None:
        assert await tier.get("a", MOST) is None
        assert await kind_of(tier.put("a", b"y")) == tiers.DENIED

    run(using(address, use))


def test_a_password_is_wanted(redis_engine: Engine, run: Run) -> None:
    address = f"redis://127.0.0.1:{redis_engine.port}"
    assert run(using(address, lambda tier: kind_of(tier.get("a", MOST)))) == tiers.DENIED


def test_a_redis_with_as_many_clients_as_it_takes(redis_engine: Engine, run: Run, client: Any) -> None:
    client.ping()
    client.config_set("maxclients", "1")
    try:
        kind = run(using(redis_engine.at("clients").url, lambda tier: kind_of(tier.get("a", MOST))))
    finally:
        client.config_set("maxclients", "10000")
    assert kind in (tiers.FULL, tiers.UNREACHABLE)


def test_a_value_that_redis_does_not_take(redis_engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "_MOST_BYTES", 1000)

    async def use(tier: Tier) -> None:
        await tier.put("a", b"x" * 1000)
        assert await kind_of(tier.put("a", b"x" * 1001)) == tiers.TOO_LARGE

    run(using(redis_engine.at("large").url, use))


def test_what_others_keep_under_the_prefix(redis_engine: Engine, run: Run, client: Any) -> None:
    client.rpush("other[*]:list", "x")
    client.set(b"other[*]:\xff\xfe", "x")
    client.set("other[*]:Other", "x")
    client.set("other*:c", "x")

    async def use(tier: Tier) -> None:
        await tier.put("a", b"x")
        assert [each.name async for each in tier.listed("")] == ["a"]
        assert await kind_of(tier.get("list", MOST)) == tiers.FAILED

    run(using(redis_engine.at("other[*]").url, use))


def test_a_redis_that_stands_still(redis_engine: Engine, run: Run, client: Any) -> None:
    async def main() -> None:
        tier = open_tier(redis_engine.at("still").url, 0.5)
        await tier.put("a", b"x")
        client.client_pause(2000)
        begin = time.monotonic()
        # More than there are connections.
        kinds = await asyncio.gather(*(kind_of(tier.get("a", MOST)) for _ in range(40)))
        assert set(kinds) == {tiers.UNREACHABLE}
        assert time.monotonic() - begin < 1.5
        client.client_unpause()
        assert await tier.get("a", MOST) == b"x"
        await tier.close()

    run(main())
