"""A persistent compilation cache for JAX and anything else that compiles through jaxlib.

``XCACHE=1 python train.py`` needs nothing from here. A program calls ``enable()``, ``disable()`` and ``stats()``, or
``compile()`` if it calls jaxlib directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xcache._version import __version__

if TYPE_CHECKING:
    from xcache.direct import compile  # noqa: A004
    from xcache.errors import CompileInGuardError
    from xcache.hook import Handle, disable, enable, ledger, no_compiles, stats, warmed_up
    from xcache.hook.calls.jit import jit
    from xcache.hook.calls.version_of import version_of
    from xcache.statistics import Statistics
    from xcache.warming.prebuilding import Prebuilt, prebuild

__all__ = [
    "CompileInGuardError", "Handle", "Prebuilt", "Statistics", "__version__", "compile", "disable", "enable", "jit",
    "ledger", "no_compiles", "prebuild", "stats", "version_of", "warmed_up",
]  # fmt: skip

_HOMES = {
    "CompileInGuardError": ("xcache.errors", "CompileInGuardError"),
    "Handle": ("xcache.hook", "Handle"),
    "Prebuilt": ("xcache.warming.prebuilding", "Prebuilt"),
    "Statistics": ("xcache.statistics", "Statistics"),
    "compile": ("xcache.direct", "compile"),
    "disable": ("xcache.hook", "disable"),
    "enable": ("xcache.hook", "enable"),
    "jit": ("xcache.hook.calls.jit", "jit"),
    "ledger": ("xcache.hook", "ledger"),
    "no_compiles": ("xcache.hook", "no_compiles"),
    "prebuild": ("xcache.warming.prebuilding", "prebuild"),
    "warmed_up": ("xcache.hook", "warmed_up"),
    "version_of": ("xcache.hook.calls.version_of", "version_of"),
    "stats": ("xcache.hook", "stats"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because jax imports this package in every process."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    """Return the public names, imported yet or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
