"""The ledger of a run: a row for each program that a process asked for. Clients write it, commands read it."""

from typing import NamedTuple

# Rows of one run that are kept, and rows in one message.
MAX_ROWS, MAX_SENT_ROWS = 10_000, 400
# Characters of a text in a row, and of a run's fact.
MAX_TEXT, MAX_FACT = 1500, 2000
MAX_FACTS = 24
_LONGEST_CAUSE = 500
# Stands in a list of types for so many that are left out.
LEFT_OUT = "... {} more ..."

# How a program came about.
COMPILING, HIT, AHEAD, MISS, UNCACHEABLE, FAILED = "compiling", "hit", "loaded ahead", "miss", "uncacheable", "failed"

# An executable that was loaded ahead in vain. Its row has no name: only programs that were asked for have one.
UNUSED = "not asked for"

# The stages of a start-up, in their order. The stage "daemon" is the daemon's part of a look-up.
STAGES = ("trace", "lower", "key", "lookup", "wait", "load", "compile", "serialize", "store")

# The threads of stages that the program's own threads do not do; other threads of xcache's begin like the first one.
OWN_THREADS = ("xcache-", "xcached")
LOADING_AHEAD, DAEMON = "xcache-prefetch", "xcached"


class Row(NamedTuple):
    """One program that a run asked for.

    ``site`` is the place in the user's code that asked, ``shapes`` are the types of the arguments, and ``spans`` is a
    JSON list of lists: stage, start in seconds since the process began, seconds, and the thread. ``cause`` says why it
    was compiled, ``stored`` what became of the executable. ``nearest`` is the key of the newest entry of the same
    program, or else of the same name. All texts may be empty.
    """

    position: int
    module_name: str
    site: str
    shapes: str
    key: str
    outcome: str
    cause: str
    stored: str
    nearest: str
    spans: str


# Why a program was compiled although the cache was on: the causes of misses. A row's cause may have several, with "; "
# between them, and each may have a detail after a colon. The causes of programs that cannot be cached are in
# docs/not-cached.md.
CAUSES = {
    "new": "no program of this name was stored before this run",
    "other program": "other programs of this name were stored before: of other code, or for other arguments",
    "other options": "the same program was stored for other compile options",
    "other flags": "the same program was stored under other XLA flags",
    "other platform": "the same program was stored for other devices, another topology or number of threads",
    "other toolchain": "the same program was stored by another jaxlib, plugin or tool",
    "other version of xcache": "the same program was stored by an xcache whose keys are made in another way",
    "stale": "the same program was stored by a jaxlib, plugin or tool that has been upgraded or removed since",
    "evicted": "its entry went to make room for others",
    "too old": "its entry went because it had not been used for too long",
    "removed": "somebody removed its entry",
    "set aside": "its entry was damaged, or processes crashed on it",
    "unusable": "its entry could not be loaded here",
    "refused": "it was compiled before, and the store did not take it",
    "serialized too late": "it was compiled before, but could not be stored once the program had run it",
    "not trusted": "it was stored only by users or keys whose entries are not loaded for you",
    "rejected": "a remote store or a bundle has its entry, which is not used",
    "remote trouble": "a remote store that may have it could not be asked",
    "waited in vain": "another process that was compiling it stored nothing",
    "no daemon": "no daemon could be reached",
    "no answer": "the daemon did not answer in time",
    "time used up": "the program had waited for its daemon as long as XCACHE_TIMEOUT allows, so it asked no more",
    "not asked": "the daemon was not asked",
    "refresh": "XCACHE=refresh compiles everything anew",
    "readonly": "XCACHE=readonly stores nothing, so each run compiles it again",
}


def with_detail(kind: str, detail: str) -> str:
    """Return a cause with a detail, as rows have it."""
    return f"{kind}: {detail.replace('; ', ', ')}"[:_LONGEST_CAUSE]


def kinds_of(cause: str) -> list[str]:
    """Return the causes in a row's cause, without their details."""
    return [part.partition(":")[0] for part in cause.split("; ")]


def meaning_of(cause: str) -> str:
    """Return a cause in words; one that is not known, as from a newer xcache, as it is."""
    return "; ".join(CAUSES.get(kind, kind) for kind in kinds_of(cause))
