"""The differences between versions of jax.

| difference | since jax |
|---|---|
| caches to clear with the backends are registered as objects, not by their functions | 0.7.0 |
| executables with Python callbacks hold no pointer | 0.11.0 |
| locations can be stripped from Mosaic kernels | 0.12.0 |

``skipping`` and ``structure`` handle the differences that matter only to skipped lowering, ``xcache.executables`` and
``xcache.keys`` those between versions of jaxlib. Any other version works if the signatures checked here fit it.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xcache.errors import UnsupportedError

_OLDEST = "0.6.2"
COMPILE_PARAMETERS = (
    "backend",
    "computation",
    "devices",
    "compile_options",
    "host_callbacks",
    "executable_devices",
    "pgle_profiler",
)
_BACKEND_PARAMETERS = ("backend", "module", "executable_devices", "options", "host_callbacks")
_CONFIG = (
    "compilation_cache_dir",
    "compilation_cache_expect_pgle",
    "compilation_cache_include_metadata_in_key",
    "enable_compilation_cache",
    "enable_pgle",
    "pgle_profiling_runs",
    "remove_custom_partitioning_ptr_from_cache_key",
    "share_binary_between_hosts",
)


class Jax(NamedTuple):
    """The parts of one jax that the hook touches, each found and checked once."""

    compiler: Any
    config: Any
    distributed: Any
    excluded_paths: list[str]
    exclude_from_locations: Callable[[str], Callable[[], None]]
    record_event: Callable[[str], None]
    record_duration: Callable[[str, float], None]
    note_compile_after_miss: Callable[[], None]
    dump_module: Callable[[Any], object]
    custom_key: Callable[[], str]
    flag_prefixes: Callable[[], list[str]]
    strip_kernels: Callable[[Any], None] | None
    callbacks_hold_pointers: bool
    only_compiles: Callable[[Any], bool]
    jaxlib_folder: Path
    jaxlib_version: str
    cuda_folder: Path | None
    backends: Callable[[], dict[str, Any]]
    watch_clearing: Callable[[Callable[[], None]], object]


def probe() -> Jax:
    """Find the parts of the installed jax; raise UnsupportedError if one is missing or has another signature."""
    try:
        import jaxlib
        from jax._src import (
            cache_key,
            compilation_cache,
            compiler,
            config,
            distributed,
            lib,
            monitoring,
            source_info_util,
            traceback_util,
            util,
            xla_bridge,
        )
        from jax._src.interpreters import mlir
        from jax._src.lib import _jax, version_str

        _check(compiler.compile_or_get_cached, COMPILE_PARAMETERS)
        _check(compiler.backend_compile_and_load, _BACKEND_PARAMETERS)
        for name in _CONFIG:
            getattr(config, name).value  # noqa: B018
        return Jax(
            compiler=compiler,
            config=config,
            distributed=distributed.global_state,
            excluded_paths=traceback_util._exclude_paths,
            exclude_from_locations=lambda path: _exclude_from_locations(source_info_util, path),
            record_event=monitoring.record_event,
            record_duration=monitoring.record_event_duration_secs,
            note_compile_after_miss=lambda: util.test_event("compile_after_persistent_compilation_miss"),
            dump_module=lambda module: mlir.dump_module_to_file(module, "compile"),
            # jax looks it up at each call, too.
            custom_key=lambda: cache_key.custom_hook(),
            flag_prefixes=cache_key.get_flag_prefixes,
            strip_kernels=getattr(cache_key, "_strip_mosaic_debug_info", None),
            callbacks_hold_pointers="host_callbacks"
            not in inspect.signature(compilation_cache.get_executable_and_time).parameters,
            only_compiles=lambda backend: _only_compiles(backend, getattr(_jax, "CompileOnlyPyClient", ())),
            jaxlib_folder=Path(jaxlib.__file__).parent,
            jaxlib_version=version_str,
            cuda_folder=Path(lib.cuda_path) if lib.cuda_path else None,
            backends=lambda: getattr(xla_bridge, "_backends", {}),
            watch_clearing=lambda listener: _watch_clearing(util, listener),
        )
    except (ImportError, AttributeError) as error:
        raise _unsupported(str(error)) from None


def _exclude_from_locations(source_info_util: Any, path: str) -> Callable[[], None]:
    """Have jax leave frames of these files out of a module's locations; return how to undo that."""

    def forget() -> None:
        source_info_util._exclude_path_regex.cache_clear()
        source_info_util.is_user_filename.cache_clear()

    def undo() -> None:
        with contextlib.suppress(ValueError):
            source_info_util._exclude_paths.remove(path)
        forget()

    source_info_util._exclude_paths.append(path)
    forget()
    return undo


def _only_compiles(backend: Any, known: Any) -> bool:
    """Return whether a client has no devices. jax is to replace the known class by the type of runtime."""
    return isinstance(backend, known) or getattr(backend, "runtime_type", "") == "compile_only_runtime"


class _Listener:
    """Poses as one of jax's caches, which ``clear_caches()`` and ``clear_backends()`` clear."""

    def __init__(self, listener: Callable[[], None]) -> None:
        self.cache_clear = listener

    def cache_info(self) -> str:
        return "holds nothing"

    def cache_keys(self) -> list[Any]:
        return []


def _watch_clearing(util: Any, listener: Callable[[], None]) -> object:
    """Call ``listener`` whenever jax clears its caches, for as long as the returned object lives."""
    made = _Listener(listener)
    if hasattr(util, "register_cache"):
        util.register_cache(made, "xcache")
    elif hasattr(util, "cache_clearing_funs"):
        util.cache_clearing_funs.add(made.cache_clear)
    return made


def _check(function: Callable[..., Any], expected: Sequence[str]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != tuple(expected):
        code = getattr(function, "__code__", None)
        if code is None or Path(code.co_filename).name != "compiler.py":
            place = type(function).__name__ if code is None else f"{code.co_filename}:{code.co_firstlineno}"
            raise UnsupportedError(f"another library has replaced a compile function of jax's ({place})")
        raise _unsupported(f"{function.__name__} takes {', '.join(found)}")


def _unsupported(difference: str) -> UnsupportedError:
    from jax import __version__

    return UnsupportedError(f"jax {__version__} is not supported (the oldest is {_OLDEST}): {difference}")
