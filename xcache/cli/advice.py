"""The meaning of each cause of a miss in full, and advice."""

from __future__ import annotations

from collections.abc import Collection

from xcache.wire import ledger

# Causes that are none: the program was not there before.
NEW = ("new", "other program")
# Causes whose advice counts on the executable that was stored instead.
STORED_NOW = (*NEW, "other version of xcache", "other toolchain", "stale", "removed")

_UNCACHEABLE = "docs/not-cached.md lists the reasons."
_FOR_UNCACHEABLE = {
    "python callback": (
        "It calls Python while it runs: jax.debug.print, jax.debug.callback, pure_callback, io_callback, or a library"
        " that uses them. Take that out, or return the values and print them outside of jit. Under jax 0.11 or newer,"
        " such programs are cached."
    ),
}

# Causes with a detail after the colon that is better said in other words.
_IN_DETAIL = {
    "evicted: size": "its entry went to make room: the store had grown to XCACHE_MAX_SIZE",
    "evicted: count": "its entry went to make room: the store had as many entries as XCACHE_MAX_ENTRIES allows",
    "evicted: quota": "its entry went to make room: you had as much in the store as XCACHE_USER_QUOTA allows",
    "evicted: disk": "its entry went to make room: the disk had less free than XCACHE_MIN_FREE demands",
    "removed: rm": "somebody removed its entry, with `xcache rm`",
    "removed: clear": "somebody removed all entries, with `xcache clear`",
    "removed: invalidate": "somebody removed its entry, with `xcache invalidate`",
    "refused: too large": "it was compiled before, and the store did not take it: it is too large",
    "refused: quota": "it was compiled before, and the store did not take it: it exceeds the quota of one user",
    "refused: store full": "it was compiled before, and the store did not take it: the store is full of pinned entries",
}
# One change of a setting changes several of these parts of the key.
_SETTINGS = ("other flags", "other options", "other platform")
_ADVICE = {
    "new": "Nothing is wrong: what is compiled now serves the next runs.",
    "other program": "What is compiled now serves the next runs.",
    "other version of xcache": "Nothing is wrong: what is compiled now serves the next runs.",
    "other flags": "Give all runs the same XLA_FLAGS.",
    "other options": "Give all runs the same compiler options.",
    "other platform": "Entries are made for one kind of device, topology and number of CPU threads.",
    "other toolchain": "This is usual after an upgrade; what is compiled now serves the next runs.",
    "stale": "This is usual after an upgrade; what is compiled now serves the next runs.",
    "evicted": (
        "Raise the limit (`xcache config` shows the limits), or pin what must stay (`xcache pin`)."
        " Where the disk is full, free it, or lower XCACHE_MIN_FREE."
    ),
    "evicted: disk": "Free the disk, put the store on a larger one (XCACHE_DIR), or lower XCACHE_MIN_FREE.",
    "too old": "Raise XCACHE_MAX_AGE, or pin what must stay (`xcache pin`).",
    "removed": "What is compiled now serves the next runs.",
    "set aside": "`xcache ls --quarantined` says why. If it happens again, please report it.",
    "unusable": "The log of the program says why. If it happens again, please report it.",
    "refused: too large": "Raise XCACHE_MAX_PAYLOAD or XCACHE_MAX_SIZE, whichever it exceeds (`xcache config`).",
    "refused: quota": "Remove what you no longer need (`xcache rm`, `unpin`), or have root raise XCACHE_USER_QUOTA.",
    "refused: store full": "Unpin what need not stay (`xcache unpin`), or raise XCACHE_MAX_SIZE or XCACHE_MAX_ENTRIES.",
    "serialized too late": "Nothing is wrong: xcache knows that now, and this run stored it before its first run.",
    "not trusted": "The daemon's trusted_writers says whose entries count for you, `xcache key list` which keys do.",
    "rejected": "If it is about a key: `xcache key trust` has the daemon trust one. A damaged entry is used nowhere.",
    "remote trouble": "`xcache status` shows how the remote stores are, and `xcache remote check` tries them.",
    "waited in vain": "The other process was killed, or could not store it; see `xcache runs`.",
    "no daemon": "`xcache status` says whether the daemon runs, and its log why not; `xcache doctor` tries it out.",
    "no answer": "The machine or its disk may be overloaded; XCACHE_TIMEOUT bounds what a program waits.",
    "time used up": "Answers take longer on a busy machine. A longer XCACHE_TIMEOUT lets a program wait longer.",
    "not asked": "After a failure xcache tries the daemon in the background, and asks again once it answers.",
    "refresh": "Use XCACHE=1 to look programs up.",
    "readonly": "Run the program once with XCACHE=1 to store it.",
}


def meaning_of(cause: str, *, is_told: bool = False) -> str:
    """Return the cause of a miss in words, with its details.

    ``is_told``: what differs is told beside it, so that several parts of the key need not be named.
    """
    kinds = ledger.kinds_of(cause)
    if is_told and len(kinds) > 1 and all(kind in _SETTINGS for kind in kinds):
        return "the same program was stored under other settings"
    return "; ".join(_in_words(part) for part in cause.split("; "))


def for_uncacheable(reason: str) -> str:
    """Return what to do about a program that cannot be cached."""
    return _FOR_UNCACHEABLE.get(reason, _UNCACHEABLE)


def for_cause(cause: str, without: Collection[str] = ()) -> list[str]:
    """Return what to do about a cause; nothing is said about some kinds of it."""
    if "remote trouble" in ledger.kinds_of(cause):
        # Then something is wrong.
        without = (*without, "new")
    parts = [part for part in cause.split("; ") if part.partition(":")[0] not in without]
    found = [_ADVICE.get(part, _ADVICE.get(part.partition(":")[0], "")) for part in parts]
    return [*dict.fromkeys(filter(None, found))]


def _in_words(part: str) -> str:
    if part in _IN_DETAIL:
        return _IN_DETAIL[part]
    kind, _, detail = part.partition(": ")
    meaning = ledger.CAUSES.get(kind, kind)
    return f"{meaning} ({detail})" if detail else meaning
