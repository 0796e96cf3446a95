"""Entries as they come from the daemon and go to it: inline, or as descriptors of files."""

import contextlib
import errno
import logging
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from xcache import protocol
from xcache.connection import Connection
from xcache.errors import DamagedError, ProtocolError, UncacheableError
from xcache.handlers import let_pass
from xcache.payload import MAX_RAW_SIZE

logger = logging.getLogger("xcache")


class Entry(NamedTuple):
    """An executable as the daemon handed it over: sealed, and not yet checked."""

    digest: str
    compile_seconds: float
    sealed: bytes
    keep: bytes | mmap.mmap
    """The same bytes at little cost in memory, for as long as somebody may want them again."""
    waited: float = 0.0
    """Seconds that were spent waiting for another program to compile it."""


class Absent(NamedTuple):
    """There is no entry. With a lease (not 0) others wait for what this program compiles."""

    lease: int
    waited: float = 0.0


def found_in(connection: Connection, answer: protocol.Message) -> Entry | Absent:
    """What the answer to a Get holds."""
    if isinstance(answer, protocol.Missing):
        return Absent(answer.lease)
    if isinstance(answer, protocol.NotCacheable):
        raise UncacheableError(answer.reason)
    if not isinstance(answer, protocol.Found):
        raise ProtocolError(f"a {type(answer).__name__} came where a Found was due")
    if answer.payload is not None:
        return Entry(answer.digest, answer.compile_seconds, answer.payload, answer.payload)
    return _read_descriptor(connection.take_descriptor(), answer)


def predicted_in(connection: Connection, found: protocol.Prediction) -> Iterator[tuple[str, Entry]]:
    """The entries that came with a prediction; what is wrong with one is found by who asks for it."""
    try:
        told = {
            str(item["key"]): protocol.Found(
                str(item["digest"]), int(item["stored_size"] or 0), float(item["compile_seconds"] or 0), None
            )
            for item in found.items
            if "digest" in item
        }
        for key, payload in found.payloads.items():
            yield key, Entry(told[key].digest, told[key].compile_seconds, payload, payload)
        for key in found.files:
            entry = told[key]
            with contextlib.suppress(DamagedError):
                yield key, _read_descriptor(connection.take_descriptor(), entry)
    except (LookupError, ValueError, ArithmeticError, ProtocolError) as error:
        # Of descriptors, as many come as this process may still have.
        logger.debug("what came with a prediction is not taken: %s", error)


def _read_descriptor(descriptor: int, found: protocol.Found) -> Entry:
    """Read an entry handed over as a file; mapping it alone would make a truncated file a fatal signal."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolError("what was handed over is not a file")
        if status.st_size != found.stored_size or not 0 < found.stored_size <= MAX_RAW_SIZE:
            raise DamagedError(f"its file has {status.st_size} bytes and not {found.stored_size}", found.digest)
        sealed = b"".join(_chunks(descriptor, found.stored_size))
        return Entry(found.digest, found.compile_seconds, sealed, _mapped(descriptor) or sealed)
    except (OSError, ValueError) as error:
        let_pass(error)
        # ValueError: a file that was emptied meanwhile cannot be mapped.
        raise DamagedError(f"its file cannot be read ({error})", found.digest) from None
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> mmap.mmap | None:
    """The file as memory; None where this process has no room for that, which is not the entry's fault."""
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return None


def _chunks(descriptor: int, size: int) -> Iterator[bytes]:
    at = 0
    while at < size and (chunk := os.pread(descriptor, size - at, at)):
        at += len(chunk)
        yield chunk


@contextlib.contextmanager
def in_memory_file(content: bytes) -> Iterator[int]:
    """A descriptor of a file that has no name and holds ``content``."""
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("xcache", os.MFD_CLOEXEC), "wb", buffering=0)  # noqa: SIM115
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    with file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        yield file.fileno()
