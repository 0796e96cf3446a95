"""Digest the files that flags and compile options name: XLA reads them while compiling, so their content counts."""

from __future__ import annotations

import functools
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from xcache.errors import UncacheableError
from xcache.wire.hashing import digest

# The options whose files XLA is known to read, by the field number in DebugOptions.
READ_BY_XLA = {
    127: "xla_gpu_ptx_file",
    128: "xla_gpu_algorithm_denylist_path",
    150: "xla_gpu_llvm_ir_file",
    210: "xla_gpu_pgle_profile_file_or_directory_path",
    223: "xla_gpu_load_autotune_results_from",
    261: "xla_gpu_target_config_filename",
    377: "xla_gpu_experimental_collective_perf_table_path",
    383: "xla_gpu_experimental_matmul_perf_table_path",
    434: "xla_gpu_gemm_autotuner_override_file",
    544: "xla_candidate_configs_file",
    554: "xla_gpu_topology_filename",
}
_NAMES = frozenset(READ_BY_XLA.values())
_MAX_FILE_BYTES = 64 * 1024 * 1024
_SETTLED_SECONDS = 2.0


def digests(options: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return (option name, content digest) for each file that one of the ``(name, value)`` options names."""
    found = []
    for name, value in options:
        if name in _NAMES:
            if value:
                found.append((name, read_digest(value, "an option names")))
        else:
            found += [(name, content) for part in _parts(value) if (content := _digest_if_file(part)) is not None]
    return tuple(found)


def read(name: str, named_by: str) -> bytes:
    """Return the bytes of a file; raise UncacheableError for anything else: reading a pipe would empty it for XLA."""
    path = Path(name.removeprefix("file://"))
    try:
        if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
            return path.read_bytes()
    except (OSError, ValueError):
        # ValueError: the name holds a null character, as a file of flags may.
        pass
    raise UncacheableError(f"{named_by} a file that cannot be read")


def read_digest(name: str, named_by: str) -> str:
    """Return the digest of a file's content; raise UncacheableError if it cannot be read."""
    try:
        looks = Path(name.removeprefix("file://")).stat()
    except (OSError, ValueError):
        raise UncacheableError(f"{named_by} a file that cannot be read") from None
    if not is_settled(looks):
        return digest(read(name, named_by))
    return _digest_by_looks(
        name, named_by, looks.st_dev, looks.st_ino, looks.st_size, looks.st_mtime_ns, looks.st_ctime_ns
    )


def is_settled(looks: os.stat_result) -> bool:
    """Return False for a file that changed just now: it may change again without its mtime or ctime showing it."""
    return time.time() - max(looks.st_mtime, looks.st_ctime) > _SETTLED_SECONDS


@functools.lru_cache(maxsize=64)
def _digest_by_looks(name: str, named_by: str, *_looks: int) -> str:
    return digest(read(name, named_by))


def _digest_if_file(name: str) -> str | None:
    """Return the digest if this names a file: flags unknown here, of LLVM or of libtpu may have XLA read it."""
    try:
        looks = Path(name).stat()
    except (OSError, ValueError):
        return None
    return read_digest(name, "an option names") if stat.S_ISREG(looks.st_mode) else None


@functools.lru_cache(maxsize=256)
def _parts(value: str) -> tuple[str, ...]:
    """Return the parts of a value that may name a file: the whole, and each of several, perhaps after ``name=``."""
    parts = [value.removeprefix("file://"), *re.split(r"[,;:=\s]", value)] if re.search(r"[^\W\d_]", value) else []
    return tuple(dict.fromkeys(part for part in parts if part and part not in ("true", "false")))
