"""Addresses: which engine they choose, what they may say, and what of them is shown."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import REPOSITORY

from xcache.errors import ConfigError
from xcached.tiers.aws_files import settings_of_files
from xcached.tiers.engines import open_tier, public_url

LIBRARIES = ("httpx", "obstore", "redis")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("s3://user:secret@bucket/prefix", "s3://bucket/prefix"),
        ("redis://:secret@host/2?prefix=a:&ttl=30d", "redis://host/2?prefix=a:&ttl=30d"),
        ("redis+unix://:secret@/run/redis.sock?db=1", "redis+unix:///run/redis.sock?db=1"),
        ("https://user:sec%2Fret@[::1]:8080/a%20b/", "https://[::1]:8080/a%20b/"),
        ("https://host/?header=x-key:secret&token=secret", "https://host/"),
        ("https://host/#secret", "(an address that cannot be understood)"),
        ("https://host:secret/", "(an address that cannot be understood)"),
        ("https://[secret/", "(an address that cannot be understood)"),
        ("secret", "(an address that cannot be understood)"),
        ("https:secret", "(an address that cannot be understood)"),
        ("", "(an address that cannot be understood)"),
        ("file:///mnt/cache", "file:///mnt/cache"),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    assert public_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "ftp://host/secret",
        "s3:///prefix",
        "s3://bucket:80/",
        "s3://user:secret@bucket/",
        "s3://bucket/?region=secret",
        "file://host/mnt/cache",
        "file:///",
        "file:relative",
        "redis:///",
        "redis://host/x",
        "redis://host?ttl=soon",
        "redis://host?ttl=0",
        "redis://host?pasword=secret",
        "redis+unix://",
        "https:///path",
        "https://host/?header=secret",
        "https://host/?header=x:secret%0ay:z",
        "https://host:99999/",
        "https://host/#secret",
    ],
)
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_tier(url, 1.0)
    assert "secret" not in str(caught.value).replace("ftp://host/secret", "")


def test_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME is not set"):
        open_tier("az://container/prefix", 1.0)


@pytest.mark.parametrize(
    ("url", "library"),
    [("s3://bucket", "obstore"), ("redis://host", "redis"), ("https://host", "httpx"), ("file:///mnt", None)],
)
def test_only_the_engine_of_an_address_is_imported(url: str, library: str | None) -> None:
    program = f"""
import sys
from xcached.tiers.engines import open_tier, public_url
public_url({url!r})
print([each for each in {LIBRARIES} if each in sys.modules])
open_tier({url!r}, 1.0)
print([each for each in {LIBRARIES} if each in sys.modules])
"""
    assert printed(program) == ["[]", str([library] if library else [])]


@pytest.mark.parametrize(
    ("url", "library"), [("s3://bucket", "obstore"), ("redis://:secret@host", "redis"), ("https://host", "httpx")]
)
def test_a_library_that_is_missing(url: str, library: str) -> None:
    program = f"""
import sys
from xcached.tiers.engines import open_tier
sys.modules[{library!r}] = None
try:
    open_tier({url!r}, 1.0)
except Exception as error:
    print(type(error).__name__, error)
"""
    [said] = printed(program)
    assert said == (
        f"ConfigError {public_url(url)} needs {library}, which is not installed: pip install 'jax-xcache[remote]'"
    )


def printed(program: str) -> list[str]:
    path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'daemon'}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_tier_is_opened_without_asking_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{place}")

        async def main() -> None:
            for url in (f"http://{place}", f"redis://{place}", f"file://{tmp_path}/none", "s3://bucket"):
                await open_tier(url, 1.0).close()

        asyncio.run(main())
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not any(tmp_path.iterdir())


def test_keys_from_files(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = one\naws_secret_access_key = two%\n[other]\naws_access_key_id=three\n"
        "aws_secret_access_key=four\naws_session_token=five\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = here\n[profile other]\nregion = there\nendpoint_url = https://store\n"
    )
    default = {"access_key_id": "one", "secret_access_key": "two%"}
    assert settings_of_files({}, tmp_path) == default | {"region": "here"}
    assert settings_of_files({"AWS_REGION": "x"}, tmp_path) == default
    assert settings_of_files({"AWS_ACCESS_KEY_ID": "x", "AWS_REGION": "x"}, tmp_path) == {}
    assert settings_of_files({"AWS_PROFILE": "other"}, tmp_path) == {
        "access_key_id": "three",
        "secret_access_key": "four",
        "session_token": "five",
        "region": "there",
        "endpoint": "https://store",
    }
    assert settings_of_files({"AWS_PROFILE": "none"}, tmp_path) == {}
    (tmp_path / ".aws" / "credentials").write_bytes(b"\xff[[")
    assert settings_of_files({}, tmp_path) == {"region": "here"}
    assert settings_of_files({}, tmp_path / "none") == {}
