"""A real compile in two processes, of which the second must find what the first has stored; for ``xcache doctor``."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from typing import Any, NamedTuple

from xcache.cli import daemon_listing, rm, store_file
from xcache.config import config
from xcache.errors import XcacheError
from xcache.wire import protocol
from xcache.wire.bounded import SMALL_FILE, parsed_json

_SECONDS = 300
_NAME = protocol.TRIAL
# A line of the cache on stderr begins so.
_SAID = "xcache: "
# Its number makes it a program that nobody has stored. The argument is numpy's, so that jax compiles nothing for it.
_PROGRAM = f"""
import dataclasses, json, sys
import jax, numpy
jax.devices()
import xcache
from xcache.process_cache import current
cache = current()
if cache is None:
    sys.exit("jax of this Python has not switched the cache on")
cache.be_unnoticed()
number = float(sys.argv[1])
def {_NAME}(x):
    return jax.numpy.sin(x) * number
jax.jit({_NAME})(numpy.ones(3, numpy.float32)).block_until_ready()
xcache.disable()
print(json.dumps(dataclasses.asdict(cache.statistics())))
"""


class Verdict(NamedTuple):
    """Whether the second process found the executable, in words, and what to do if not."""

    is_found: bool
    text: str
    advice: str = ""


def compile_twice() -> Verdict:
    """Compile a small program in two processes, and remove it from the store."""
    number = f"{1 + secrets.randbelow(10**9) / 10**9:.9f}"
    try:
        cold = _run(number)
        return _judged(cold, cold if isinstance(cold, str) else _run(number))
    finally:
        # The store is what the other checks are about.
        with contextlib.suppress(XcacheError, OSError):
            _forget()


def _judged(cold: dict[str, Any] | str, warm: dict[str, Any] | str) -> Verdict:
    if isinstance(cold, str) or isinstance(warm, str):
        said = cold if isinstance(cold, str) else str(warm)
        if "No module named 'jax" in said:
            advice = "Run the doctor with the Python of your programs: /path/to/python -m xcache doctor"
        else:
            advice = "Run a program with XCACHE=1 XCACHE_LOG=debug to see more."
        return Verdict(False, said, advice)
    if warm["hits"]:
        return Verdict(True, "one process compiled a program, and the next one found it")
    advice = "XCACHE_LOG=debug shows each step, and docs/not-cached.md what is not cached."
    for ran, which in ((cold, "first"), (warm, "second")):
        if reasons := ran[_SAID] or [*ran["uncacheable"], *ran["errors"]]:
            return Verdict(False, f"the {which} process could not use the cache: {', '.join(reasons)}", advice)
    causes = ", ".join(warm["causes"]) or "the cache was not asked"
    return Verdict(False, f"the second process compiled the program of the first again: {causes}", advice)


def _run(number: str) -> dict[str, Any] | str:
    """Return the statistics of a process that compiled the program, and what it said; or why there are none."""
    command = [sys.executable, "-c", _PROGRAM, number]
    # A file of settings may forbid compiles, too.
    variables = os.environ | {"XCACHE": "1", "XCACHE_ON_MISS": "allow"}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False)
        found: dict[str, Any] = parsed_json(done.stdout.splitlines()[-1], SMALL_FILE) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        return f"a small program did not end within {_SECONDS} s"
    except (ValueError, IndexError):
        found = {}
    lines = done.stderr.strip().splitlines()
    # A warning may come twice: as it happens, and at the end.
    ours = list(dict.fromkeys(line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)))
    if found:
        return found | {_SAID: ours}
    return (ours or lines or [f"the program ended with status {done.returncode}"])[-1]


def _forget() -> None:
    """Remove what the program has left in the store, now or when an earlier check was killed."""
    settings = config.load()
    wanted = store_file.Wanted(name=_NAME)
    with daemon_listing.open_store_or_listing(settings, latest=True) as store:
        entries, _ = store.entries(wanted) if store else ([], 0)
    mine = [row["key"] for row in entries if row["writer_uid"] == os.getuid() and row["module_name"] == f"jit_{_NAME}"]
    if mine:
        rm.remove(settings, mine)
