"""Measures what uploading a gigabyte in the background costs the programs of the machine; prints a table in Markdown.

A store has a gigabyte of executables in 64 entries, and a program starts warm again and again while the daemon sends
all of it to a tier, and as often with nothing to send.

    scripts/measure --upload [--rounds 1] [--programs many-small,training] [--tiers folder,redis]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure_remote
from measure_remote import Host, Tier, engines, new_keys

import micro  # isort: skip # found by the path that measure_remote adds
import runs  # isort: skip
from xcache._version import __version__
from xcache.client.client import Client
from xcache.config import config
from xcache.keys import digest

ENTRIES, ENTRY_BYTES = 64, 16 * 1024**2
SENT_WITHIN = 300.0


class Uploading(Host):
    """A host whose store has a gigabyte that a tier can be given again and again."""

    def __init__(self, root: Path, keys: Mapping[str, str], tier: Tier, forget: Any) -> None:
        super().__init__(root, keys, tier, None)
        self._forget = forget
        with contextlib.closing(Client(config.load(self.environment), __version__)) as client:
            for number in range(ENTRIES):
                content = os.urandom(ENTRY_BYTES)
                put = micro.put_of(digest(f"entry {number}".encode()), content, len(content), b"program")
                if not client.put(put, content, b"program"):
                    raise SystemExit("the store did not take an entry")
        self.wait_until_sent()

    def wait_until_sent(self) -> None:
        """Wait until nothing is to be uploaded."""
        deadline = time.monotonic() + SENT_WITHIN
        while self.remote()["waiting"]:
            if time.monotonic() > deadline:
                raise SystemExit(f"the tier did not take all: {self.remote()}")
            time.sleep(0.2)

    def begin_upload(self) -> None:
        """Have the daemon send the gigabyte once more."""
        self._forget()
        command = [Path(sys.executable).with_name("xcache"), "remote", "push", "--all"]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)


def forgetting(tier: Tier) -> Any:
    """Return a function that empties a tier."""
    if tier.url.startswith("file:"):
        folder = Path(tier.url.removeprefix("file://"))
        return lambda: [shutil.rmtree(each) for each in folder.iterdir()]
    port = tier.url.rpartition(":")[2]
    return lambda: subprocess.run(["redis-cli", "-p", port, "FLUSHALL"], check=True, capture_output=True)


def measured(host: Uploading, program: str, rounds: int) -> str:
    """Return the row of a program: it starts again and again beside each upload, and as often without one."""
    run = lambda: runs.Process(program, host.environment).finish()["wall"]  # noqa: E731 - said once
    run()
    host.wait_until_sent()
    alone: list[float] = []
    beside: list[float] = []
    lasted: list[tuple[float, float]] = []
    for _ in range(rounds):
        host.begin_upload()
        began, before = time.monotonic(), host.daemon.cpu()
        while host.remote()["waiting"]:
            beside.append(run())
        lasted.append((time.monotonic() - began, host.daemon.cpu() - before))
        alone += [run() for _ in range(len(beside) - len(alone))]
    upload, processors = (statistics.median(column) for column in zip(*lasted, strict=True))
    before, after = statistics.mean(alone), statistics.mean(beside)
    return (
        f"| {program} | {len(alone)} | {before:.3f} | {after:.3f} | {after / before:.3f} |"
        f" {statistics.median(beside) / statistics.median(alone):.3f} | {upload:.1f} | {processors:.1f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--programs", default="many-small,training")
    parser.add_argument("--tiers", default="folder,redis")
    options = parser.parse_args()
    measure_remote.say_when(options.rounds)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xc", dir="/tmp")))
        keys = new_keys(root)
        tiers = stack.enter_context(engines(root))
        (root / "tier").mkdir()
        tiers["folder"] = Tier((root / "tier").as_uri(), {})
        for name in options.tiers.split(","):
            if name not in tiers:
                continue
            host = Uploading(root, keys, tiers[name], forgetting(tiers[name]))
            try:
                print(f"\n| {name} | starts | alone (s) | beside (s) | ratio | of medians | upload (s) | its CPU (s) |")
                print("|---|---:|---:|---:|---:|---:|---:|---:|")
                for program in options.programs.split(","):
                    print(measured(host, program, options.rounds), flush=True)
            finally:
                host.end()
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
