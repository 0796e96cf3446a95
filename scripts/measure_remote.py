"""Measures warm starts from remote tiers beside a local warm start and JAX's own cache; prints a table in Markdown.

Each start of a fresh host has a store of its own, empty but for the digests of jaxlib's libraries, and a daemon that
runs already. A long link is a relay on loopback that delivers late (measure_relay.py), so that no root is needed.

    scripts/measure --remote [--rounds 7] [--programs many-small,training] [--ways local,jax,folder,...]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent
sys.path[:0] = [str(SCRIPTS / "benchmark")]

import peers  # noqa: E402
import runs  # noqa: E402

# Seconds of a round trip on the long link.
ROUND_TRIP = 0.02
AWAY = f", {ROUND_TRIP * 1000:.0f} ms away"
BUCKET = "measured"
READY_WITHIN, SENT_WITHIN = 60.0, 120.0
LOCAL, CONFIGURED, JAX, UNKNOWN = "local", "local, tier configured", "jax", "folder, jaxlib not yet known"
BUNDLE = "bundle in place"


class Tier(NamedTuple):
    """An address, and what the daemon's environment says beside it."""

    url: str
    environment: dict[str, str]


class Seen(NamedTuple):
    """One start: its seconds, those of processors with the daemon's, and the requests and bytes of the tier."""

    wall: float
    processors: float
    gets: int
    size: int


@contextlib.contextmanager
def served(command: list[str], folder: Path, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Run a server until the end of the block."""
    with (folder / "said").open("ab") as said:
        server = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + READY_WITHIN
        while not is_ready():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} did not start: {(folder / 'said').read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def engines(root: Path) -> Iterator[dict[str, Tier]]:
    """Run the servers that are installed, each also behind a long link."""
    found: dict[str, Tier] = {}
    with contextlib.ExitStack() as stack:
        if shutil.which("redis-server"):
            folder, port = root / "redis", free_port()
            folder.mkdir()
            command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
            stack.enter_context(served(command, folder, lambda: listens(port)))
            found |= {f"redis{suffix}": Tier(f"redis://127.0.0.1:{to}", {}) for suffix, to in both(stack, root, port)}
        weed = Path(sys.executable).with_name("weed")
        if weed.exists():
            folder, port = root / "s3", free_port()
            ports = {name: free_port() for name in ("master", "volume", "filer")} | {"s3": port}
            folder.mkdir()
            command = [str(weed), "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1"]
            command += ["-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.iam=false", "-s3.port.iceberg=0"]
            command += [f"-{name}.port={number}" for name, number in ports.items()]
            # It would take the same port and ten thousand.
            command += [f"-{name}.port.grpc={free_port()}" for name in ports]
            command += ["-s3.port.lance=0", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
            command += ["-volume.max=8", "-volume.minFreeSpace=1"]
            stack.enter_context(served(command, folder, lambda: has_bucket(ports["filer"])))
            for suffix, to in both(stack, root, port):
                environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{to}", "AWS_SKIP_SIGNATURE": "true"}
                found[f"s3{suffix}"] = Tier(f"s3://{BUCKET}/xcache", environment | {"AWS_REGION": "us-east-1"})
        yield found


def free_port() -> int:
    """Return a port that was free a moment ago, as was the next one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def both(stack: contextlib.ExitStack, root: Path, port: int) -> list[tuple[str, int]]:
    """Run a relay to a port; return what to call either way, and its port."""
    relay = [sys.executable, str(SCRIPTS / "measure_relay.py"), str(port + 1), str(port), str(ROUND_TRIP)]
    stack.enter_context(served(relay, root, lambda: listens(port + 1)))
    return [("", port), (AWAY, port + 1)]


def listens(port: int) -> bool:
    """Return whether somebody accepts connections at a port."""
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def has_bucket(port: int) -> bool:
    """Make the bucket; return whether it is there."""
    url = f"http://127.0.0.1:{port}/buckets/{BUCKET}/"
    with contextlib.suppress(OSError):
        request = urllib.request.Request(url, method="POST")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5).close()
        return True
    return False


class Host:
    """A store with a daemon that shares by a tier, if one is given, and signs."""

    def __init__(self, folder: Path, keys: Mapping[str, str], tier: Tier | None, memo: Path | None) -> None:
        self.store = Path(tempfile.mkdtemp(dir=folder))
        self.environment = os.environ | peers.xcache(self.store)
        if memo is not None:
            shutil.copy(memo, self.store / memo.name)
        settings = dict(keys)
        if tier is not None:
            # The programs of a measurement have no hurry: what is late would be compiled, and show as a miss.
            settings |= tier.environment | {"XCACHE_REMOTE": tier.url, "XCACHE_REMOTE_TIMEOUT": "30s"}
        self.daemon = peers.Daemon(self.store, **settings)

    def remote(self) -> dict[str, Any]:
        """Return the counts of the tier."""
        command = [Path(sys.executable).with_name("xcache"), "status", "--json"]
        said = subprocess.run(command, env=self.environment, capture_output=True, check=True).stdout
        found: list[dict[str, Any]] = json.loads(said)["remotes"]
        return found[0] if found else {"gets": 0, "bytes_read": 0, "waiting": 0, "problem": ""}

    def run(self, program: str) -> Seen:
        """Run a program, which must compile nothing."""
        before = self.daemon.cpu()
        sample = runs.Process(program, self.environment).finish()
        processors = sample["cpu"] + self.daemon.cpu() - before
        counts = self.remote()
        if sample["compiled"] or sample["stats"]["errors"] or counts["problem"]:
            print(f"not a warm start: {sample['compiled']} compiled, {sample['stats']}, {counts}", file=sys.stderr)
        return Seen(sample["wall"], processors, counts["gets"], counts["bytes_read"])

    def end(self) -> None:
        """Stop the daemon, and leave nothing behind."""
        self.daemon.stop()
        shutil.rmtree(self.store)


class Field:
    """All ways to start, for one program."""

    def __init__(
        self, root: Path, program: str, ways: Sequence[str], tiers: Mapping[str, Tier], keys: Mapping[str, str]
    ) -> None:
        self._root, self._program, self._tiers, self._keys = root, program, tiers, keys
        self._memo = root / "library-digests.json"
        if not self._memo.exists():
            first = Host(root, keys, None, None)
            runs.Process(program, first.environment).finish()
            shutil.copy(first.store / self._memo.name, self._memo)
            first.end()
        self._jax = os.environ | peers.built_in(root / f"jax-{program}")
        runs.Process(program, self._jax).finish()
        # Each engine gets what a host of its own has compiled; the long link leads to the same.
        for name, tier in tiers.items():
            if AWAY not in name and any(way.startswith(name) for way in ways):
                self._fill(Host(root, keys, tier, self._memo)).end()
        self.local = self._fill(Host(root, keys, None, self._memo))
        bundle = root / f"{program}.xcb"
        command = [Path(sys.executable).with_name("xcache"), "export", "-o", bundle]
        subprocess.run(command, env=self.local.environment, check=True, capture_output=True)
        self._bundle = Tier("", {"XCACHE_BUNDLES": str(bundle)})
        folder = tiers["folder"]
        self.configured = self._fill(Host(root, keys, folder, self._memo))

    def _fill(self, host: Host) -> Host:
        runs.Process(self._program, host.environment).finish()
        deadline = time.monotonic() + SENT_WITHIN
        # The list of a run is queued when the program has ended, and sent after some seconds.
        time.sleep(0.5)
        while host.remote()["waiting"]:
            if time.monotonic() > deadline:
                raise SystemExit(f"the tier did not take what was compiled: {host.remote()}")
            time.sleep(0.2)
        return host

    def start(self, way: str) -> Seen:
        """Start the program once."""
        if way == LOCAL:
            return self.local.run(self._program)
        if way == CONFIGURED:
            before = self.configured.remote()
            seen = self.configured.run(self._program)
            return seen._replace(gets=seen.gets - before["gets"], size=seen.size - before["bytes_read"])
        if way == JAX:
            sample = runs.Process(self._program, self._jax).finish()
            return Seen(sample["wall"], sample["cpu"], 0, 0)
        is_known = way != UNKNOWN
        tier = self._bundle if way == BUNDLE else self._tiers[way if is_known else "folder"]
        host = Host(self._root, self._keys, tier, self._memo if is_known else None)
        try:
            return host.run(self._program)
        finally:
            host.end()

    def end(self) -> None:
        """Stop the daemons."""
        self.local.end()
        self.configured.end()


def new_keys(root: Path) -> dict[str, str]:
    """Make a key that signs and is trusted."""
    keys = {"XCACHE_SIGNING_KEY": str(root / "signing-key"), "XCACHE_TRUSTED_KEYS": str(root / "trusted-keys")}
    environment = os.environ | keys | {"XDG_CONFIG_HOME": str(root)}
    xcache = str(Path(sys.executable).with_name("xcache"))
    command = [xcache, "key", "new", "measured"]
    made = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    line = made.stdout.strip()
    subprocess.run([xcache, "key", "trust", line], env=environment, check=True, capture_output=True)
    return keys


def printed(program: str, seen: Mapping[str, list[Seen]]) -> None:
    """Print the table of one program."""
    print(f"\n| {program} | wall (s) | fastest (s) | of a local start | processors (s) | requests | bytes |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for way, starts in seen.items():
        # Each round is compared with its own local start, because the load of the machine changes.
        ratio = statistics.median(each.wall / other.wall for each, other in zip(starts, seen[LOCAL], strict=True))
        wall, processors, gets, size = (statistics.median(column) for column in zip(*starts, strict=True))
        fastest = min(each.wall for each in starts)
        print(
            f"| {way} | {wall:.2f} | {fastest:.2f} | {ratio:.2f} | {processors:.2f} | {gets:.0f} | {size:,.0f} |",
            flush=True,
        )


def say_when(rounds: int) -> None:
    """Print the time, the commit and the load of the machine; end servers when this process is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, check=True, text=True, cwd=SCRIPTS)
    print(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit.stdout.strip()},", end=" ")
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, medians of {rounds} rounds")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", default="many-small,training")
    parser.add_argument("--ways", default="")
    options = parser.parse_args()
    say_when(options.rounds)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xc", dir="/tmp")))
        keys = new_keys(root)
        tiers = stack.enter_context(engines(root))
        for program in options.programs.split(","):
            folder = root / f"tier-{program}"
            folder.mkdir()
            tiers["folder"] = Tier(folder.as_uri(), {})
            all_ways = [
                LOCAL,
                CONFIGURED,
                JAX,
                BUNDLE,
                "folder",
                UNKNOWN,
                *(name for name in sorted(tiers) if name != "folder"),
            ]
            ways = [way for way in all_ways if way in (*options.ways.split("+"), LOCAL)] if options.ways else all_ways
            field = Field(root, program, ways, tiers, keys)
            seen: dict[str, list[Seen]] = {way: [] for way in ways}
            try:
                for number in range(options.rounds):
                    for way in peers.rotated(ways, number):
                        seen[way].append(field.start(way))
            finally:
                field.end()
            printed(program, seen)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
