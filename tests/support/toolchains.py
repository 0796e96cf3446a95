"""Entries that another toolchain seems to have made: their executables are out of reach, their programs stay."""

from __future__ import annotations

import hashlib

OLD = hashlib.sha256(b"an older toolchain").hexdigest()


def make_old(place) -> dict[str, str]:
    """Give all entries another toolchain and key; return the modules' names by the keys they had."""
    names = dict(place.query("SELECT key, module_name FROM entries"))
    place.stop()
    for key in names:
        place.execute(
            "UPDATE entries SET key = ?, toolchain_component = ? WHERE key = ?",
            *(hashlib.sha256(f"old {key}".encode()).hexdigest(), OLD, key),
        )
    return names
