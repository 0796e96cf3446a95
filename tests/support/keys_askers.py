"""Processes that compile for the keys campaign, and say key and code."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.keys_child import NO_DEVICE
from support.places import REPOSITORY, TESTS

# As many processes at a time.
ASKERS = 2


class Askers:
    """Processes that answer questions for one platform, each from a fork of its own."""

    def __init__(self, memo: Path, platform: str) -> None:
        self._memo = str(memo)
        self._platform = platform
        self._children = [self._start() for _ in range(ASKERS)]
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the keys and code of a compile under these circumstances."""
        text = json.dumps(question | {"memo": self._memo, "platform": self._platform}) + "\n"
        if question.get("fresh"):
            return self._ask_once(text, question.get("environ", {}))
        child = self._idle.get()
        try:
            child.stdin.write(text)
            child.stdin.flush()
            return json.loads(child.stdout.readline())
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End them."""
        for child in self._children:
            child.stdin.close()
            child.wait(timeout=60)
            child.stdout.close()

    def _ask_once(self, text: str, environ: dict[str, str]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [sys.executable, str(TESTS / "support" / "keys_child.py"), "--once"],
                input=text,
                env=self._environ() | environ,
                # Some options have files written.
                cwd=self._memo,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            return json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
            return {"refused": f"{type(error).__name__}"}

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(TESTS / "support" / "keys_child.py")]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self._environ(), cwd=self._memo, stdin=pipe, stdout=pipe, text=True)

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XCACHE", "XLA", "JAX"))}
        # libtpu writes its logs to TMPDIR.
        ours = {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, TESTS))), "TMPDIR": self._memo}
        return kept | NO_DEVICE | ours
