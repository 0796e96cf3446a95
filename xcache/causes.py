"""Why the cache had nothing: from the daemon's answer, and a comparison with the entry that it names."""

from __future__ import annotations

import logging

from xcache.client.contents import Absent
from xcache.counters import Counting
from xcache.errors import NoAnswerError, NobodyThereError, NotAskedError, TimeSpentError
from xcache.keys import Key
from xcache.recording import Ledger
from xcache.request import Request
from xcache.wire import ledger, protocol

logger = logging.getLogger("xcache")

# The components of an entry in ``Absent.nearest``, after its key.
_COMPARED = protocol.DESCRIBED_COMPONENTS
# With these causes the store can neither give a program nor take it, as far as the client can tell.
_OUT_OF_REACH = frozenset(("refused", "no daemon", "no answer", "time used up", "not asked"))


class Explainer:
    """Counts what is compiled by its cause, tells the ledger, and logs it if the user wants to know."""

    def __init__(self, counting: Counting, ledger: Ledger, mode: str, *, says: bool) -> None:
        self._counting = counting
        self._ledger = ledger
        self._mode = mode
        self._says = says

    def miss(self, asked: Request, absent: Absent) -> None:
        """Note a program that the cache does not have."""
        cause = cause_of(asked.key, absent, self._mode)
        self._counting.miss(cause)
        self._ledger.tell(outcome=ledger.MISS, cause=cause, nearest=absent.nearest[0] if absent.nearest else "")
        logger.debug("miss: %s %s (%s)", asked.module_name, asked.key.digest[:12], cause)
        self._say(cause, ledger.meaning_of(cause))

    def uncacheable(self, reason: str) -> None:
        """Note a program that cannot be cached."""
        self._counting.uncacheable(reason)
        self._ledger.tell(outcome=ledger.UNCACHEABLE, cause=reason)
        logger.debug("not cached: %s", reason)
        self._say(reason, "it cannot be cached")

    def _say(self, cause: str, meaning: str) -> None:
        if self._says:
            logger.warning("%s is compiled: %s (%s)", self._ledger.current().described(), meaning, cause)


def cause_of(key: Key, absent: Absent, mode: str) -> str:
    """Return the cause of a miss: some of ``ledger.CAUSES``, perhaps with details after a colon."""
    if mode == "refresh":
        return "refresh"
    cause = absent.cause or _cause(key, absent)
    return f"{cause}; readonly" if mode == "readonly" else cause


def _cause(key: Key, absent: Absent) -> str:
    if absent.serialize_first:
        return "serialized too late"
    if absent.nearest is not None:
        return "; ".join(f"other {name}" for name in differences(key, absent.nearest)) or "other version of xcache"
    return "waited in vain" if absent.waited else "no daemon"


def of_error(error: BaseException) -> str:
    """Return the cause of a miss for which the daemon could not be asked."""
    if isinstance(error, NobodyThereError) or (isinstance(error, NotAskedError) and error.nobody_there):
        return "no daemon"
    if isinstance(error, TimeSpentError):
        return "time used up"
    if isinstance(error, NotAskedError):
        return ledger.with_detail("not asked", str(error))
    if isinstance(error, NoAnswerError):
        return "no answer"
    return f"no daemon: {getattr(error, 'kind', type(error).__name__)}"


def is_out_of_reach(cause: str) -> bool:
    """Return whether the store can neither give nor take a program whose miss has this cause."""
    return not _OUT_OF_REACH.isdisjoint(ledger.kinds_of(cause))


def differences(key: Key, nearest: list[str]) -> list[str]:
    """Return the names of the components in which a key differs from an entry of the same program.

    Another jaxlib has other defaults for options, and describes the processor in another way. XLA puts flags into the
    options, so that other flags explain other options; a comparison with the entry shows an option that no flag set.
    """
    found = [name for name, digest in zip(_COMPARED, nearest[1:], strict=False) if key.components.get(name) != digest]
    if "toolchain" in found:
        return ["toolchain"]
    return [name for name in found if name != "options" or "flags" not in found]
