"""The aliases of one process: found with a real daemon, noted after an entry is stored, dropped when they are wrong."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import types

from support.caching import COMPONENTS, compiled, request
from support.places import digest

from xcache.aliases import Aliases, _to_wire
from xcache.request import Alias

STRUCTURE = digest(b"structure")
ALIAS = Alias(STRUCTURE, COMPONENTS["program"], "jit_a", detailed_logging=False, lapack=True)


def stored(caches, **settings):
    """Compile in one process, store with an alias, and close."""
    cache = caches(**settings)
    cache.get_or_compile(compiled, lambda: request(alias=ALIAS))
    cache.close()


def test_the_next_program_finds_what_one_has_noted(caches):
    stored(caches)
    assert caches().aliases.find(STRUCTURE) == ALIAS


def test_a_hit_notes_an_alias_that_nobody_had_noted(caches):
    first = caches()
    first.get_or_compile(compiled, request)
    first.close()
    second = caches()
    assert second.aliases.find(STRUCTURE) is None
    assert second.get_or_compile(compiled, lambda: request(alias=ALIAS)).kind == "hit"
    second.close()
    assert caches().aliases.find(STRUCTURE) == ALIAS


def test_a_readonly_program_notes_none(caches):
    first = caches()
    first.get_or_compile(compiled, request)
    first.close()
    second = caches("readonly")
    assert second.get_or_compile(compiled, lambda: request(alias=ALIAS)).kind == "hit"
    second.close()
    assert caches().aliases.find(STRUCTURE) is None


def test_a_wrong_alias_is_gone_for_all_and_its_entry_is_kept_for_a_report(place, caches):
    stored(caches)
    finder = caches()
    assert finder.aliases.find(STRUCTURE) == ALIAS
    finder.aliases.drop(STRUCTURE, request().key.digest)
    # The program does not wait for that.
    assert place.query("SELECT pinned FROM entries") == [(0,)]
    finder.close()
    assert place.query("SELECT pinned FROM entries") == [(1,)]
    assert caches().aliases.find(STRUCTURE) is None


def test_a_readonly_program_leaves_a_wrong_alias_where_it_is(place, caches):
    stored(caches)
    finder = caches("readonly")
    finder.aliases.drop(STRUCTURE, request().key.digest)
    assert finder.aliases.find(STRUCTURE) is None
    finder.close()
    assert place.query("SELECT pinned FROM entries") == [(0,)]
    assert caches().aliases.find(STRUCTURE) == ALIAS


def test_what_is_found_by_alias_is_a_hit_and_what_is_not_there_counts_as_nothing(caches):
    stored(caches)
    cache = caches()
    assert cache.get_if_stored(request).kind == "hit"
    assert cache.get_if_stored(lambda: request("another")) is None
    counted = cache.statistics()
    assert (counted.requests, counted.hits, counted.misses) == (1, 1, 0)


def test_looking_by_alias_keeps_no_lease(caches):
    looking, other = caches(), caches()
    assert looking.get_if_stored(request) is None
    # Otherwise this would wait for the first one.
    assert other.get_or_compile(compiled, request).kind == "miss"
    assert other.statistics().wait_seconds == 0


def test_a_damaged_alias_is_counted_and_not_used(place, caches):
    stored(caches)
    # The daemon reads the row anew for each request.
    with contextlib.closing(sqlite3.connect(place.dir / "store.db")) as database, database:
        database.execute("UPDATE aliases SET facts = ?", (b"\x93\xa5jit_b\xc2\xc2",))
    cache = caches()
    assert cache.aliases.find(STRUCTURE) is None
    assert cache.statistics().errors == {"damaged alias": 1}


def test_without_a_daemon_there_is_no_alias_and_one_warning(place, caches, caplog):
    place.stop()
    cache = caches(autostart=False)
    assert cache.aliases.find(STRUCTURE) is None
    assert cache.aliases.find(digest(b"another")) is None
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 1


def of_a_last_run(*made):
    told = {alias.structure: _to_wire(alias) for alias in made}
    predicted = types.SimpleNamespace(aliases=told, wait=lambda _: None)
    return Aliases(None, predicted, None, is_readonly=False)


def test_what_the_last_run_would_have_gained_counts_each_program_once():
    """A program may have several aliases, as of two versions of jax; its next run uses one."""
    made = [ALIAS._replace(structure=digest(b"%d" % number), worth=worth) for number, worth in enumerate((0.75, 0.5))]
    made.append(ALIAS._replace(structure=digest(b"other"), program=digest(b"another program"), worth=0.5))
    assert of_a_last_run().expected_worth() is None
    # An older xcache has measured nothing.
    assert of_a_last_run(ALIAS).expected_worth() is None
    assert of_a_last_run(*made).expected_worth() == 1.25
    call = ALIAS._replace(record=b"of a call")
    assert of_a_last_run(*made, call).expected_worth() == math.inf


def test_aliases_of_the_last_run_can_be_made_anew():
    aliases = of_a_last_run(ALIAS)
    aliases.drop_expected()
    assert aliases.find(STRUCTURE) is None
    assert [*aliases._wrong] == [(STRUCTURE, None)]
