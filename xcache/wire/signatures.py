"""Keys and signatures (Ed25519). The daemon and the command line import this, never a user's program.

``cryptography`` is imported when it is needed, and only then has to be there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
from typing import Any, NamedTuple

from xcache.errors import ConfigError, SigningKeyError

SIGNATURE_BYTES, ID_BYTES = 64, 8
PUBLIC, PRIVATE = "xcache-ed25519:", "xcache-ed25519-private:"
UNNAMED = "unnamed"
_KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]{0,99}")
NAME_SAID = "at most 100 letters, digits and any of _.@+-"
# Signed bytes begin so, and then name a purpose: a signature for one purpose is worth nothing for another.
_PREFIX = b"xcache signature 1\0"
_LENGTHS = struct.Struct(">IQ")


class PublicKey(NamedTuple):
    """The key that checks signatures."""

    name: str
    raw: bytes

    @property
    def id(self) -> str:
        """The digits by which a signature says who made it; only the key itself proves that."""
        return hashlib.sha256(self.raw).hexdigest()[: 2 * ID_BYTES]

    @property
    def text(self) -> str:
        """The key without its name."""
        return PUBLIC + base64.b64encode(self.raw).decode()

    def __str__(self) -> str:
        return f"{self.name} {self.text}"


class PrivateKey:
    """The key that makes signatures. Nothing prints it."""

    def __init__(self, name: str, seed: bytes) -> None:
        self._made = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public = PublicKey(name, self._made.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"PrivateKey({self.public.name!r}, {self.public.id})"

    def line(self) -> str:
        """Return the line of a file that holds it."""
        return f"{self.public.name} {PRIVATE}{base64.b64encode(self._seed).decode()}\n"

    def sign(self, content: bytes) -> bytes:
        """Return the signature of these very bytes; ``sign`` below says for what they are signed."""
        made: bytes = self._made.sign(content)
        return made


def new_key(name: str) -> PrivateKey:
    """Return a new key; raise ConfigError for a name that no list of keys could have."""
    return PrivateKey(checked_name(name), os.urandom(_KEY_BYTES))


def checked_name(name: str) -> str:
    """Return the name of a key; raise ConfigError if no list of keys could have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:100]!r} cannot be the name of a key; use {NAME_SAID}")
    return name


def sign(private: PrivateKey, domain: bytes, content: bytes) -> bytes:
    """Return a signature of ``content`` that counts only for ``domain``."""
    return private.sign(_signed(domain, content))


def verify(public: PublicKey, domain: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether the owner of a key has signed ``content`` for ``domain``."""
    key = _ed25519().Ed25519PublicKey.from_public_bytes(public.raw)
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _signed(domain, content))
    except InvalidSignature:
        return False
    return True


def parse_public(name: str, text: str) -> PublicKey | None:
    """Return the key of a name and ``xcache-ed25519:BASE64``; None if they are none."""
    raw = _decoded(text, PUBLIC)
    return PublicKey(name, raw) if raw is not None and _NAME.fullmatch(name) else None


def parse_private(text: str) -> PrivateKey:
    """Return the key of ``[NAME] xcache-ed25519-private:BASE64``; SigningKeyError never repeats it."""
    words = text.split()
    name, seed = words[0] if len(words) == 2 else UNNAMED, _decoded(words[-1], PRIVATE) if words else None
    if len(words) > 2 or seed is None or not _NAME.fullmatch(name):
        raise SigningKeyError(f"it is no private key of xcache, which is one line: NAME {PRIVATE}...")
    return PrivateKey(name, seed)


def _decoded(text: str, prefix: str) -> bytes | None:
    """Return the bytes of a key; None unless it is written as xcache writes it, for there is one spelling of each."""
    try:
        raw = base64.b64decode(text.removeprefix(prefix), validate=True)
    except (binascii.Error, ValueError):
        return None
    is_right = len(raw) == _KEY_BYTES and text == prefix + base64.b64encode(raw).decode()
    return raw if is_right else None


def _signed(domain: bytes, content: bytes) -> bytes:
    return _PREFIX + _LENGTHS.pack(len(domain), len(content)) + domain + content


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError("signatures need the library cryptography: pip install 'jax-xcache[remote]'") from None
    return ed25519
