"""Small bytes that would take much memory, and the readers that get them: ``python -m support.bombs`` tries all.

Each reader must refuse its bombs as it refuses any other damage, and take no more than 64 MiB of address space for it.
The kernel counts that, and ends what goes far beyond it (RLIMIT_AS).
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from xcache import aliases, start_up
from xcache.cli import cost, ledger_file, prebuild, preflight
from xcache.cli.artifacts import process
from xcache.config import config
from xcache.errors import XcacheError
from xcache.keys import file_digests
from xcache.warming import frames
from xcache.wire import bounded, bundles, envelope, framing, header, parcel, runs, seals, trusted_keys
from xcache.wire.hashing import digest
from xcached.tiers import lease_object
from xcached.toolchains import rows

# Bytes of address space that a reader may take for a bomb, and that a test may take before it fails.
ROOM, _GUARD = 64 * 1024**2, 2 * 1024**3
_KEY = "ab" * 32
_HUGE = 2**40


def deep(levels: int) -> bytes:
    """Return lists in one another, each of which claims a million elements."""
    return (b"\xdd" + struct.pack(">I", 1_000_000)) * levels


def many(count: int) -> bytes:
    """Return a list of lists of empty maps, each of which is one byte."""
    inner = b"\xdc" + struct.pack(">H", 4000) + b"\x80" * 4000
    return b"\xdc" + struct.pack(">H", count) + inner * count


def repeated(size: int, declared: int | None) -> bytes:
    """Return a frame of zstd that says one byte so many times: four bytes of it make 128 KiB."""
    head = b"\x28\xb5\x2f\xfd"
    # One segment with a size of eight bytes; or a window of 128 KiB and no size.
    head += b"\x00\x38" if declared is None else b"\xe0" + struct.pack("<Q", declared)
    block, last = (struct.pack("<I", (128 * 1024) << 3 | 1 << 1 | is_last)[:3] + b"\0" for is_last in (0, 1))
    return head + block * (size // (128 * 1024) - 1) + last


def packed(plain: bytes) -> bytes:
    """Return a frame of zstd that is what it says."""
    return zstandard.ZstdCompressor(level=19).compress(plain)


def bundle(index: bytes) -> Path:
    """Return a bundle without objects."""
    path = Path("x.xcb")
    path.write_bytes(struct.pack(">8sBQ", b"xcbundle", 1, 17) + index)
    return path


def sparse(name: str) -> Path:
    """Return a file of a terabyte that takes no room."""
    with open(name, "wb") as file:
        file.truncate(_HUGE)
    return Path(name)


def unsigned(magic: bytes, frame: bytes) -> bytes:
    """Return the beginning of an object that nobody has signed."""
    return struct.pack(">8sBBI", magic, 1, 0, len(frame)) + frame


def _trusted() -> trusted_keys.TrustedKeys:
    return trusted_keys.TrustedKeys.load(Path("no-keys"))


def _unpacked(content: bytes) -> object:
    return parcel.unpack(content, _KEY, "", _trusted(), 0.0, len(content), trust_unsigned=True)


def _run_unpacked(content: bytes) -> object:
    return runs.unpack(content, None, "", _trusted(), 0.0, trust_unsigned=True)


def _labelled(content: bytes) -> object:
    return parcel.label(content, _KEY, "", _trusted(), 0.0)


def _streamed(content: bytes) -> object:
    return list(framing.FrameReader().feed(content))


def _sealed(frame: bytes, size: int) -> object:
    sealed = header.pack(_KEY, size) + frame
    return envelope.open_sealed(_KEY, digest(sealed), sealed)


def _left_in(name: str) -> object:
    Path("left").mkdir(exist_ok=True)
    sparse(f"left/{name}")
    return process._left_in("left")


def _aliased(facts: bytes) -> object:
    return aliases._from_wire(seals.sealed(_KEY, _KEY, facts))


def _run_of(text: str) -> start_up.Run:
    return start_up.Run(*[{"arguments": text} if name == "facts" else "" for name in start_up.Run._fields])


def _ledger_row(text: str) -> Any:
    return type("Row", (), {"spans": text})


Bomb = Callable[[], object]
_HEADERS = {
    "declares a terabyte": repeated(128 * 1024, _HUGE),
    "declares nothing": repeated(3 * 1024**3, None),
    "is eight gigabytes": repeated(8 * 1024**3, 8 * 1024**3),
    "claims millions": packed(deep(200)),
    "has millions of maps": packed(many(2000)),
}
_DEEP = "[" * 500_000

# By module: what it decodes or reads to an end. tests/fuzz/test_bounds.py compares the modules with the source.
BOMBS: dict[str, dict[str, Bomb]] = {
    "xcache.wire.framing": {
        "claims millions": lambda: framing.decode(deep(200_000)),
        "has a million maps": lambda: framing.decode(many(250)),
        "a length of gigabytes": lambda: _streamed(struct.pack(">I", 2**32 - 1)),
    },
    "xcache.wire.signed_header": {
        f"{kind} {name}": lambda read=read, magic=magic, frame=frame: read(unsigned(magic, frame))
        for kind, read, magic in (
            ("a parcel that", _unpacked, b"xcparcel"),
            ("a label that", _labelled, b"xcparcel"),
            ("a run that", _run_unpacked, b"xcachrun"),
        )
        for name, frame in _HEADERS.items()
    },
    "xcache.wire.bundles": {
        **{name: lambda frame=frame: bundles.Bundle(bundle(frame)) for name, frame in _HEADERS.items()},
        "a row of a hundred thousand": lambda: bundles.Bundle(bundle(packed(b"\x91" + many(30)))),
        "a terabyte": lambda: bundles.Bundle(sparse("large.xcb")),
    },
    "xcache.wire.envelope": {
        "declares a terabyte": lambda: _sealed(repeated(128 * 1024, _HUGE), _HUGE),
        "declares nothing": lambda: _sealed(repeated(3 * 1024**3, None), 3 * 1024**3),
        "a program of gigabytes": lambda: envelope.programs_in(repeated(3 * 1024**3, 3 * 1024**3)),
        "more than the program declares": lambda: envelope.programs_in(repeated(3 * 1024**3, 128 * 1024)),
        "gigabytes behind the program": lambda: envelope.programs_in(
            envelope.compress(b"program") + repeated(3 * 1024**3, 3 * 1024**3)
        ),
        "gigabytes that are not declared": lambda: envelope.programs_in(
            envelope.compress(b"program") + repeated(3 * 1024**3, None)
        ),
    },
    "xcache.wire.bounded": {
        "zlib": lambda: bounded.inflated(_deflated(256 * 1024**2), 16 * 1024**2),
        "a terabyte": lambda: bounded.content_of(sparse("sparse"), 1024),
        "what never ends": lambda: bounded.content_of(Path("/dev/zero"), 1024),
    },
    "xcache.wire.ownership": {"what never ends": lambda: bounded.text_of(Path("/dev/zero"))},
    "xcache.aliases": {
        "claims millions": lambda: _aliased(deep(12_000)),
        "has thousands of maps": lambda: _aliased(many(15)),
    },
    "xcache.warming.frames": {
        "a length of exabytes": lambda: frames.read_frame(io.BytesIO(struct.pack(">Q", 2**63))),
        "a length of gigabytes": lambda: frames.read_frame(io.BytesIO(struct.pack(">Q", 2**32) + b"\x80")),
        "claims millions": lambda: frames.unpacked(deep(1000)),
    },
    "xcache.config.config": {
        "a terabyte": lambda: config.load({"XCACHE_CONFIG": str(sparse("config.toml"))}),
        "deep": lambda: config.load({"XCACHE_CONFIG": str(_written("deep.toml", f"x = {_DEEP}"))}),
    },
    "xcache.start_up": {
        "arguments": lambda: _run_of(_DEEP).arguments or _refused(),
        "spans": lambda: start_up.spans_of(_ledger_row(_DEEP)) or _refused(),
    },
    "xcache.keys.file_digests": {"a memo": lambda: file_digests._read_memo(sparse("memo.json")) or _refused()},
    "xcache.cli.artifacts.process": {"what a worker left": lambda: _left_in("program.txt")},
    "xcache.cli.ledger_file": {"facts": lambda: ledger_file._run(1, *_columns(_DEEP)).run.facts or _refused()},
    "xcache.cli.cost": {"what was computed": lambda: cost._kept(sparse("costs.json")) or _refused()},
    "xcache.cli.prebuild": {
        "a terabyte": lambda: prebuild._calls(sparse("calls.json")),
        "deep": lambda: prebuild._calls(_written("deep.json", _DEEP)),
    },
    "xcache.cli.preflight": {"a terabyte": lambda: preflight._read(sparse("run.lock"))},
    "xcached.tiers.lease_object": {
        name: lambda frame=frame: lease_object.decoded(unsigned(b"xclease\0", frame), "", _trusted(), 0.0) or _refused()
        for name, frame in _HEADERS.items()
    },
    "xcached.toolchains.rows": {"files": lambda: rows._installation(_KEY, 0, _DEEP, "here", 0.0, 0) or _refused()},
}


class RefusedError(Exception):
    """A reader took the bomb for nothing, as it should."""


def _refused() -> object:
    raise RefusedError


def _deflated(size: int) -> bytes:
    import zlib

    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(1024**2)) for _ in range(size // 1024**2)), packer.flush()])


def _written(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def _columns(facts: str) -> Iterator[Any]:
    return (facts if name == "facts" else "" for name in start_up.Run._fields)


def tried(bomb: Bomb) -> str:
    """Return what was wrong with how a reader took a bomb, in a child of its own; empty if it refused it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "it ended"
        try:
            said = _taken(bomb)
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        found = said.read()
    os.waitpid(child, 0)
    return found


def _taken(bomb: Bomb) -> str:
    before = _address_space("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + _GUARD, resource.RLIM_INFINITY))
    said = _outcome(bomb)
    # What a library could not get, it may have reported as something else.
    took = _address_space("VmPeak") - before
    return said or (f"it took {took // 1024**2} MiB" if took > ROOM else "")


def _outcome(bomb: Bomb) -> str:
    try:
        found = bomb()
    except MemoryError:
        return "it asked for more memory than there was"
    except (RefusedError, XcacheError, bounded.UnreadableError):
        return ""
    except BaseException as error:  # noqa: BLE001 - the parent is to know
        return "" if type(error).__name__ in ("Failure", "WrongUsage") else f"it raised {error!r:.300}"
    return "" if found is None else f"it took it for {found!r:.100}"


def _address_space(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def main() -> None:
    """Print what was wrong with each reader, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        wrong = {f"{module}: {name}": tried(bomb) for module, bombs in BOMBS.items() for name, bomb in bombs.items()}
        os.chdir("/")
    json.dump({name: said for name, said in wrong.items() if said}, sys.stdout)


if __name__ == "__main__":
    main()
