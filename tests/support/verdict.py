"""Check whether a store that went through a fault holds what it must, and nothing else."""

from __future__ import annotations

import traceback

from support.acknowledged import Ledger
from support.campaigns import Campaign
from support.conversation import talking
from support.load import LARGEST_PROGRAM
from support.places import Place, put_message
from support.stores import check_tables
from xcache.wire import commands, protocol
from xcached.store import eviction

# The compile time that every put of the load claims.
SECONDS = put_message("", b"", b"").compile_seconds


def check(
    place: Place, ledger: Ledger, campaign: Campaign, when: str, *, evicting: bool = False, swept: bool = True
) -> None:
    """Ask the daemon for everything ever put, and check its tables and files.

    A file that could not be deleted stays until the next daemon sweeps; without ``swept``, both are skipped.
    """
    before = ledger.all()
    with talking(place) as talk:
        # The sweep comes first, and the writer answers this after it.
        assert talk.ask(commands.Sync()) == protocol.Done()
        for key in before:
            wrong = ledger.found(key, talk.get(key), evicting=evicting)
            if wrong:
                campaign.problem("losses" if wrong.endswith("is gone") else "wrong loads", f"{when}: {wrong}")
        campaign.checked(len(before))
    for wrong in ledger.wrong:
        campaign.problem("other problems", f"{when}: {wrong}")
    ledger.wrong.clear()
    if evicting:
        _check_evictions(place, ledger, campaign, when, {key: known.used_until for key, known in before.items()})
    if swept:
        check_structure(place, campaign, when)


def _check_evictions(place: Place, ledger: Ledger, campaign: Campaign, when: str, used_until: dict[str, float]) -> None:
    """Check that missing entries were counted as evicted, and that no entry of less worth stayed instead.

    An unused entry's worth only falls behind. An entry last used before another was stored has had, from then on, the
    worth in its row, and the other at least the worth of one use at that time.
    """
    ((counted,),) = place.query("SELECT coalesce(sum(amount), 0) FROM statistics WHERE name = 'evictions'")
    if ledger.evicted > counted:
        campaign.problem("losses", f"{when}: {ledger.evicted} entries are missing, {counted:g} were evicted")
    rows = place.query("SELECT key, worth, used_time FROM entries WHERE pinned = 0")
    there = [(key, used_until[key], worth, time) for key, worth, time in rows if key in used_until]
    for key, known, largest in ledger.take_evicted():
        for other, used, worth, time in there:
            least = eviction.worth(eviction.Usage(1, time), SECONDS, largest + LARGEST_PROGRAM)
            if used < known.stored_after and worth < least:
                campaign.problem("losses", f"{when}: {key[:12]} was evicted, and {other[:12]} was worth less")
                break


def check_structure(place: Place, campaign: Campaign, when: str) -> None:
    """Check that the database is sound, its sums are right, contents fit their digests, and no file is left over."""
    if (found := place.query("PRAGMA integrity_check")) != [("ok",)]:
        campaign.problem("other problems", f"{when}: {found[:3]}")
        return
    try:
        check_tables(place.query, place.dir)
    except AssertionError as error:
        campaign.problem("other problems", f"{when}: {_line_of(error)} {str(error)[:500]}")
    if leftover := list((place.dir / "blobs" / "unfinished").iterdir()):
        campaign.problem("other problems", f"{when}: half-written files are left: {leftover[:3]}")


def _line_of(error: BaseException) -> str:
    """Return the assertion."""
    return traceback.extract_tb(error.__traceback__)[-1].line or ""
