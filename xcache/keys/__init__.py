"""The key of an executable: a digest over five named components, each with a digest of its own.

Each component has its module: ``program``, ``options``, ``flags``, ``platform``, ``toolchain``. The package imports
jaxlib at most, never jax, and opens no socket. The components hold everything that can change the compiled code. They
leave out only what was measured to change no code.
"""

import functools
import hashlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

from xcache.wire.hashing import digest

# This number is part of every key. It changes with every change of what is hashed, or how.
FORMAT = 3
COMPONENTS = ("program", "options", "flags", "platform", "toolchain")


class Component(NamedTuple):
    """One part of a key: the bytes that are hashed, or only their digest if it is ``known``."""

    name: str
    content: bytes
    known: str = ""

    @property
    def digest(self) -> str:
        """The digest of this component alone, which shows the component that made two keys differ."""
        return self.known or (digest if self.name == "program" else _cached_digest)(self.content)


class Key(NamedTuple):
    """The digest over all components, and the digest of each."""

    digest: str
    components: Mapping[str, str]


@functools.lru_cache(maxsize=64)
def _cached_digest(content: bytes) -> str:
    """Return the digest of a component that many programs of a process share, computed once."""
    return digest(content)


def combine(components: Mapping[str, Component]) -> Key:
    """Return the key: a digest over the name and digest of each component, each preceded by its length."""
    if tuple(components) != COMPONENTS:
        raise ValueError(f"a key needs exactly {', '.join(COMPONENTS)}, in this order")
    digests = {name: component.digest for name, component in components.items()}
    total = hashlib.sha256(b"xcache key" + struct.pack(">I", FORMAT))
    for name, value in digests.items():
        for part in (name.encode(), bytes.fromhex(value)):
            total.update(struct.pack(">Q", len(part)))
            total.update(part)
    return Key(total.hexdigest(), digests)


def lines(facts: Mapping[str, object]) -> bytes:
    """Return facts as sorted ``name=value`` lines, canonical for hashing and readable in the store."""
    # repr() of a string escapes line breaks, so no value can pass for another line.
    return "\n".join(f"{name}={facts[name]!r}" for name in sorted(facts)).encode("utf-8", "backslashreplace")
