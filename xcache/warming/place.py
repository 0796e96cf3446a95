"""The place of a compile: what a client and XLA's flags were made of, read from the texts of a key's components."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_FILES = "content of "
# Variables that a place sets itself, and those of the process that started this one which could contradict it.
_REPLACED = re.compile(
    r"XLA_FLAGS|LIBTPU_INIT_ARGS|(PJRT_)?NPROC|JAX_NUM_CPU_DEVICES|JAX_PLATFORMS|XCACHE|XCACHE_ON_MISS.*"
)


class Place(NamedTuple):
    """A platform, how many devices and threads its client has (0 threads: it is none of the CPU), and the flags."""

    platform: str
    devices: int
    threads: int
    environment: tuple[tuple[str, str], ...]
    # Arguments of the program that begin with --xla.
    arguments: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Return the environment of a process whose client is such a client."""
        kept = {name: value for name, value in os.environ.items() if not _REPLACED.fullmatch(name)}
        made = dict(self.environment)
        if self.platform == "cpu":
            count = f"--xla_force_host_platform_device_count={self.devices}"
            made["XLA_FLAGS"] = f"{made.get('XLA_FLAGS', '')} {count}".strip()
            made |= {name: str(self.threads) for name in ("NPROC", "PJRT_NPROC")}
        else:
            # Several processes share the device, and its memory.
            made["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return kept | made | {"JAX_PLATFORMS": self.platform, "XCACHE": "0"}


def place_of(flags: str, platform: str) -> Place:
    """Return the place that these texts describe; raise ValueError if there is no such place on one machine."""
    known = dict(facts(platform))
    if known.get("processes", 1) != 1:
        raise ValueError(f"it belongs to a job of {known['processes']} processes")
    try:
        devices = int(known["devices"][0]) if "devices" in known else len(known["kinds"])
        return Place(
            str(known["platform"]),
            devices,
            int(known.get("threads", 0)),
            tuple(sorted(environment(flags).items())),
            tuple(_arguments(flags)),
        )
    except (KeyError, TypeError, IndexError):
        raise ValueError("the description of its platform cannot be read") from None


def environment(flags: str) -> dict[str, str]:
    """Return XLA_FLAGS and LIBTPU_INIT_ARGS of which these are the lines."""
    found: dict[str, list[str]] = {"XLA_FLAGS": [], "LIBTPU_INIT_ARGS": []}
    for name, fact in facts(flags):
        source, _, flag = name.partition(" ")
        value = str(fact)
        if source == "XLA_FLAGS" and flag:
            escaped = value.replace("\\", r"\\").replace('"', r"\"")
            found[source].append(f'--{flag}="{escaped}"' if re.search(r"[\s'\"\\]", value) else f"--{flag}={value}")
        elif source == "LIBTPU_INIT_ARGS":
            found[source].append(value)
    return {name: " ".join(words) for name, words in found.items() if words}


def facts(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the facts that ``keys.lines`` wrote; raise ValueError for one that cannot be read."""
    for line in text.split("\n"):
        name, _, value = line.partition("=")
        if line and not name.startswith(_FILES):
            try:
                yield name, ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise ValueError(f"the description of {name} cannot be read") from None


def _arguments(flags: str) -> Iterator[str]:
    for name, value in facts(flags):
        source, _, flag = name.partition(" ")
        if source == "argument":
            yield f"--{flag}={value}"
