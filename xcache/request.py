"""What the cache is asked for, and what it answers: all that the jax hook and ``xcache.compile`` need to know of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from xcache.keys import Key
from xcache.keys.toolchain import InstalledFile


class Ahead(NamedTuple):
    """Serialized compile options, and the numbers of the devices to load onto."""

    options: bytes
    devices: tuple[int, ...]


class Request(NamedTuple):
    """One program to be had: how to name it, load it and turn it into bytes."""

    key: Key
    module_name: str
    platform: str
    device_kind: str
    jaxlib_version: str
    program: bytes
    details: Callable[[], Mapping[str, str]]
    load: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]
    # What is needed to load it before it is asked for, where that can be done.
    ahead: Ahead | None = None
    # The files that compile it, which the daemon keeps an eye on.
    toolchain_files: Callable[[], Sequence[InstalledFile]] = tuple
    # Whether it can only be serialized before it has run; asked for what was compiled alone.
    serialize_first: Callable[[], bool] = bool
    # Whether it may wait for another program that compiles the same: not within a job whose compiles need all at once.
    may_wait: bool = True


class Outcome(NamedTuple):
    """A loaded executable, and how it was come by: as a hit, a miss, or uncacheable."""

    executable: Any
    kind: Literal["hit", "miss", "uncacheable"]
    compile_seconds: float
    retrieval_seconds: float = 0.0
