"""An import that is not yet complete: its entries wait, checked and on disk, and are stored all or none at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from xcache.errors import RefusedError
from xcache.wire import commands, protocol
from xcached.store.blobs import BlobFiles
from xcached.store.intake import MOST_IN_FLIGHT_BYTES
from xcached.store.jobs import PutJob, TogetherJob
from xcached.store.writer import WriterThread

# Objects of one user's imports that may wait, and the bytes of their small contents, which wait in memory.
_MOST_OBJECTS, _MOST_IN_MEMORY = 5000, 128 * 1024**2


class Staged:
    """The import of one client, as far as it has been sent. Belongs to the thread of transfers."""

    def __init__(self, uid: int) -> None:
        """``uid`` is the client's user, whose turn of the writer thread the import takes."""
        self.uid = uid
        self._puts: list[PutJob] = []
        self._notes: list[Callable[[], Iterable[Callable[[], None]]]] = []
        self.objects = self.in_memory = self.on_disk = 0

    def add(self, put: PutJob, size: int) -> None:
        """Add an entry of so many bytes, with its texts."""
        on_disk = sum(source.size for source in put.sources if source.copy is not None)
        self._puts.append(put)
        self._count(size - on_disk, on_disk)

    def add_notes(self, notes: Callable[[], Iterable[Callable[[], None]]], size: int) -> None:
        """Add a history of so many bytes; ``notes()`` returns what the writer thread does after the entries."""
        self._notes.append(notes)
        self._count(size, 0)

    def store(self, writer: WriterThread) -> commands.Imported:
        """Store all entries, or none; raise RefusedError then. Histories are hints, and may fail."""
        puts, notes, self._puts, self._notes = self._puts, self._notes, [], []
        self.objects = self.in_memory = self.on_disk = 0
        if puts:
            writer.submit(TogetherJob(puts), self.uid)
        kept = [put for put in puts if _demanded(put.done.result()) == protocol.Stored(kept=True)]
        told = [all(writer.call(note, self.uid).result() == protocol.Done() for note in each()) for each in notes]
        return commands.Imported(len(kept), sum(put.size for put in kept), sum(told))

    def discard(self, files: BlobFiles) -> None:
        """Give everything up."""
        for put in self._puts:
            put.discard(files)

    def _count(self, in_memory: int, on_disk: int) -> None:
        self.objects += 1
        self.in_memory += in_memory
        self.on_disk += on_disk


def require_room(mine: Staged, everybodys: Iterable[Staged]) -> int:
    """Return the bytes of a user that wait; raise RefusedError if they are so many that they are to be stored first."""
    of_user = [each for each in everybodys if each.uid == mine.uid]
    objects = sum(each.objects for each in of_user)
    in_memory, on_disk = sum(each.in_memory for each in of_user), sum(each.on_disk for each in of_user)
    if objects >= _MOST_OBJECTS or in_memory >= _MOST_IN_MEMORY or on_disk >= MOST_IN_FLIGHT_BYTES:
        raise RefusedError(commands.IMPORT_FULL, f"{objects} objects of imports of user {mine.uid} wait to be stored")
    return in_memory + on_disk


def _demanded(answer: protocol.Message) -> protocol.Message:
    if isinstance(answer, protocol.Refused):
        raise RefusedError(answer.kind, answer.reason)
    return answer
