"""Receive entries and aliases from the daemon and hand new entries over: inline, or as descriptors of files."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from typing import NamedTuple

from xcache.client.breaker import Wait
from xcache.client.connection import Connection
from xcache.descriptors import check_file_size
from xcache.errors import DamagedAliasError, DamagedError, ProtocolError, UncacheableError
from xcache.signals import reraise_if_the_programs
from xcache.wire import protocol, seals
from xcache.wire.envelope import MAX_RAW_SIZE

_MAX_OFFSET = 2**53

logger = logging.getLogger("xcache")

# With these seals nobody can change the file or its size again.
_SEALS = sum(getattr(fcntl, f"F_SEAL_{name}", 0) for name in ("WRITE", "SHRINK", "GROW"))


class SealedEntry(NamedTuple):
    """An executable as the daemon handed it over: in its envelope, not yet checked."""

    digest: str
    compile_seconds: float
    sealed: bytes
    waited: float = 0.0
    """Seconds spent waiting for another program to compile it."""
    wait: Wait | None = None
    """The program's wait for the daemon, which was charged to its allowance."""
    daemon_seconds: float = 0.0
    """Seconds that the daemon took to look it up, as it says."""


class HeldLease:
    """The lease that one request of the program was granted, if any."""

    def __init__(self) -> None:
        self._held: tuple[str, int] | None = None

    def take(self, key: str, lease: int) -> None:
        """Hold a lease."""
        self._held = key, lease

    def hand_on(self) -> tuple[str, int] | None:
        """Return what is held, and hold nothing any more."""
        held, self._held = self._held, None
        return held


class Absent(NamedTuple):
    """There is no entry. With a lease (not 0), other programs wait for this one to compile it."""

    lease: int
    waited: float = 0.0
    serialize_first: bool = False
    """Whether its executable may only be serialized before it runs."""
    cause: str = ""
    """One of ``ledger.CAUSES``, or empty."""
    nearest: list[str] | None = None
    """The key and components of the entry that is most like the wanted one, as in ``protocol.Missing``."""
    daemon_seconds: float = 0.0
    """Seconds that the daemon took to look for it, as it says."""
    complaints: tuple[protocol.Complain, ...] = ()
    """Complaints about unusable entries, sent once the same program has been compiled."""


def found_in(connection: Connection, answer: protocol.Message) -> SealedEntry | Absent:
    """Return the entry in the answer to a Get, or Absent; raise UncacheableError if the key is marked so."""
    if isinstance(answer, protocol.Missing):
        return Absent(answer.lease, cause=answer.cause, nearest=answer.nearest, daemon_seconds=answer.seconds)
    if isinstance(answer, protocol.NotCacheable):
        if answer.reason == protocol.SERIALIZE_FIRST:
            return Absent(0, serialize_first=True)
        raise UncacheableError(answer.reason)
    if not isinstance(answer, protocol.Found):
        raise ProtocolError(f"the daemon answered {type(answer).__name__} instead of Found")
    if answer.payload is not None:
        return SealedEntry(answer.digest, answer.compile_seconds, answer.payload, daemon_seconds=answer.seconds)
    return _read_descriptor(connection.take_descriptor(), answer)


def predicted_in(connection: Connection, found: protocol.Prediction) -> Iterator[tuple[str, SealedEntry]]:
    """Yield the entries that came with a prediction, by key; unusable ones are left out."""
    try:
        told = {
            str(item["key"]): protocol.Found(
                str(item["digest"]),
                int(item["stored_size"] or 0),
                float(item["compile_seconds"] or 0),
                None,
                offset=int(item.get("offset") or 0),
            )
            for item in found.items
            if "digest" in item
        }
        for key, payload in found.payloads.items():
            yield key, SealedEntry(told[key].digest, told[key].compile_seconds, payload)
        for key in found.files:
            entry = told[key]
            with contextlib.suppress(DamagedError):
                yield key, _read_descriptor(connection.take_descriptor(), entry)
    except (LookupError, ValueError, ArithmeticError, ProtocolError) as error:
        # Near the descriptor limit, fewer descriptors arrive.
        logger.debug("the rest of a prediction's entries is dropped: %s", error)


def alias_in(structure: str, answer: protocol.Message) -> protocol.Alias | None:
    """Return the alias in the answer to an AskAlias, or None; raise DamagedAliasError if it is damaged."""
    if isinstance(answer, protocol.NoAlias):
        return None
    if not isinstance(answer, protocol.Alias):
        raise ProtocolError(f"the daemon answered {type(answer).__name__} instead of Alias")
    if answer.structure != structure:
        raise DamagedAliasError("an alias belongs to another structure", answer.seal)
    return seals.opened(answer)


def aliases_in(found: protocol.Prediction) -> Iterator[protocol.Alias]:
    """Yield the aliases that came with a prediction; damaged ones are left out, and found when they are asked for."""
    for fields in found.aliases:
        with contextlib.suppress(DamagedAliasError):
            yield seals.opened(fields)


def _read_descriptor(descriptor: int, found: protocol.Found) -> SealedEntry:
    """Read an entry handed over as a file; if it were mapped, truncating the file would kill the program."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolError("the daemon handed over a descriptor that is not a file")
        if not 0 < found.stored_size <= MAX_RAW_SIZE or not 0 <= found.offset <= _MAX_OFFSET:
            raise DamagedError(f"it cannot have {found.stored_size} bytes at {found.offset}", found.digest)
        end = found.offset + found.stored_size
        # A file of its own has nothing else; a bundle goes on.
        if status.st_size < end or (status.st_size > end and not found.offset):
            raise DamagedError(f"its file has {status.st_size} bytes and not {end}", found.digest)
        sealed = b"".join(_chunks(descriptor, found.offset, end))
        return SealedEntry(found.digest, found.compile_seconds, sealed, daemon_seconds=found.seconds)
    except OSError as error:
        reraise_if_the_programs(error)
        raise DamagedError(f"its file cannot be read ({error})", found.digest) from None
    finally:
        os.close(descriptor)


def _chunks(descriptor: int, at: int, end: int) -> Iterator[bytes]:
    while at < end and (chunk := os.pread(descriptor, end - at, at)):
        at += len(chunk)
        yield chunk


def hand_over(connection: Connection, contents: Sequence[bytes], timeout: float) -> None:
    """Write the large contents of the next Put into memory files that the daemon makes for them."""
    # Checked first, so that the daemon makes no file that could not be written.
    check_file_size(max(map(len, contents)))
    connection.demand(protocol.AskFiles(len(contents)), protocol.Files, timeout)
    for content in contents:
        descriptor = connection.take_descriptor()
        try:
            if _SEALS:
                # Only a memory file has seals; writing to a pipe, say, could wait for ever.
                fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            with open(descriptor, "wb", buffering=0, closefd=False) as file:
                write_sealed(file, content)
        except OSError as error:
            reraise_if_the_programs(error)
            raise ProtocolError(f"the daemon's memory file cannot be written ({error})") from None
        finally:
            os.close(descriptor)


def write_sealed(file: FileIO, content: bytes) -> None:
    """Write a memory file and seal it; the daemon reads only files that nobody can change any more."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
    if _SEALS:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
