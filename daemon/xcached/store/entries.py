"""Values that the parts of the store hand to each other: an entry's key, its writer, its contents, its uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from xcached.store.blobs import BlobFiles


class EntryKey(NamedTuple):
    """An entry's primary key."""

    key: str
    writer_uid: int


class Writer(NamedTuple):
    """The process that wrote an entry."""

    uid: int
    pid: int
    program: str


class Source(NamedTuple):
    """A content to be stored: bytes, or a descriptor to copy them from, until there is a copy."""

    digest: str
    size: int
    content: bytes | None
    descriptor: int | None
    # Where it begins in the descriptor's file.
    offset: int = 0
    # A synced copy that is not yet renamed to its digest.
    copy: Path | None = None
    # Whether the bytes were checked against the digest.
    checked: bool = False

    @property
    def is_file(self) -> bool:
        """Whether it becomes a file of the store."""
        return self.descriptor is not None or self.copy is not None

    def discard(self, files: BlobFiles) -> None:
        """Close the descriptor, and delete a copy that was not settled."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.copy is not None:
            files.discard(self.copy)


class Use(NamedTuple):
    """The number of hits of an entry, and the time of the last."""

    hits: int
    last_used_at: float
