"""The options component: the CompileOptions protocol buffer, without the fields that change no code.

This module reads the serialized message by field number: jaxlib's Python attributes show only some of its fields, and a
field that a newer jaxlib adds must count from its first day. The number of a protocol buffer's field is never reused.
The numbers below were found in jaxlib 0.6.2 and 0.12.0 by setting each flag and comparing the bytes.
"""

from __future__ import annotations

import functools

from xcache.errors import UncacheableError
from xcache.keys import named_files
from xcache.keys.protobuf import field_at, fields, varint

# CompileOptionsProto > executable_build_options > debug_options
_BUILD = (3,)
_DEBUG = (3, 3)
_PARTITIONS = (3, 5)
_DEVICE_ASSIGNMENT = (3, 9)
_DEVICE_ASSIGNMENT_IDS = (3, 9, 3)
# compiler_options={"xla_...": ...}
_OVERRIDES = (7,)
# Protocol buffers may write maps in any order.
_MAPS = {_OVERRIDES, (3, 3, 357), (3, 3, 500)}
_CUDA_DATA_DIR = 61

# Flags that only dump, log or print, those that name caches or tool folders (the toolchain has the tools), and the
# number of CPU devices (the platform has it).
LEFT_OUT = {
    61: "xla_gpu_cuda_data_dir",
    102: "xla_force_host_platform_device_count",
    109: "xla_dump_to",
    110: "xla_dump_hlo_module_re",
    111: "xla_dump_hlo_pass_re",
    112: "xla_dump_hlo_as_text",
    113: "xla_dump_hlo_as_proto",
    114: "xla_dump_hlo_as_dot",
    115: "xla_dump_hlo_as_url",
    116: "xla_dump_hlo_as_html",
    118: "xla_dump_hlo_snapshots",
    131: "xla_dump_include_timestamp",
    132: "xla_dump_max_hlo_modules",
    144: "xla_dump_module_metadata",
    149: "xla_dump_fusion_visualization",
    151: "xla_dump_compress_protos",
    153: "xla_dump_disable_metadata",
    154: "xla_dump_hlo_pipeline_re",
    155: "xla_gpu_dump_llvmir",
    164: "xla_dump_hlo_as_long_text",
    182: "xla_dump_latency_hiding_schedule",
    185: "xla_dump_enable_mlir_pretty_form",
    222: "xla_gpu_dump_autotune_results_to",
    232: "xla_gpu_dump_autotuned_gemm_fusions",
    251: "xla_debug_buffer_assignment_show_max",
    252: "xla_detailed_logging",
    253: "xla_enable_dumping",
    290: "xla_dump_large_constants",
    292: "xla_gpu_dump_autotune_logs_to",
    306: "xla_gpu_kernel_cache_file",
    310: "xla_gpu_per_fusion_autotune_cache_dir",
    324: "xla_gpu_experimental_autotune_cache_mode",
    338: "xla_gpu_experimental_dump_fdo_profiles",
    352: "xla_gpu_dump_hlo_unoptimized_snapshots",
    381: "xla_dump_full_hlo_config",
    405: "xla_dump_hlo_unoptimized_snapshots",
    427: "xla_gpu_experimental_dump_gpu_executable",
    433: "xla_dump_emitter_re",
    436: "xla_enable_scoped_logging_timers",
    445: "xla_gpu_dump_autotuned_instructions",
    454: "xla_gpu_print_compilation_stats",
    466: "xla_dump_buffer_assignment_analysis",
    495: "xla_dump_compact_gte",
    498: "xla_dump_hlo_as_riegeli",
    502: "xla_dump_hlo_to_subfolder",
    540: "xla_gpu_dump_cost_model_top_k_candidates_to",
}
# The flags among these that by themselves have XLA write something; the others only say how.
_DUMPS = frozenset((109, 112, 113, 114, 115, 116, 118, 222, 292, 338, 352, 405, 498, 540))
LEFT_OUT_NAMES = frozenset(LEFT_OUT.values())

_Path = tuple[int, ...]
# Each device's id, process and slice.
_Places = tuple[tuple[int, object, object], ...]


def canonical(serialized: bytes, *, places: _Places | None = None) -> bytes:
    """Return the fields that count, a ``path=value`` line each, and a digest of each file they name.

    With ``places`` the devices' ids do not count, only their processes and slices.
    """
    text, strings = _read(serialized, places)
    files = named_files.digests(strings)
    return b"\n".join([text, *(f"content of {name}={digest}".encode() for name, digest in files)]) if files else text


def lines_of(serialized: bytes, *, places: _Places | None = None) -> bytes:
    """Return the same lines without those of files; no file is read."""
    return _read(serialized, places)[0]


def partitions(serialized: bytes) -> int:
    """Return how many partitions XLA is to make of a program."""
    found = field_at(serialized, _PARTITIONS)
    return found if isinstance(found, int) else 1


@functools.lru_cache(maxsize=512)
def asks_for_dumps(serialized: bytes) -> bool:
    """Return whether XLA is to write files, or lines, about what it compiles: a program from the cache writes none."""
    debug, overrides = _debug_and_overrides(serialized)
    return any(number in _DUMPS and value not in (b"", 0) for number, value in debug) or any(
        name == LEFT_OUT[number] for name, _ in overrides for number in _DUMPS
    )


@functools.lru_cache(maxsize=512)
def cuda_data_dirs(serialized: bytes) -> tuple[str, ...]:
    """Return the CUDA folders that the options name: the one from flags or jax, and any that overrides it."""
    debug, overrides = _debug_and_overrides(serialized)
    named = (value for number, value in debug if number == _CUDA_DATA_DIR)
    chosen = [value.decode("utf-8", "surrogateescape") for value in named if isinstance(value, bytes)]
    chosen += [value for name, value in overrides if name == LEFT_OUT[_CUDA_DATA_DIR]]
    return tuple(dict.fromkeys(value for value in chosen if value))


def _debug_and_overrides(serialized: bytes) -> tuple[list[tuple[int, int | bytes]], list[tuple[str, str]]]:
    """Return the fields of the debug options, and the options that override them."""
    try:
        build = [value for number, value in fields(serialized) if number == _BUILD[0] and isinstance(value, bytes)]
        debug = [value for part in build for number, value in fields(part) if number == 3 and isinstance(value, bytes)]
        overrides = [_override(value) for number, value in fields(serialized) if (number,) == _OVERRIDES]
        return [field for part in debug for field in fields(part)], overrides
    except (IndexError, ValueError):
        raise UncacheableError("compile options that cannot be read") from None


@functools.lru_cache(maxsize=512)
def _read(serialized: bytes, places: _Places | None) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return the lines, and the options with a text as value, which may name a file."""
    rows: list[tuple[_Path, str]] = []
    strings: list[tuple[str, str]] = []
    try:
        _collect((), serialized, None if places is None else _Mesh(places), rows, strings)
    except (IndexError, ValueError):
        raise UncacheableError("compile options that cannot be read") from None
    # The sort is stable: repeated fields keep their order, while the entries of maps are sorted.
    rows.sort(key=lambda row: (row[0], row[1] if row[0] in _MAPS else ""))
    strings.sort(key=lambda option: option[0])
    return "\n".join(f"{'.'.join(map(str, path))}={value}" for path, value in rows).encode(), tuple(strings)


def _collect(
    path: _Path, message: bytes, mesh: _Mesh | None, rows: list[tuple[_Path, str]], strings: list[tuple[str, str]]
) -> None:
    for number, value in fields(message):
        here = (*path, number)
        if path == _DEBUG and number in LEFT_OUT:
            continue
        if isinstance(value, bytes) and here in (_BUILD, _DEBUG, _DEVICE_ASSIGNMENT):
            _collect(here, value, mesh, rows, strings)
        elif mesh is not None and here == _DEVICE_ASSIGNMENT_IDS and isinstance(value, bytes):
            rows.append((here, mesh.renumbered(value)))
        else:
            name, text = _option(here, value)
            if here == _OVERRIDES and name in LEFT_OUT_NAMES:
                continue
            rows.append((here, value.hex() if isinstance(value, bytes) else str(value)))
            if text:
                strings.append((name, text))


def _option(path: _Path, value: int | bytes) -> tuple[str, str]:
    """Return the name and text of an option whose value is a text, else two empty strings."""
    if path == _OVERRIDES:
        return _override(value)
    if path[:-1] == _DEBUG and isinstance(value, bytes):
        text = value.decode("utf-8", "surrogateescape")
        if path[-1] in named_files.READ_BY_XLA:
            return named_files.READ_BY_XLA[path[-1]], text
        # Bytes of numbers and messages hold characters that are in no file name.
        return f"field {path[-1]}", text if text.isprintable() and text not in ("inf", "nan") else ""
    return "", ""


def _override(entry: int | bytes) -> tuple[str, str]:
    """Return the name in one entry of env_option_overrides, and its value if it is a text."""
    parts = dict(fields(entry)) if isinstance(entry, bytes) else {}
    name, value = parts.get(1, b""), parts.get(2, b"")
    text = dict(fields(value)).get(1, b"") if isinstance(value, bytes) else b""
    return (
        name.decode("utf-8", "replace") if isinstance(name, bytes) else "",
        text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else "",
    )


class _Mesh:
    """Renumbers devices, processes and slices in the order in which an assignment names them."""

    def __init__(self, places: _Places) -> None:
        self._places = {number: (process, slice_index) for number, process, slice_index in places}
        self._devices: dict[object, int] = {}
        self._processes: dict[object, int] = {}
        self._slices: dict[object, int] = {}

    def renumbered(self, message: bytes) -> str:
        """Return the devices of one computation: ``device@process/slice`` for each replica."""
        return " ".join(self._named(number) for number in device_numbers(message))

    def _named(self, number: int) -> str:
        process, slice_index = self._places.get(number, (None, None))
        device = self._devices.setdefault(number, len(self._devices))
        process = self._processes.setdefault(process, len(self._processes))
        return f"{device}@{process}/{self._slices.setdefault(slice_index, len(self._slices))}"


def device_numbers(message: bytes) -> list[int]:
    """Return the device ids of one ComputationDevice, packed or not."""
    found: list[int] = []
    for number, value in fields(message):
        if number != 1:
            raise ValueError(f"field {number} of a device assignment")
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = varint(value, at)
            found.append(one)
    return found
