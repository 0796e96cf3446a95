"""Read all of an entry that is needed to look at its program and its executable."""

from __future__ import annotations

import os
from typing import NamedTuple

from xcache.cli import daemon, store_file
from xcache.cli.programs import is_here, located_bytecode
from xcache.cli.selection import full_key
from xcache.config.config import Config
from xcache.wire import envelope, protocol
from xcache.wire.ownership import is_signer


class Entry(NamedTuple):
    """An entry's facts, its program with source locations if it has them, and its executable if it was asked for."""

    key: str
    module_name: str
    platform: str
    jaxlib: str
    writer: int
    compile_seconds: float
    blob: str
    # None if it stayed on the machine that lowered it.
    program: bytes | None
    executable: bytes
    # The digest and description of each component that has one.
    components: dict[str, tuple[str, str | None]]
    # The folders in which its writer has or had its toolchain, the likeliest first.
    places: list[str]

    @property
    def is_own(self) -> bool:
        """Whether this user wrote it."""
        return self.writer == os.getuid()


def read(settings: Config, wanted: str, *, with_executable: bool) -> Entry:
    """Return the entry of this key or name; the store is closed again, for what follows may take long."""
    daemon.flush(settings)
    with store_file.open_store(settings) as store:
        key = full_key(store, wanted)
        assert store is not None  # noqa: S101 - full_key() fails without one
        row = store.entry(key)
        digests = {name: row[f"{name}_component"] for name in protocol.DESCRIBED_COMPONENTS}
        program = store.program(row["program"], row["writer_uid"])
        sealed = store.content(row["blob"]) if with_executable else b""
        # A key has no Python here; this user's programs load what it has signed.
        installer = os.getuid() if is_signer(row["writer_uid"]) else row["writer_uid"]
        return Entry(
            key=key,
            module_name=row["module_name"],
            platform=row["platform"],
            jaxlib=row["jaxlib_version"],
            writer=row["writer_uid"],
            compile_seconds=row["compile_seconds"],
            blob=row["blob"],
            program=located_bytecode(store, program) if is_here(program) else None,
            executable=envelope.open_sealed(key, row["blob"], sealed) if with_executable else b"",
            components={name: (digest, store.description(digest)) for name, digest in digests.items()},
            places=[each["place"] for each in store.installations(digests["toolchain"], installer)],
        )
