"""A persistent compilation cache for JAX and anything else that compiles through jaxlib.

``XCACHE=1 python train.py`` needs nothing from here. From code: ``enable()``, ``disable()``, ``stats()``, and
``compile()`` for those who call jaxlib directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xcache._version import __version__

if TYPE_CHECKING:
    from xcache.direct import compile  # noqa: A004
    from xcache.hook import Handle, disable, stats
    from xcache.hook import install as enable
    from xcache.statistics import Statistics

__all__ = ["Handle", "Statistics", "__version__", "compile", "disable", "enable", "stats"]

_HOMES = {
    "Handle": ("xcache.hook", "Handle"),
    "Statistics": ("xcache.statistics", "Statistics"),
    "compile": ("xcache.direct", "compile"),
    "disable": ("xcache.hook", "disable"),
    "enable": ("xcache.hook", "install"),
    "stats": ("xcache.hook", "stats"),
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: jax imports this package in every process."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value
