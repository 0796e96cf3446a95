"""Find out whether jax's own code compiles a module: what another tool's code made must not be stored under its key."""

from __future__ import annotations

import logging

from xcache.hook.structure.pristine import pristine

logger = logging.getLogger("xcache")


def replaced(client: type) -> str | None:
    """Return why a compile must be left to jax: a function between the module and the executable is not jax's own."""
    for module in ("jax._src.compiler", client.__module__):
        reason = pristine.replaced_in(module)
        if reason is not None:
            logger.debug("left to jax: %s", reason)
            return reason
    return None
