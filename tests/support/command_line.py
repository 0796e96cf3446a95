"""Run the commands as a user does, and fill a store with made-up entries for them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner, Result

from support.places import begin_store, get_message
from xcache import keys
from xcache.cli import main, writers
from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.config.config import Config, load
from xcache.wire import envelope, hashing, protocol
from xcache.wire.ledger import Row

LONG = 60
NAMES = (
    *("status", "stats", "ls", "show", "hlo", "graph", "cost"),
    *("toolchains", "pin", "unpin", "gc", "rewarm", "prebuild", "rm", "invalidate", "clear"),
    *("config", "start", "stop", "restart", "doctor", "runs", "run", "why", "compare", "trace", "report", "monitor"),
    *("key new", "key show", "key trust"),
    *("export", "import", "bundle inspect", "bundle verify"),
    *("key list", "key revoke"),
    "preflight",
    *("remote check", "remote push", "remote ls", "remote stats", "remote gc", "remote rm"),
)


class Shell:
    """Runs commands in a place."""

    def __init__(self, place: Any) -> None:
        self.directory = place.dir
        self.env = dict(place.env)

    @property
    def config(self) -> Config:
        return load(self.env)

    def record_run(
        self, key: str, *, run: str = "0123456789abcdef", facts: dict[str, str] | None = None, **changes: Any
    ) -> None:
        """Record a run that compiled a program of this key; ``changes`` are of its row."""
        spans = json.dumps([("compile", 1.0, 0.5, "MainThread")])
        row = Row(0, "jit_f", "train.py:1", "f32[8]", key, "miss", "new", "yes", "", spans)._replace(**changes)
        self.record_rows([row], run=run, facts=facts)

    def record_rows(self, rows: Sequence[Row], *, run: str, facts: dict[str, str] | None = None) -> None:
        """Record a run with these rows."""
        told = {"arguments": "[]"} | (facts or {})
        with self._client() as client:
            client.record_run(protocol.RecordRun(run, 1.0, True, told, [[*row] for row in rows]))

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "xcache", *arguments],
            env=self.env | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own; return its output and exit status."""
        with self.begin(*arguments, **environment) as process:
            try:
                said, complaints = process.communicate(timeout=LONG)
            finally:
                process.kill()
        return subprocess.CompletedProcess(arguments, process.returncode, said, complaints)

    def say(self, *arguments: str, code: int = 0, answer: str | None = None) -> str:
        """Run a command in this process; return its output, remarks on stderr among it."""
        return self._invoke(arguments, code, answer).output

    def json(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON document that a command prints."""
        return json.loads(self._invoke((*arguments, "--json"), 0, None).stdout)

    def _invoke(self, arguments: Sequence[str], code: int, answer: str | None) -> Result:
        for remembered in (writers.writer_name, writers.trusted_signers, writers._keys):
            # An earlier command in this process had other keys.
            remembered.cache_clear()
        others = {name: None for name in os.environ if name.startswith("XCACHE")}
        result = CliRunner().invoke(main, arguments, env=others | self.env, input=answer)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    def json_with_status(self, *arguments: str, code: int) -> dict[str, Any]:
        """Return the JSON document of a command that fails; lines on stderr follow it."""
        return json.JSONDecoder().raw_decode(self.say(*arguments, "--json", code=code))[0]

    def put(self, name: str, **fields: Any) -> str:
        """Store an entry; return its key."""
        message, sealed, program = made_up(name, **fields)
        with self._client() as client:
            assert client.put(message, sealed, program)
        return message.key

    def get(self, key: str) -> None:
        """Use an entry."""
        with self._client() as client:
            assert client.get(get_message(key))

    def report(self, counts: dict[str, float]) -> None:
        """Report statistics to the daemon."""
        with self._client() as client:
            client.report(counts)

    def change(self, sql: str, *values: object) -> None:
        """Alter the database behind the daemon's back."""
        with contextlib.closing(sqlite3.connect(self.directory / "store.db")) as database:
            database.execute(sql, values)
            database.commit()

    def held(self) -> bool:
        """Return whether a daemon has the store."""
        return Launcher(self.config).held()

    def _client(self) -> contextlib.closing[Client]:
        begin_store(self.directory)
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
    """Return the message, executable and program of an entry whose executable is random bytes."""
    key = key or random.randbytes(32).hex()
    raw = raw or random.randbytes(100)
    program = program or random.randbytes(50)
    sealed, packed = envelope.seal(key, raw), envelope.compress(program)
    details = {part: f"{part} of\n[bold]{name}[/bold]" for part in protocol.DESCRIBED_COMPONENTS} | {"flags": ""}
    message = protocol.Put(
        key=key,
        overwrite=False,
        module_name=name,
        platform=platform,
        device_kind=device_kind,
        jaxlib_version=jaxlib,
        codec=envelope.CODEC,
        raw_size=len(raw),
        compile_seconds=seconds,
        digest=hashing.digest(sealed),
        stored_size=len(sealed),
        program_digest=hashing.digest(program),
        program_raw_size=len(program),
        program_stored_digest=hashing.digest(packed),
        program_stored_size=len(packed),
        components={part: hashing.digest(details.get(part, name).encode()) for part in keys.COMPONENTS},
        details=details,
        payload=None,
        program=None,
    )
    return message, sealed, packed


def names(listed: dict[str, Any]) -> list[str]:
    """Return the modules that ls --json lists."""
    return [entry["module_name"] for entry in listed["entries"]]
