"""The engines that the tests of tiers run against."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import obstore
import pytest
from support.azurite import azure_engine as azure_engine
from support.engines import Engine, Where
from support.engines import folder_engine as folder_engine
from support.engines import http_engine as http_engine
from support.engines import redis_engine as redis_engine
from support.engines import s3_engine as s3_engine
from support.marks import thorough
from support.secure_engines import authority as authority
from support.secure_engines import https_engine as https_engine
from support.secure_engines import impostors as impostors
from support.secure_engines import rediss_engine as rediss_engine
from support.secure_engines import secure_s3_engine as secure_s3_engine
from support.secure_engines import shown as shown

from xcached.tiers import object_store

_NUMBERS = itertools.count()
# test_certificates.py has what is special about TLS.
_KINDS = ["folder", "s3", "redis", "http", *thorough(["rediss", "https", "secure_s3", "azure"], usual=())]


@pytest.fixture(scope="session", autouse=True)
def _obstore_has_its_threads() -> None:
    """Have obstore open what it keeps as long as the process lives, before a test counts descriptors."""

    async def use() -> None:
        await obstore.put_async(obstore.store.MemoryStore(), "name", b"")

    asyncio.run(use())


@pytest.fixture(autouse=True)
def _connections_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have obstore close its idle connections before the test is over."""
    monkeypatch.setattr(object_store, "_IDLE_SECONDS", 1.0)


@pytest.fixture(scope="session", params=_KINDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Where], str]]:
    """Set the environment that an address needs, and return the address."""

    def set_it(where: Where) -> str:
        for name, value in where.environment.items():
            monkeypatch.setenv(name, value)
        return where.url

    yield set_it


@pytest.fixture
def address(engine: Engine, use: Callable[[Where], str]) -> str:
    """The address of a tier without objects."""
    return use(engine.at(f"t{next(_NUMBERS)}"))


@pytest.fixture
def run() -> Callable[[Any], Any]:
    """Run a coroutine in a loop of its own, with a bound."""

    def run_it(coroutine: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(coroutine, 60.0)

        return asyncio.run(bounded())

    return run_it
