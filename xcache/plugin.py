"""The plugin that JAX calls when it first needs a backend: it turns the cache on without a change of code."""

from __future__ import annotations

import os


def initialize() -> None:
    """Install the hook if ``XCACHE`` asks for it."""
    # jax imports this module in every process, so it imports nothing until the variable is seen.
    if os.environ.get("XCACHE", "").strip().lower() in ("", "0", "off"):
        return
    try:
        from xcache.hook import install_from_environment

        install_from_environment()
    except BaseException as error:
        from xcache.signals import is_the_programs

        if not is_the_programs(error):
            raise
        # jax logs and drops everything raised here, even Ctrl-C or what a signal handler raises.
        from xcache.hook.deferred import raise_at_next_compile

        raise_at_next_compile(error)
