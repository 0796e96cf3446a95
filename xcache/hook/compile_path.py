"""Find out whether jax's own code compiles a module: what another tool's code made must not be stored under its key."""

from __future__ import annotations

import logging

from xcache.hook.structure.pristine import pristine
from xcache.signals import reraise_if_the_programs

logger = logging.getLogger("xcache")


def replaced(client: type) -> str | None:
    """Return why a compile must be left to jax: a function between the module and the executable is not jax's own."""
    for module in ("jax._src.compiler", client.__module__):
        try:
            reason = pristine.replaced_in(module)
        except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
            reraise_if_the_programs(error)
            logger.debug("could not describe %s: %s: %s", module, type(error).__name__, error)
            reason = "jax's compile path cannot be described"
        if reason is not None:
            logger.debug("left to jax: %s", reason)
            return reason
    return None
