"""The flags component: XLA_FLAGS, LIBTPU_INIT_ARGS and ``--xla*`` arguments, as XLA itself would parse them."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xcache.errors import UncacheableError
from xcache.keys import digest, lines
from xcache.keys.options import LEFT_OUT

_ONLY_DUMP_OR_LOG = re.compile(
    r"xla_(\w+_)?dump_\w+|xla_tpu_sdc_checker_(streamz_metric|\w+_callbacks|\w+_are_present)"
)
_LEFT_OUT_NAMES = frozenset(LEFT_OUT.values())
# Files that XLA reads while compiling: their content counts, so it stands beside their name.
_READ_FROM = frozenset(
    {
        "xla_candidate_configs_file",
        "xla_gpu_algorithm_denylist_path",
        "xla_gpu_experimental_collective_perf_table_path",
        "xla_gpu_experimental_matmul_perf_table_path",
        "xla_gpu_gemm_autotuner_override_file",
        "xla_gpu_llvm_ir_file",
        "xla_gpu_load_autotune_results_from",
        "xla_gpu_pgle_profile_file_or_directory_path",
        "xla_gpu_ptx_file",
        "xla_gpu_target_config_filename",
        "xla_gpu_topology_filename",
    }
)
_FLAG = re.compile(
    r"""\s*(?P<name>-[A-Za-z0-9_-]*)  # a flag starts with a dash
        (?:=(?:"(?P<double>(?:\\.|[^"\\])*)"?|'(?P<single>[^']*)'?)|(?P<plain>\S*))""",
    re.VERBOSE | re.DOTALL,
)


def collect(
    environ: Mapping[str, str] | None = None,
    argv: Iterable[str] | None = None,
    *,
    extra: str = "",
    prefixes: tuple[str, ...] = (),
) -> bytes:
    """The flags that count, as sorted lines; jax lets a program add text and prefixes of arguments of its own."""
    environ = os.environ if environ is None else environ
    arguments = tuple(arg for arg in (sys.argv if argv is None else argv) if arg.startswith(("--xla", *prefixes)))
    flags = _parse_all(_text(environ.get("XLA_FLAGS", "")), environ.get("LIBTPU_INIT_ARGS", ""), arguments)
    added = {f"{name} content": digest(_read(flags[name], "a flag names")) for name in _READ_FROM.intersection(flags)}
    if extra:
        added["custom key"] = extra
    return lines(flags | added) if added else _joined(tuple(flags.items()))


@functools.lru_cache(maxsize=64)
def _parse_all(xla_flags: str, libtpu: str, arguments: tuple[str, ...]) -> dict[str, str]:
    flags = dict([*_split(xla_flags), *_split(libtpu), *map(_split_one, arguments)])
    return {name: value for name, value in flags.items() if _counts(name)}


def _counts(name: str) -> bool:
    return name not in _LEFT_OUT_NAMES and not _ONLY_DUMP_OR_LOG.fullmatch(name)


@functools.lru_cache(maxsize=64)
def _joined(flags: tuple[tuple[str, str], ...]) -> bytes:
    return lines(dict(flags))


def _text(xla_flags: str) -> str:
    """XLA takes a value that does not begin with a dash for the name of a file with flags."""
    if not xla_flags.strip() or xla_flags.lstrip().startswith("-"):
        return xla_flags
    return _read(xla_flags, "XLA_FLAGS names").decode("utf-8", "surrogateescape")


def _split(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    # Matched where it stands: to cut off what has been read would copy the rest of a long file for each of its flags.
    while match := _FLAG.match(text, at):
        at = match.end()
        if match["plain"] is None:
            value = match["single"] if match["single"] is not None else re.sub(r"\\(.)", r"\1", match["double"])
            yield match["name"].lstrip("-"), value
        else:
            yield _split_one(match["name"] + match["plain"])
    rest = text[at:].strip()
    if rest:
        # XLA ignores what follows the first thing that is no flag; counting it is the safe side.
        yield "rest", rest


def _split_one(argument: str) -> tuple[str, str]:
    name, equals, value = argument.lstrip("-").partition("=")
    return name, value if equals else "true"


def _read(name: str, who_names_it: str) -> bytes:
    """The bytes of a file, to which nothing may happen by reading: a pipe would be empty for XLA, or never end."""
    path = Path(name)
    try:
        if path.is_file():
            return path.read_bytes()
    except (OSError, ValueError):
        # ValueError: a null character, as it may stand in a file of flags.
        pass
    raise UncacheableError(f"{who_names_it} a file that cannot be read")
