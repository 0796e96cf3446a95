"""What JAX calls when it first needs a backend: the switch that needs no change of code."""

from __future__ import annotations

import os


def initialize() -> None:
    """Install the hook when ``XCACHE`` asks for it; do nothing, at no cost, when it does not."""
    # jax imports this module in every process, so nothing is imported until the variable is seen.
    if os.environ.get("XCACHE", "").strip().lower() in ("", "0", "off"):
        return
    try:
        from xcache.hook import install_from_environment

        install_from_environment()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # Ctrl-C, or what a handler of SIGTERM raises to end the program: jax logs and forgets whatever is raised here.
        from xcache.hook.late import raise_at_next_compile

        raise_at_next_compile(error)
