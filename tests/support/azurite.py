"""Azurite, Microsoft's emulator of Azure's blobs, from npm."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engines import Engine, Where, attempted, listens, running, status_of
from support.places import free_port

# They are the same for everybody.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_WRONG_KEY = base64.b64encode(b"wrong-key-of-the-tests").decode()
_CONTAINER = "container"


@pytest.fixture(scope="session")
def azure_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Azurite, installed by npm for these tests."""
    if not (npm := shutil.which("npm")):
        pytest.skip("there is no npm: apt-get install npm")
    folder = tmp_path_factory.mktemp("azurite")
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), "azurite@3"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not install Azurite within 150 s")
    if done.returncode:
        pytest.skip(f"npm does not install Azurite: {done.stderr[-200:]}")
    yield from attempted(lambda stack: _start(folder, stack))


def _start(folder: Path, stack: contextlib.ExitStack) -> Engine:
    port = free_port()
    program = str(folder / "node_modules" / ".bin" / "azurite-blob")
    command = [program, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--inMemoryPersistence"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    stack.enter_context(running(command, folder, lambda: listens(port)))
    assert _make_container(port) == 201

    def at(prefix: str, container: str = _CONTAINER, port: int = port, key: str = _KEY) -> Where:
        return Where(
            f"az://{container}/{prefix}",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": key,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
            },
        )

    return Engine(
        at,
        at_port=lambda port: at("x", port=port),
        denied=at("x", key=_WRONG_KEY),
        missing=at("x", container="no-such-container"),
        port=port,
    )


def _make_container(port: int) -> int:
    date = email.utils.formatdate(usegmt=True)
    # "Authorize with Shared Key" of Azure's documents; of an emulator the account is in the path once more.
    headers = f"x-ms-date:{date}\nx-ms-version:2021-12-02\n"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{_CONTAINER}\nrestype:container"
    signed = "PUT" + "\n" * 12 + headers + resource
    signature = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    return status_of(
        f"http://127.0.0.1:{port}/{_ACCOUNT}/{_CONTAINER}?restype=container",
        "PUT",
        **{
            "x-ms-date": date,
            "x-ms-version": "2021-12-02",
            "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}",
        },
    )
