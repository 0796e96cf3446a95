"""The records of calls in the cache: what ``xcache.jit`` finds there, and what it writes."""

from __future__ import annotations

from typing import Any

from xcache.cache import Cache
from xcache.errors import UnsupportedError
from xcache.hook.skipping import Skipping
from xcache.request import Alias

# Under these settings tracing does more than make a program, or jax does more than run it.
_WATCHING = (
    "jax_check_tracer_leaks", "jax_debug_infs", "jax_debug_key_reuse", "jax_debug_nans", "jax_distributed_debug",
    "jax_enable_pgle", "jax_explain_cache_misses", "jax_no_tracing",
)  # fmt: skip


class CallRecords:
    """Finds records of calls, and notes new ones."""

    def __init__(self, skipping: Skipping, cache: Cache, *, check: bool) -> None:
        """With ``check`` each call is traced, and compared with its record."""
        from jax._src import config

        try:
            self._watching = [config.config._value_holders[name] for name in _WATCHING]
        except (AttributeError, KeyError) as error:
            raise UnsupportedError(f"xcache.jit is jax.jit with this version of jax: {error}") from None
        self._skipping, self._aliases = skipping, cache.aliases
        # With ``check``, records are made to be compared.
        self.is_readonly = cache.mode == "readonly" and not check
        # Notes a call's program with its record; counts why a call is traced, or that it was "skipped".
        self.note, self.count, self.check = cache.note_call, cache.count_call, check

    def is_watched(self) -> bool:
        """Return whether somebody wants jax to trace and lower."""
        return self._skipping.is_watched() or any(state.value for state in self._watching)

    def begin(self) -> None:
        """Get ready to describe calls; raise CannotSkipError or ImportError if this version of jax is not known."""
        self._skipping.begin()

    def find(self, digest: str) -> Alias | None:
        """Return the program of a call, with its record; None if there is none."""
        alias = self._aliases.find(digest)
        return None if alias is None or not alias.record else alias

    def drop(self, digest: str) -> None:
        """Delete this user's wrong record."""
        self._aliases.drop(digest)

    def program_of(self, computation: Any) -> Alias | None:
        """Return the alias of a computation that was compiled or found; None if it has none."""
        return self._skipping.program_of(computation)

    def late_module(self, alias: Alias) -> Any:
        """Return a stand-in for the module, which only tracing could make, and prepare what its executable needs."""
        return self._skipping.late_module(alias, _must_trace)


def _must_trace(_: Any) -> Any:
    """Raise CannotSkipError: the executable of a recorded call is gone, or jax needs its module."""
    from xcache.hook.structure.encoding import CannotSkipError

    raise CannotSkipError("no entry")
