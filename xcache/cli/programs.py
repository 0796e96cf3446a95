"""The program an entry was compiled from: its bytecode, and as text."""

from __future__ import annotations

import zstandard

from xcache import stablehlo
from xcache.cli import Failure
from xcache.cli.reading import Row, StoreReader
from xcache.errors import DamagedError
from xcache.payload import MAX_RAW_SIZE


def bytecode(store: StoreReader, program: Row) -> bytes:
    """The MLIR bytecode of a program."""
    digest = program["digest"]
    frame = store.content(program["blob"])
    try:
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced != program["raw_size"] or announced > MAX_RAW_SIZE:
            raise DamagedError(f"the program {digest[:12]} is damaged: its size differs")
        content: bytes = zstandard.ZstdDecompressor().decompress(frame)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedError(f"the program {digest[:12]} cannot be decompressed ({error})") from None
    return content


def as_text(program: bytes) -> str:
    """MLIR text, by means of the jaxlib that is installed here."""
    try:
        from jaxlib.mlir import ir
    except ImportError:
        raise Failure("there is no jaxlib here to print a program with; --program-bytes needs none") from None
    try:
        return str(stablehlo.parse(program))
    except (ir.MLIRError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise Failure(f"the jaxlib installed here cannot read this program: {reason}") from None
