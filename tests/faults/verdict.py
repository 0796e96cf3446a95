"""Whether a store that went through a fault holds what it must, and nothing else."""

from __future__ import annotations

import traceback

from campaigns import Campaign
from conversation import talking
from ledger import Ledger
from load import LARGEST_PROGRAM
from places import Place, put_message
from stores import check_tables

from xcache import protocol
from xcached import eviction

# What every put of the load says it took to compile.
SECONDS = put_message("", b"", b"").compile_seconds


def check(
    place: Place, ledger: Ledger, campaign: Campaign, when: str, *, evicting: bool = False, swept: bool = True
) -> None:
    """Ask the daemon for everything that was ever put, and look at its tables and files.

    A file that could not be deleted stays until the next daemon sweeps: one that did not is not looked at.
    """
    before = ledger.all()
    with talking(place) as talk:
        # The sweep comes first, and the writer answers this after it.
        assert talk.ask(protocol.Sync()) == protocol.Done()
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
    """What is missing was counted as evicted, and nothing stayed that was worth less when it could have gone instead.

    Worth only falls behind where nobody uses it: what was last used before another was even stored had, from then on,
    the worth that stands in its row, and the other one at least that of one use at that time.
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
    """The database is sound, its sums are right, every content is that of its digest, and no file is left over."""
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
    """What was asserted."""
    return traceback.extract_tb(error.__traceback__)[-1].line or ""
