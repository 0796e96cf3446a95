"""All that lowering reads beside its arguments: jax's files, its configuration, and the backend."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
import ml_dtypes
import numpy as np
from jax._src import config
from jax._src import mesh as meshes

from xcache.clock import process_began
from xcache.errors import UncacheableError
from xcache.hook.structure.encoding import CannotSkipError, Encoding, text
from xcache.hook.structure.libraries import ROOTS
from xcache.hook.structure.pristine import pristine
from xcache.keys.file_digests import FileDigests

# Settings that say where to log, dump or cache, which devices to open (the devices themselves are encoded), or what a
# location holds (jax strips locations; locations.py adds these settings for kernels).
HARMLESS = frozenset((
    "jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_enable_compilation_cache", "jax_log_compiles",
    "jax_logging_level", "jax_dump_ir_to", "jax_dump_ir_modes", "jax_include_debug_info_in_dumps",
    "jax_traceback_filtering", "jax_explain_cache_misses", "jax_raise_persistent_cache_errors",
    "jax_debug_log_modules", "jax_captured_constants_report_frames",
    "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches", "jax_compilation_cache_check_contents",
    "jax_compilation_cache_expect_pgle", "jax_compilation_cache_include_metadata_in_key", "jax_coordination_service",
    "jax_hlo_source_file_canonicalization_regex", "jax_traceback_in_locations_limit",
    "jax_include_full_tracebacks_in_locations", "jax_platforms", "jax_num_cpu_devices",
    "jax_remove_custom_partitioning_ptr_from_cache_key", "jax_source_url_schema",
))  # fmt: skip


# The folder where digests are remembered; None for nowhere.
memo_folder: Path | None = None


def jax_files() -> str:
    """Return a digest of the versions of jax, jaxlib, numpy and ml_dtypes, and of the files of jax and jaxlib.

    Each ``.py`` and ``.so`` file counts by name and content: an edited checkout keeps its version, and the same version
    is installed at many times on many machines. Size and mtime say whether the contents must be read again. Raise
    CannotSkipError if they cannot be read, or changed after this process began and may have imported them.
    """
    made, reason = _digest_of_files()
    if reason:
        raise CannotSkipError(reason)
    return made


@functools.cache
def _digest_of_files() -> tuple[str, str]:
    """Return the digest, or why there is none."""
    found = dict(each for number, root in enumerate(ROOTS) for each in _files(root, f"{number}"))
    newest = max(max(status.st_mtime, status.st_ctime) for _, status in found.values())
    # It is infinite where nothing tells it.
    if not newest < process_began() < math.inf:
        return "", "files of jax are newer than the process"
    marks = "\n".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, (_, status) in sorted(found.items()))
    mark = hashlib.sha256(f"{ROOTS} {marks}".encode()).hexdigest()
    digests = FileDigests(memo_folder)
    try:
        contents = digests.of_tree(mark, {name: Path(path) for name, (path, _) in found.items()})
    except (OSError, UncacheableError):
        return "", "unreadable file of jax"
    digests.save()
    versions = (
        f"jax {jax.__version__} jaxlib {jaxlib.__version__} numpy {np.__version__} ml_dtypes {ml_dtypes.__version__}"
    )
    return hashlib.sha256(f"{versions}\n{contents}".encode()).hexdigest(), ""


def _files(folder: str, shown: str) -> Iterator[tuple[str, tuple[str, os.stat_result]]]:
    """Yield each file's name within jax, with its path and status."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _files(entry.path, f"{shown}/{entry.name}")
            elif entry.name.endswith((".py", ".so")):
                yield f"{shown}/{entry.name}", (entry.path, entry.stat())


def begin(encoding: Encoding, title: str, client: Any, *modules: str) -> None:
    """Begin what describes a program or call: with all that any depends on, and the code of these modules of jax's.

    Raise CannotSkipError where jax's code is not its own.
    """
    for part in (title, jax_files(), _backend(client)):
        encoding.write(text(part))
    context.write(encoding, config.trace_context(), _plain_context)
    settings.write(encoding, _configuration())
    encoding.write(pristine.digest(modules))


class _Memo:
    """The encoding of values, made anew only when one of them has changed."""

    def __init__(self) -> None:
        self.made: tuple[Any, bytes] = None, b""

    def write(self, encoding: Encoding, values: Any, plain: Callable[[Any], Any] = lambda values: values) -> None:
        """Write what ``plain`` makes of the values."""
        known, made = self.made
        if known != values:
            alone = Encoding()
            alone.encode(plain(values))
            if alone.has_met_objects:
                # The program may have them, too.
                encoding.encode(plain(values))
                return
            made = bytes.fromhex(alone.digest())
            self.made = values, made
        encoding.write(made)


context, settings = _Memo(), _Memo()


def _configuration() -> list[Any]:
    """Return the values of all settings and flags that count, after their names."""
    holders = config.config._value_holders
    names = _names_of_settings(len(holders))
    return [names, *(holders[name].value for name in names)]


@functools.cache
def _names_of_settings(_: int) -> list[str]:
    """Return the names of all settings that count; a module that is imported may add some of its own."""
    return sorted(name for name in config.config._value_holders if name not in HARMLESS)


def _plain_context(context: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what counts of jax's trace context."""
    return tuple(map(_plain, context))


def _plain(value: Any) -> Any:
    """Return what counts of a value in jax's trace context."""
    if isinstance(value, (meshes.Mesh, meshes.AbstractMesh)) and value.empty:
        # jax treats it as no mesh.
        return None
    if type(value).__name__ == "XlaMetadata":
        # It remembers its hash, which differs in each process.
        return "xla metadata", dict(sorted(value.val.items()))
    return value


_backends: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _backend(client: Any) -> str:
    """Return a text of what lowering can read from a client."""
    if client is None:
        return "none"
    told = _backends.get(client)
    if told is None:
        devices = client.devices()
        kind = devices[0].device_kind if devices else ""
        processes = client.process_count() if hasattr(client, "process_count") else 1
        told = f"{client.platform}|{client.platform_version}|{kind}|{len(devices)}|{processes}"
        _backends[client] = told
    return told
