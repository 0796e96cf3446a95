"""The jobs that the writer thread does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from xcache.wire import protocol
from xcached.store.blobs import BlobFiles
from xcached.store.entries import EntryKey, Source, Writer

# The estimated cost of a put before it is measured.
_PUT_SECONDS, _BYTES_PER_SECOND = 2e-4, 200e6


class PutJob(NamedTuple):
    """An entry to be written."""

    put: protocol.Put
    executable: Source
    program: Source
    writer: Writer
    done: Future[protocol.Message]

    @property
    def sources(self) -> tuple[Source, Source]:
        """The entry's contents."""
        return self.executable, self.program

    @property
    def entry(self) -> EntryKey:
        """The entry it writes."""
        return EntryKey(self.put.key, self.writer.uid)

    @property
    def size(self) -> int:
        """The bytes of its contents."""
        return self.put.stored_size + self.put.program_stored_size

    def discard(self, files: BlobFiles) -> None:
        """Give its contents up."""
        for source in self.sources:
            source.discard(files)

    @property
    def expected_seconds(self) -> float:
        """Its estimated time: contents already copied to disk only have to be renamed."""
        still_to_write = sum(source.size for source in self.sources if source.copy is None)
        return _PUT_SECONDS + still_to_write / _BYTES_PER_SECOND


class CallJob(NamedTuple):
    """Any other work between transactions."""

    work: Callable[[], protocol.Message | None]
    done: Future[protocol.Message]


class LongJob(NamedTuple):
    """Long work, done in steps; other users' jobs run between them.

    So do other jobs of the same user, unless ``in_order``.
    """

    steps: Generator[None, None, protocol.Message]
    done: Future[protocol.Message]
    in_order: bool = False


class TogetherJob(NamedTuple):
    """Entries to be written all or none, in one transaction. They all get the same answer if they are not."""

    puts: Sequence[PutJob]


Job = PutJob | TogetherJob | CallJob | LongJob
