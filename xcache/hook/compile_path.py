"""Find out whether jax's own code compiles a module: what another tool's code made must not be stored under its key."""

from __future__ import annotations

import logging
import os

from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.pristine import Pristine
from xcache.signals import reraise_if_the_programs

logger = logging.getLogger("xcache")
# These modules alone, so that a look at each compile takes microseconds.
_compiling = Pristine()
os.register_at_fork(after_in_child=_compiling.begin_in_child)


def replaced(client: type) -> str | None:
    """Return why a compile must be left to jax: a function between the module and the executable is not jax's own."""
    try:
        _compiling.refresh()
        _compiling.check("jax._src.compiler", client.__module__)
        return None
    except CannotSkipError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a bug in here must not stop the program
        reraise_if_the_programs(error)
        logger.debug("could not describe jax's compile path: %s: %s", type(error).__name__, error)
        reason = "jax's compile path cannot be described"
    logger.debug("left to jax: %s", reason)
    return reason
