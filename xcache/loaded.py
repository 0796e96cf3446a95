"""Executables that came out of the cache, for whoever serializes one again.

Serializing an executable that was itself deserialized gives bytes that load and then cannot be run (on CPU). A program
that runs without xcache never meets this, so while xcache is on, serializing such an executable answers with the bytes
it was loaded from.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from xcache import payload


class FirstGeneration:
    """The bytes an executable was loaded from, sealed as they were stored."""

    def __init__(self, key: str, digest: str, sealed: bytes | mmap.mmap) -> None:
        self._key = key
        self._digest = digest
        self._sealed = sealed

    def raw(self) -> bytes:
        """The serialized executable."""
        return payload.open_sealed(self._key, self._digest, memoryview(self._sealed))


# By identity. jaxlib's executables cannot be referenced weakly, but each keeps alive what it is told to: when one is
# freed its FirstGeneration goes with it, and the entry here before its address can be used again.
_loaded: weakref.WeakValueDictionary[int, FirstGeneration] = weakref.WeakValueDictionary()


def remember(executable: Any, generation: FirstGeneration) -> None:
    """Tie an executable to the bytes it came from, for as long as it lives."""
    if hasattr(executable, "keep_alive"):
        executable.keep_alive(generation)
        _loaded[id(executable)] = generation


@contextlib.contextmanager
def serialize_first_generation() -> Iterator[None]:
    """While this is open, jaxlib serializes loaded executables as the bytes they were loaded from."""
    from jaxlib import xla_client

    with contextlib.ExitStack() as stack:
        # The method moved from the client to the executable in 0.8; both exist for a while.
        for owner, name in ((xla_client.LoadedExecutable, "serialize"), (xla_client.Client, "serialize_executable")):
            if hasattr(owner, name):
                original = getattr(owner, name)
                setattr(owner, name, _answering(original))
                stack.callback(setattr, owner, name, original)
        yield


def _answering(original: Callable[..., bytes]) -> Callable[..., bytes]:
    def serialize(*args: Any, **kwargs: Any) -> bytes:
        # The executable is the last positional argument of both: self, or the one the client is given.
        generation = _loaded.get(id(args[-1])) if args else None
        return original(*args, **kwargs) if generation is None else generation.raw()

    return serialize
