"""The commands as a user gives them, and a store with made-up entries to try them on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from typing import Any

from click.testing import CliRunner
from places import get_message

from xcache import keys, payload, protocol
from xcache.cli import main
from xcache.client import Client
from xcache.config import Config, load
from xcache.launcher import Launcher

LONG = 60
NAMES = (
    *("status", "stats", "ls", "show", "toolchains", "pin", "unpin", "gc", "rm", "invalidate", "clear"),
    *("config", "start", "stop", "restart"),
)


class Shell:
    """Gives commands in a place."""

    def __init__(self, place: Any) -> None:
        self.directory = place.dir
        self.env = dict(place.env)

    @property
    def config(self) -> Config:
        return load(self.env)

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """A command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "xcache.cli", *arguments],
            env=self.env | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """What a command in a process of its own printed, and its exit status."""
        with self.begin(*arguments, **environment) as process:
            try:
                said, complaints = process.communicate(timeout=LONG)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, said, complaints)

    def say(self, *arguments: str, code: int = 0, answer: str | None = None) -> str:
        """What a command prints, run in this process."""
        others = {name: None for name in os.environ if name.startswith("XCACHE")}
        result = CliRunner().invoke(main, arguments, env=others | self.env, input=answer)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    def json(self, *arguments: str) -> dict[str, Any]:
        """The document that a command prints."""
        return json.loads(self.say(*arguments, "--json"))

    def put(self, name: str, **fields: Any) -> str:
        """Store an entry; returns its key."""
        message, sealed, program = made_up(name, **fields)
        with self._client() as client:
            assert client.put(message, sealed, program)
        return message.key

    def get(self, key: str) -> None:
        """Use an entry."""
        with self._client() as client:
            assert client.get(get_message(key))

    def report(self, counts: dict[str, float]) -> None:
        """Have something counted."""
        with self._client() as client:
            client.report(counts)

    def change(self, sql: str, *values: object) -> None:
        """Alter the database behind the daemon's back."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database:
            database.execute(sql, values)
            database.commit()

    def held(self) -> bool:
        """Whether there is a daemon."""
        return Launcher(self.config).held()

    def _client(self) -> contextlib.closing[Client]:
        return contextlib.closing(Client(self.config, "0.0.0", Launcher(self.config)))


def made_up(
    name: str,
    *,
    key: str | None = None,
    platform: str = "cpu",
    device_kind: str = "cpu",
    jaxlib: str = "0.10.2",
    raw: bytes = b"",
    seconds: float = 1.0,
    program: bytes = b"",
) -> tuple[protocol.Put, bytes, bytes]:
    """An entry whose executable is random bytes: the message, the executable and the program."""
    key = key or random.randbytes(32).hex()
    raw = raw or random.randbytes(100)
    program = program or random.randbytes(50)
    sealed, packed = payload.seal(key, raw), payload.compress(program)
    details = {part: f"{part} of\n[bold]{name}[/bold]" for part in protocol.DESCRIBED_COMPONENTS} | {"flags": ""}
    message = protocol.Put(
        key=key,
        overwrite=False,
        module_name=name,
        platform=platform,
        device_kind=device_kind,
        jaxlib_version=jaxlib,
        codec=payload.CODEC,
        raw_size=len(raw),
        compile_seconds=seconds,
        digest=keys.digest(sealed),
        stored_size=len(sealed),
        program_digest=keys.digest(program),
        program_raw_size=len(program),
        program_stored_digest=keys.digest(packed),
        program_stored_size=len(packed),
        components={part: keys.digest(f"{part}{details.get(part)}".encode()) for part in keys.COMPONENTS},
        details=details,
        payload=None,
        program=None,
    )
    return message, sealed, packed


def names(listed: dict[str, Any]) -> list[str]:
    """The modules that ls --json lists."""
    return [entry["module_name"] for entry in listed["entries"]]
