"""Folders that look like virtual environments with a jaxlib."""

from __future__ import annotations

from pathlib import Path

from support.conversation import key_of, talking
from support.places import digest
from xcache.wire import protocol


class Environment:
    """A folder with a made-up jaxlib."""

    def __init__(self, root: Path, version: str) -> None:
        self.root = root
        self.packages = root / "lib" / "python3" / "site-packages"
        self.version = version
        (self.packages / "jaxlib").mkdir(parents=True)
        self.library = self.packages / "jaxlib" / "libjax_common.so"
        self.write(version)

    def write(self, version: str) -> None:
        """Install a version as pip does: remove the old file, then write the new one."""
        self.version = version
        self.library.unlink(missing_ok=True)
        self.library.write_bytes(version.encode().ljust(1000, b"."))

    @property
    def toolchain(self) -> str:
        return digest(self.description.encode())

    @property
    def description(self) -> str:
        return f"jaxlib={self.version!r}"

    def announcement(self) -> protocol.Announce:
        status = self.library.stat()
        file = {
            "path": str(self.library),
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "inode": status.st_ino,
            "digest": digest(self.library.read_bytes()),
        }
        return protocol.Announce(self.toolchain, "cpu", self.version, self.description, [file])

    def announce(self, place) -> None:
        with talking(place) as talk:
            assert talk.ask(self.announcement()) == protocol.Done()

    def put(self, place, name: str = "f", size: int = 0, compile_seconds: float = 1.0) -> str:
        """Announce the toolchain and store an entry that it compiled."""
        key = key_of(f"{name} {self.version}")
        components = {part: digest(part.encode()) for part in ("program", *protocol.DESCRIBED_COMPONENTS)}
        with talking(place) as talk:
            assert talk.ask(self.announcement()) == protocol.Done()
            made = components | {"toolchain": self.toolchain}
            content = f"{name} made by {self.version}".encode().ljust(size, b".")
            stored = talk.put(key, content, components=made, compile_seconds=compile_seconds)
            assert stored == protocol.Stored(True)
        return key
