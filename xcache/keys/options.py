"""The options component: the CompileOptions protocol buffer, less what changes no code.

It is read on the wire, by field number: jaxlib's Python attributes show only some of its fields, and a field that a
newer jaxlib adds has to count from its first day. Field numbers of a protocol buffer are never given to another field;
those below were read from jaxlib 0.6.2 and 0.12.0 by setting each flag and comparing the bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from xcache.errors import UncacheableError

# CompileOptionsProto > executable_build_options > debug_options
_BUILD = (3,)
_DEBUG = (3, 3)
_DEVICE_ASSIGNMENT = (3, 9)
_DEVICE_ASSIGNMENT_IDS = (3, 9, 3)
# Maps, which protocol buffers may write in any order.
_MAPS = {(7,), (3, 3, 357), (3, 3, 500)}

# Flags that only dump, log or print, and names of caches and tool directories (whose tools are in the toolchain).
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
_LEFT_OUT_NAMES = frozenset(LEFT_OUT.values())

_Path = tuple[int, ...]


@functools.lru_cache(maxsize=512)
def canonical(serialized: bytes, *, ignore_device_numbers: bool) -> bytes:
    """The fields that count as sorted-by-map ``path=value`` lines; on GPU without the numbering of devices."""
    rows: list[tuple[_Path, str]] = []
    try:
        _collect((), serialized, ignore_device_numbers, rows)
    except (IndexError, ValueError):
        raise UncacheableError("compile options that cannot be read") from None
    # Sorting is stable: repeated fields keep their order, and maps (whose order says nothing) lose it.
    rows.sort(key=lambda row: (row[0], row[1] if row[0] in _MAPS else ""))
    return "\n".join(f"{'.'.join(map(str, path))}={value}" for path, value in rows).encode()


def _collect(path: _Path, message: bytes, ignore_device_numbers: bool, rows: list[tuple[_Path, str]]) -> None:
    for number, value in _fields(message):
        here = (*path, number)
        if (path == _DEBUG and number in LEFT_OUT) or (ignore_device_numbers and here == _DEVICE_ASSIGNMENT_IDS):
            continue
        if isinstance(value, bytes) and here in (_BUILD, _DEBUG, _DEVICE_ASSIGNMENT):
            _collect(here, value, ignore_device_numbers, rows)
        elif not (here == (7,) and isinstance(value, bytes) and _override_name(value) in _LEFT_OUT_NAMES):
            rows.append((here, value.hex() if isinstance(value, bytes) else str(value)))


def _override_name(entry: bytes) -> str:
    """The key of one entry of env_option_overrides: ``compiler_options={"xla_...": ...}``."""
    return next((v.decode("utf-8", "replace") for n, v in _fields(entry) if n == 1 and isinstance(v, bytes)), "")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one message as (number, value), in the order they stand in."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > len(message):
            raise IndexError("cut short")
        yield number, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint")
