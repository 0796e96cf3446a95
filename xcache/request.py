"""The request that the jax hook and ``xcache.compile`` make to the cache, and the outcome they get."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from xcache.keys import Key
from xcache.wire.protocol import InstalledFile


class LoadTarget(NamedTuple):
    """The serialized compile options, and the client and devices that an executable is loaded onto."""

    options: bytes
    client: Any
    devices: tuple[Any, ...]

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The ids of the devices, by which the next run finds its own."""
        return tuple(device.id for device in self.devices)

    def is_same(self, other: "LoadTarget") -> bool:
        """Return whether an executable loaded for one can serve the other.

        Devices are compared by identity: another client of the same platform gives its devices the same ids, but cannot
        run what was loaded onto this one.
        """
        return (
            self.client is other.client
            and self.options == other.options
            and len(self.devices) == len(other.devices)
            and all(map(operator.is_, self.devices, other.devices))
        )


class Alias(NamedTuple):
    """The program that a structure was lowered to, and all else that compiling it asks of the module."""

    structure: str
    program: str
    module_name: str
    # jax's answer to whether XLA should log more, for which jax walks the module.
    detailed_logging: bool
    # Whether its lowering rules prepare LAPACK.
    lapack: bool
    # If ``structure`` is the digest of a call of ``xcache.jit``: what jax makes of it beside the program.
    record: bytes = b""
    # How many descriptions of jax's code skipping its lowering once pays for, as was measured when it was lowered; 0 if
    # it was not.
    worth: float = 0.0


class Request(NamedTuple):
    """One program that is wanted: its key, and how to load and serialize its executable."""

    key: Key
    module_name: str
    platform: str
    device_kind: str
    jaxlib_version: str
    program: bytes
    details: Callable[[], Mapping[str, str]]
    load: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]
    # The next run loads the executable ahead with this; None if it cannot be loaded ahead.
    target: LoadTarget | None = None
    # The compiler's files, which the daemon watches.
    toolchain_files: Callable[[], Sequence[InstalledFile]] = tuple
    # Whether it may only be serialized before it runs; called only for what was compiled here.
    serialize_first: Callable[[], bool] = bool
    # Noted once there is an entry: the next program of this structure is not lowered.
    alias: Alias | None = None
    # The program with source locations; called before it is compiled.
    located: Callable[[], bytes] = bytes
    # Whether it may wait for another program's compile; the processes of one job may all have to compile at once.
    may_wait: bool = True


class Outcome(NamedTuple):
    """A loaded executable, and whether it was a hit, a miss, uncacheable, or left to another cache."""

    executable: Any
    kind: Literal["hit", "miss", "uncacheable", "left"]
    compile_seconds: float
    retrieval_seconds: float = 0.0
