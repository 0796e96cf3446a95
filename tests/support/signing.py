"""Keys and lists of trusted keys for tests. The keys are the same every time."""

from __future__ import annotations

from pathlib import Path

from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys, parse_line

OURS, SECOND, STRANGER = (PrivateKey(name, bytes([n]) * 32) for n, name in enumerate(("ours", "second", "stranger"), 1))
# 2026-11-27 12:00 UTC.
NOON = 1795780800.0
DAY = 86400.0


def listing(folder: Path, *lines: object) -> TrustedKeys:
    """Return a list of trusted keys with these lines."""
    path = folder / "trusted-keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o644)
    return TrustedKeys.load(path)


def in_memory(*lines: object) -> TrustedKeys:
    """Return a list with these lines that is in no file."""
    return TrustedKeys(Path("/none"), (), [parse_line(str(line)) for line in lines], "", ())
