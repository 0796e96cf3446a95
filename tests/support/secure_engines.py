"""The engines of ``engines.py`` behind TLS, and servers whose certificates must not be accepted."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from support.certificates import Authority, Issued
from support.engines import (
    Engine,
    Where,
    attempted,
    listening,
    run_nginx,
    start_http_cache,
    start_redis,
    start_seaweedfs,
)
from support.places import free_port


class Impostor(NamedTuple):
    """The port of a server, and the certificate that it shows."""

    port: int
    shown: Issued


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that the tests trust where they need one."""
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="session")
def shown(authority: Authority) -> Issued:
    """The certificate of the servers here."""
    return authority.issue("good")


@pytest.fixture(scope="session")
def rediss_engine(tmp_path_factory: pytest.TempPathFactory, shown: Issued) -> Iterator[Engine]:
    """Redis, by TLS alone."""
    yield from attempted(lambda stack: start_redis(tmp_path_factory.mktemp("rediss"), stack, shown))


@pytest.fixture(scope="session")
def https_engine(tmp_path_factory: pytest.TempPathFactory, shown: Issued) -> Iterator[Engine]:
    """nginx with WebDAV, by TLS alone."""
    yield from attempted(lambda stack: start_http_cache(tmp_path_factory.mktemp("https"), stack, shown))


@pytest.fixture(scope="session")
def secure_s3_engine(tmp_path_factory: pytest.TempPathFactory, shown: Issued) -> Iterator[Engine]:
    """SeaweedFS, whose S3 is reached by TLS."""
    yield from attempted(lambda stack: start_seaweedfs(tmp_path_factory.mktemp("s3s"), stack, shown))


@pytest.fixture(scope="session")
def impostors(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Mapping[str, Impostor]]:
    """Servers that answer 404 to every request, by what is wrong with their certificates."""
    folder = tmp_path_factory.mktemp("impostors")
    certificates = {
        "expired": authority.issue("expired", ends=-datetime.timedelta(days=1)),
        "elsewhere": authority.issue("elsewhere", hosts=("cache.test", "192.0.2.1")),
        "stranger": Authority(folder, "theirs").issue("stranger"),
    }
    found: dict[str, Impostor] = {}

    def start(stack: contextlib.ExitStack) -> Engine:
        found.update({name: Impostor(free_port(), shown) for name, shown in certificates.items()})
        servers = [f"server {{ {listening(*each)} return 404; }}" for each in found.values()]
        run_nginx(folder, stack, found["stranger"].port, "\n".join(servers))
        return Engine(at=lambda _: Where("", {}))

    for _ in attempted(start):
        yield found
