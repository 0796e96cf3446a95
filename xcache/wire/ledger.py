"""The ledger of a run: a row for each program that a process asked for. Clients write it, commands read it."""

from typing import NamedTuple

# Rows of one run that are kept, and rows in one message.
MAX_ROWS, MAX_SENT_ROWS = 10_000, 400
# Characters of a text in a row, and of a run's fact.
MAX_TEXT, MAX_FACT = 1500, 2000
MAX_FACTS = 24

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
    was compiled, ``stored`` what became of the executable. ``nearest`` is the key of the entry that a miss came closest
    to. All texts may be empty.
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


# Why a program was compiled although the cache was on: what a row's cause begins with, for misses. A colon and more may
# follow. The causes of programs that cannot be cached are in docs/not-cached.md.
CAUSES = {
    "new": "no program of this name was stored before",
    "other program": "a program of this name was stored, but with other operations or types",
    "other options": "the same program was stored for other compile options",
    "other flags": "the same program was stored under other XLA flags",
    "other platform": "the same program was stored for another device, topology or number of threads",
    "other toolchain": "the same program was stored by another jaxlib, plugin or tool",
    "evicted": "its entry went because the store was full, or the entry too old",
    "removed": "somebody removed its entry",
    "stale": "its entry was made by a toolchain that is no longer installed",
    "set aside": "its entry was damaged, or processes crashed on it",
    "unusable": "its entry could not be loaded here",
    "not trusted": "only a user whose entries you do not load has stored it",
    "other version of xcache": "the same program was stored by an xcache whose keys are made in another way",
    "waited in vain": "another process that was compiling it stored nothing",
    "no daemon": "the daemon could not be asked",
    "refresh": "XCACHE=refresh compiles everything anew",
}
