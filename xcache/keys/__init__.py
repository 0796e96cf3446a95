"""What a key is made of: named components, each with a digest of its own.

One module per component: ``program``, ``options``, ``flags``, ``platform``, ``toolchain``. This package needs jaxlib at
most (never jax, never a socket). Whatever can change the compiled code is in one of the components; whatever cannot is
in none.
"""

import functools
import hashlib
import struct
from collections.abc import Mapping
from typing import NamedTuple

# Part of every key: a change of what is hashed, or how, is a change of this number.
FORMAT = 1
COMPONENTS = ("program", "options", "flags", "platform", "toolchain")
# hashlib lets go of the GIL for more than this. To get it back while another thread is busy takes longer than to hash
# what is small: that is hashed in pieces.
_AT_ONCE, _SMALL = 2047, 256 * 1024


class Component(NamedTuple):
    """One part of a key: the bytes that are hashed."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """The digest of this component alone, for finding out which one made a key differ."""
        return digest(self.content) if self.name == "program" else _digest_in_common(self.content)


class Key(NamedTuple):
    """A digest over all components, and theirs."""

    digest: str
    components: Mapping[str, str]


def digest(content: bytes | memoryview) -> str:
    """SHA-256 as lower-case hexadecimal: the one digest used everywhere."""
    if len(content) > _SMALL:
        return hashlib.sha256(content).hexdigest()
    found, view = hashlib.sha256(), memoryview(content)
    for at in range(0, len(content), _AT_ONCE):
        found.update(view[at : at + _AT_ONCE])
    return found.hexdigest()


@functools.lru_cache(maxsize=64)
def _digest_in_common(content: bytes) -> str:
    """The digest of what many programs of a process have in common, computed once."""
    return digest(content)


def combine(components: Mapping[str, Component]) -> Key:
    """The key over the digests of all components, each preceded by its length and name."""
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
    """Facts as sorted ``name=value`` lines: canonical to hash, readable in the store."""
    # repr() of a string escapes line breaks, so no value can pass for another line.
    return "\n".join(f"{name}={facts[name]!r}" for name in sorted(facts)).encode("utf-8", "backslashreplace")
