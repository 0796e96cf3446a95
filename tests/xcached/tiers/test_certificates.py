"""Engines behind TLS: only a server whose certificate is good is believed."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.engines import Engine, Where, start_redis
from support.marks import thorough
from support.operations import kinds
from support.secure_engines import Impostor

from xcache.errors import ConfigError
from xcached.tiers import certificates
from xcached.tiers import tier as tiers
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import TierError

Run = Callable[[Any], Any]
Use = Callable[[Where], str]
MOST = 2**20
REFUSED = "the certificate of the server is not accepted: "
# OpenSSL says it in other words than the library of obstore.
SAID = {
    "expired": ("certificate has expired", "it has expired"),
    "elsewhere": ("IP address mismatch", "it is for another host"),
    "stranger": ("unable to get local issuer certificate", "no trusted authority has issued it"),
}


@pytest.fixture(scope="module", params=thorough(["rediss", "https", "secure_s3"], usual=["rediss", "https"]))
def secure(request: pytest.FixtureRequest) -> Engine:
    """Each engine behind TLS."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


def at(engine: Engine, port: int) -> Where:
    assert engine.at_port is not None
    return engine.at_port(port)


async def problem_of(url: str) -> TierError:
    tier = open_tier(url, 10.0)
    try:
        with pytest.raises(TierError) as caught:
            await tier.get("a", MOST)
        return caught.value
    finally:
        await tier.close()


@pytest.mark.parametrize("fault", SAID)
def test_a_bad_certificate_is_refused(
    secure: Engine, impostors: Mapping[str, Impostor], use: Use, run: Run, fault: str
) -> None:
    url = use(at(secure, impostors[fault].port))
    # Each operation ends within this second.
    assert set(run(kinds(url)).values()) == {tiers.UNTRUSTED}
    said = str(run(problem_of(url)))
    assert said.startswith(tuple(REFUSED + each for each in SAID[fault]))


def test_nothing_but_the_authority_was_missing(
    https_engine: Engine, impostors: Mapping[str, Impostor], use: Use, run: Run
) -> None:
    """The same server answers once its authority is named, and ours does not any more."""
    theirs = {"SSL_CERT_FILE": str(impostors["stranger"].shown.authority)}
    url = use(at(https_engine, impostors["stranger"].port)._replace(environment=theirs))

    async def found() -> bytes | None:
        tier = open_tier(url, 10.0)
        try:
            return await tier.get("a", MOST)
        finally:
            await tier.close()

    assert run(found()) is None
    assert run(problem_of(https_engine.at("x").url)).kind == tiers.UNTRUSTED


def test_the_authorities_of_the_system_are_not_enough(secure: Engine, run: Run, use: Use, monkeypatch) -> None:
    url = use(secure.at("x"))
    monkeypatch.delenv("SSL_CERT_FILE")
    assert run(problem_of(url)).kind == tiers.UNTRUSTED


def test_a_server_without_tls(secure: Engine, http_engine: Engine, run: Run, use: Use) -> None:
    url = use(at(secure, http_engine.port))
    found = run(kinds(url))
    assert set(found.values()) <= {tiers.FAILED, tiers.UNREACHABLE}


def test_a_server_with_tls_is_not_taken_for_one_without(
    rediss_engine: Engine, https_engine: Engine, run: Run, use: Use
) -> None:
    for engine in (rediss_engine, https_engine):
        url = use(engine.at("x")).replace("rediss:", "redis:").replace("https:", "http:")
        assert run(problem_of(url)).kind in {tiers.FAILED, tiers.UNREACHABLE}


def test_a_server_that_wants_certificates_of_clients(authority: Authority, run: Run, use: Use, tmp_path: Path) -> None:
    """As Redis does unless told otherwise."""
    with contextlib.ExitStack() as stack:
        options = ("--tls-ca-cert-file", str(authority.file))
        engine = start_redis(tmp_path, stack, authority.issue("strict"), *options)
        said = str(run(problem_of(use(engine.at("x")))))
    # It hangs up at once, and what it said may be lost with the connection.
    assert said.startswith(
        ("the server wants a certificate of its clients, and xcache has none", "the connection failed")
    )


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
def test_a_file_of_authorities_that_is_of_no_use_is_said(
    secure: Engine, use: Use, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_bytes(content)
    url = use(secure.at("x")._replace(environment=secure.at("x").environment | {"SSL_CERT_FILE": str(file)}))
    with pytest.raises(ConfigError, match=f"SSL_CERT_FILE names {file}, which cannot be used: "):
        open_tier(url, 1.0)


def test_a_system_without_authorities_has_those_of_a_library(monkeypatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: None)
    made = certificates.context()
    assert made.cert_store_stats()["x509_ca"] > 50
    assert (made.check_hostname, made.verify_mode) == (True, ssl.CERT_REQUIRED)
