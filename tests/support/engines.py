"""Real servers for the remote tiers, on loopback; each fixture skips its tests where its server is not installed.

``pytest_plugins`` cannot name this module everywhere, so a conftest.py imports the fixtures that its tests want.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.certificates import Issued
from support.places import free_port, until
from xcached.tiers.engines import open_tier
from xcached.tiers.tier import Tier, TierError

SECRET = "secret-word-of-the-tests"  # noqa: S105 - of servers on loopback
BUCKET = "bucket"
# A free port may be taken before the server has it.
_ATTEMPTS = 3


class Where(NamedTuple):
    """A tier's address, and what the environment says beside it."""

    url: str
    environment: dict[str, str]


class Engine(NamedTuple):
    """A running engine, and addresses at which something is wrong; None where an engine has no such state."""

    # With a prefix that sets one test's objects apart.
    at: Callable[[str], Where]
    # The same at another port of 127.0.0.1.
    at_port: Callable[[int], Where] | None = None
    denied: Where | None = None
    missing: Where | None = None
    # What a test needs to look behind the engine: a folder, a port.
    folder: Path | None = None
    port: int = 0


class DidNotStartError(Exception):
    """A server ended, or did not answer in time."""


@contextlib.contextmanager
def running(command: list[str], folder: Path, is_ready: Callable[[], bool], **environment: str) -> Iterator[int]:
    """Run a server until the end of the block, and give its pid."""
    with (folder / "said").open("ab") as said:
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=os.environ | environment
        )
    try:
        until(lambda: is_ready() or child.poll() is not None, 30.0)
        if child.poll() is not None or not is_ready():
            raise DidNotStartError(f"{command[0]}: {(folder / 'said').read_text()[-3000:]}")
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10.0)


def listens(port: int) -> bool:
    """Return whether somebody accepts connections at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def status_of(url: str, method: str = "GET", content: bytes | None = None, **headers: str) -> int:
    """Return the status of an answer, or 0 without one."""
    request = urllib.request.Request(url, content, headers, method=method)  # noqa: S310 - our own server
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def attempted(start: Callable[[contextlib.ExitStack], Engine]) -> Iterator[Engine]:
    """Start an engine, again if its ports were taken, and end it."""
    for attempt in range(_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            try:
                engine = start(stack)
            except DidNotStartError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            yield engine
            return


@pytest.fixture(scope="session")
def folder_engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A folder."""
    root = tmp_path_factory.mktemp("folder")

    def at(prefix: str) -> Where:
        (root / prefix).mkdir(parents=True, exist_ok=True)
        return Where((root / prefix).as_uri(), {})

    return Engine(at, missing=Where((root / "nothing" / "there").as_uri(), {}), folder=root)


@pytest.fixture(scope="session")
def s3_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SeaweedFS, from PyPI, with a bucket and the users ``writer`` and ``reader``."""
    yield from attempted(lambda stack: start_seaweedfs(tmp_path_factory.mktemp("s3"), stack))


@pytest.fixture(scope="session")
def redis_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Redis, with a password."""
    yield from attempted(lambda stack: start_redis(tmp_path_factory.mktemp("redis"), stack))


@pytest.fixture(scope="session")
def http_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """nginx with WebDAV: /open/ for everybody, /closed/ with a password, /fixed/ without writing."""
    yield from attempted(lambda stack: start_http_cache(tmp_path_factory.mktemp("http"), stack))


def s3_environment(port: int, user: str, secret: str, scheme: str = "http") -> dict[str, str]:
    """Return what the environment says of a user of S3."""
    return {
        "AWS_ENDPOINT_URL": f"{scheme}://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": user,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }


def start_seaweedfs(folder: Path, stack: contextlib.ExitStack, shown: Issued | None = None) -> Engine:
    """Start SeaweedFS; with a certificate S3 is reached by TLS."""
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        pytest.skip("there is no SeaweedFS: it comes with the extra test")
    users = [("writer", ["Admin", "Read", "Write", "List"]), ("reader", ["Read", "List"])]
    (folder / "s3.json").write_text(
        json.dumps(
            {
                "identities": [
                    {"name": name, "actions": actions, "credentials": [{"accessKey": name, "secretKey": SECRET}]}
                    for name, actions in users
                ]
            }
        )
    )
    services = ("master", "volume", "filer", "s3")
    ports = {service: (free_port(), free_port()) for service in services}
    # It puts sockets there that no option names.
    for service, (_, grpc) in ports.items():
        stack.callback(Path(f"/tmp/seaweedfs-{service}-grpc-{grpc}.sock").unlink, missing_ok=True)
    plain = port = ports["s3"][0]
    secure: list[str] = []
    if shown:
        port = free_port()
        secure = [f"-s3.port.https={port}", f"-s3.cert.file={shown.certificate}", f"-s3.key.file={shown.key}"]
    command = [
        *(str(weed), "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{service}.port={http}" for service, (http, _) in ports.items()),
        *(f"-{service}.port.grpc={grpc}" for service, (_, grpc) in ports.items()),
        *("-filer", "-s3", f"-filer.localSocket={folder / 'f'}", f"-s3.localSocket={folder / 's'}"),
        *(
            "-s3.config=s3.json",
            "-s3.autoCreateBucket=false",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
        *secure,
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8", "-volume.minFreeSpace=1"),
    ]
    stack.enter_context(running(command, folder, lambda: status_of(f"http://127.0.0.1:{plain}/") == 403))
    bucket = f"http://127.0.0.1:{ports['filer'][0]}/buckets/{BUCKET}/"
    assert until(lambda: status_of(bucket, "POST") == 201), (folder / "said").read_text()[-3000:]

    def at(prefix: str, port: int = port, bucket: str = BUCKET, secret: str = SECRET) -> Where:
        environment = s3_environment(port, "writer", secret, "https" if shown else "http")
        return Where(f"s3://{bucket}/{prefix}", environment | trusting(shown))

    return Engine(
        at,
        at_port=lambda port: at("x", port),
        denied=at("x", secret="wrong-" + SECRET),
        missing=at("x", bucket="no-such-bucket"),
        port=port,
    )


def start_redis(folder: Path, stack: contextlib.ExitStack, shown: Issued | None = None, *options: str) -> Engine:
    """Start a Redis; with a certificate it is reached by TLS."""
    if not shutil.which("redis-server"):
        pytest.skip("there is no Redis: apt-get install redis-server")
    port = free_port()
    socket_path = folder / "r"
    command = ["redis-server", "--bind", "127.0.0.1", "--unixsocket", str(socket_path)]
    command += ["--port", "0", "--tls-port", str(port)] if shown else ["--port", str(port)]
    if shown:
        command += ["--tls-cert-file", str(shown.certificate), "--tls-key-file", str(shown.key)]
        command += options or ("--tls-auth-clients", "no")
    # Its title would change a moment after it listens, and the search for left-behind children would find another one.
    command += ["--set-proc-title", "no"]
    command += ["--requirepass", SECRET, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    stack.enter_context(running(command, folder, lambda: socket_path.exists() and listens(port)))

    def at(prefix: str, port: int = port, secret: str = SECRET) -> Where:
        scheme = "rediss" if shown else "redis"
        return Where(f"{scheme}://default:{secret}@127.0.0.1:{port}/0?prefix={prefix}:", trusting(shown))

    return Engine(
        at,
        at_port=lambda port: at("x", port),
        denied=at("x", secret="wrong-" + SECRET),
        missing=at("x")._replace(url=at("x").url.replace("/0?", "/99?")),
        folder=folder,
        port=port,
    )


def start_http_cache(folder: Path, stack: contextlib.ExitStack, shown: Issued | None = None) -> Engine:
    """Start nginx as an HTTP cache; with a certificate it is reached by TLS."""
    port = free_port()
    for name in ("open", "closed", "fixed"):
        (folder / "files" / name).mkdir(parents=True, exist_ok=True)
    (folder / "passwords").write_text(f"user:{{PLAIN}}{SECRET}\n")
    writing = "dav_methods PUT DELETE; create_full_put_path on;"
    servers = f"""
        server {{
            {listening(port, shown)} root {folder}/files; client_max_body_size 64m;
            location /open/ {{ {writing} }}
            location /closed/ {{ {writing} auth_basic "x"; auth_basic_user_file {folder}/passwords; }}
            location /fixed/ {{ }}
            location /small/ {{ {writing} client_max_body_size 1k; }}
            location /full/ {{ return 507; }}
            location /moved/ {{ return 302 /open/; }}
            location /header/ {{
                if ($http_x_key != "{SECRET}") {{ return 403; }}
                {writing}
            }}
        }}"""
    run_nginx(folder, stack, port, servers)

    def at(path: str, port: int = port, secret: str = SECRET) -> Where:
        return Where(f"{'https' if shown else 'http'}://user:{secret}@127.0.0.1:{port}/{path}", trusting(shown))

    return Engine(
        at=lambda prefix: at(f"closed/{prefix}"),
        at_port=lambda port: at("closed/x", port),
        denied=at("closed/x", secret="wrong-" + SECRET),
        folder=folder / "files",
        port=port,
    )


def run_nginx(folder: Path, stack: contextlib.ExitStack, port: int, servers: str) -> None:
    """Run nginx with these servers, of which one listens at the port."""
    if not (nginx := shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")):
        pytest.skip("there is no nginx: apt-get install nginx-light")
    # The others are for what the engine does not use.
    temporary = "\n".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(f"""
        {"user root;" if os.geteuid() == 0 else ""}
        daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
        events {{ worker_connections 128; }}
        http {{
            access_log off; {temporary}
            {servers}
        }}""")
    command = [nginx, "-e", str(folder / "errors"), "-p", str(folder), "-c", str(folder / "nginx.conf")]

    def is_ready() -> bool:
        # Its title changes a moment after it listens, and the search for left-behind children would find another one.
        try:
            pid = (folder / "pid").read_text().strip()
            return listens(port) and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"nginx: master")
        except OSError:
            return False

    stack.enter_context(running(command, folder, is_ready))


def listening(port: int, shown: Issued | None) -> str:
    """Return the lines by which a server of nginx listens."""
    if shown is None:
        return f"listen 127.0.0.1:{port};"
    return f"listen 127.0.0.1:{port} ssl; ssl_certificate {shown.certificate}; ssl_certificate_key {shown.key};"


def trusting(shown: Issued | None) -> dict[str, str]:
    """Return what the environment says of the authority that has issued a certificate."""
    return {"SSL_CERT_FILE": str(shown.authority)} if shown else {}


async def using(address: str, use: Callable[[Tier], Any]) -> Any:
    """Use the tier at an address, and close it."""
    tier = open_tier(address, 10.0)
    try:
        return await use(tier)
    finally:
        await tier.close()


async def kind_of(attempt: Awaitable[object]) -> str:
    """Return the kind of trouble that an attempt meets; no secret may be in its text."""
    with pytest.raises(TierError) as caught:
        await attempt
    assert SECRET not in f"{caught.value}"
    return str(caught.value.kind)
