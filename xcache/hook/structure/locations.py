"""Write where the equations of a kernel stand: part of the program where jax does not strip it from kernels."""

from __future__ import annotations

import types
from typing import Any

from jax._src import cache_key, config

from xcache.hook.structure.encoding import Encoding, text

# jax 0.12 and newer strip it from the program.
_ARE_EMBEDDED = not hasattr(cache_key, "_strip_mosaic_debug_info")
# These settings decide how much of it jax embeds. They mean nothing for all other programs.
_SETTINGS = (
    "jax_include_full_tracebacks_in_locations",
    "jax_traceback_in_locations_limit",
    "jax_hlo_source_file_canonicalization_regex",
)
# The positions of each code object's instructions, with the object, whose id is in use as long.
_positions: dict[int, tuple[types.CodeType, list[Any]]] = {}


def settings(encoding: Encoding) -> None:
    """Write the settings that decide what of a location a kernel embeds."""
    if _ARE_EMBEDDED:
        holders = config.config._value_holders
        encoding.encode_all(getattr(holders.get(name), "value", None) for name in _SETTINGS)


def function(encoding: Encoding, debug_info: Any) -> None:
    """Write the name of a kernel's function and of its arguments, and where it was written if that counts."""
    encoding.write(text(str(debug_info.func_name)))
    encoding.encode(debug_info.arg_names)
    if _ARE_EMBEDDED:
        encoding.write(text(str(debug_info.func_src_info)))


def location(encoding: Encoding, source_info: Any) -> None:
    """Write the scopes of an equation, and where it was written if that counts."""
    encoding.write(text(str(source_info.name_stack)))
    if not _ARE_EMBEDDED:
        return
    if source_info.traceback is None:
        encoding.write(b"-")
        return
    codes, instructions = source_info.traceback.raw_frames()
    encoding.write(b"(%d" % len(codes))
    for code, instruction in zip(codes, instructions, strict=True):
        encoding.write(text(f"{code.co_filename} {code.co_qualname} {_position(code, instruction)}"))


def _position(code: types.CodeType, instruction: int) -> Any:
    known = _positions.get(id(code))
    if known is None:
        known = _positions[id(code)] = code, list(code.co_positions())
    return known[1][instruction // 2] if 0 <= instruction // 2 < len(known[1]) else instruction
