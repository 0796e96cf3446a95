"""Read the program that an entry was compiled from, as bytecode or text."""

from __future__ import annotations

from xcache.cli import Failure
from xcache.cli.store_file import Row, StoreReader
from xcache.errors import DamagedError
from xcache.keys import stablehlo
from xcache.wire.bounded import UnreadableError
from xcache.wire.envelope import programs_in

NOT_HERE = "it stayed on the machine that lowered it, which sends programs only with programs=1 in its tier's address"


class ProgramElsewhere(Failure):
    """The entry came from a remote store, and its program stayed where it was lowered."""

    def __init__(self) -> None:
        super().__init__(f"this entry has no program: {NOT_HERE}")


def is_here(program: Row) -> bool:
    """Return whether the store has the content of a program; of entries from remote stores it may have none."""
    return int(program["raw_size"]) > 0


def bytecode(store: StoreReader, program: Row) -> bytes:
    """Return the MLIR bytecode of a stored program; raise DamagedError if it is damaged."""
    return both(store, program)[0]


def located_bytecode(store: StoreReader, program: Row) -> bytes:
    """Return a stored program with the source locations of whoever stored it first; without them if it has none."""
    plain, located = both(store, program)
    return located or plain


def both(store: StoreReader, program: Row) -> tuple[bytes, bytes]:
    """Return a stored program without source locations, and with them (empty if it has none)."""
    if not is_here(program):
        raise ProgramElsewhere
    digest = program["digest"]
    content = store.content(program["blob"])
    try:
        plain, located = programs_in(content)
    except (UnreadableError, MemoryError) as error:
        raise DamagedError(f"the program {digest[:12]} cannot be decompressed ({error})") from None
    if len(plain) != program["raw_size"]:
        raise DamagedError(f"the program {digest[:12]} is damaged: its size differs")
    return plain, located


def as_text(program: bytes) -> str:
    """Return a program as MLIR text, printed by the installed jaxlib."""
    try:
        from jaxlib.mlir import ir
    except ImportError:
        raise Failure("printing a program needs jaxlib, which is not here; --program-bytes works without") from None
    try:
        return str(stablehlo.parse(program))
    except (ir.MLIRError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise Failure(f"the jaxlib installed here cannot read this program: {reason}") from None
