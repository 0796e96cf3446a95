"""The names of objects in a tier."""

from __future__ import annotations

import hashlib
import secrets

# The layout of names and objects; another one would be another number.
_LAYOUT = "v1"


class Names:
    """Names within a namespace."""

    def __init__(self, namespace: str) -> None:
        self._root = f"{_LAYOUT}/in-{namespace}" if namespace else f"{_LAYOUT}/all"
        self.root = f"{self._root}/"
        """How the names of all objects of the namespace begin."""
        self.entries, self.runs = f"{self.root}entries/", f"{self.root}runs/"
        """How those of entries begin, and of what programs wanted."""

    def entry(self, key: str) -> str:
        """Return the name of an entry."""
        return f"{self.entries}{key[:2]}/{key}"

    def lease(self, key: str) -> str:
        """Return the name of the lease on a key."""
        return f"{self._root}/leases/{key[:2]}/{key}"

    def run(self, program: str, arguments: str) -> str:
        """Return the name of what a program wanted when it ran with these arguments (a digest)."""
        named = hashlib.sha256(f"{program}\0{arguments}".encode()).hexdigest()
        return f"{self.runs}{named[:2]}/{named}"

    def check(self) -> str:
        """Return the name of an object for one check, which nobody else has."""
        return f"{self._root}/checks/{secrets.token_hex(16)}"
