"""The serving thread's queries find rows by an index, so that none of them takes longer for what others have stored."""

from __future__ import annotations

import pytest
from support.conversation import key_of
from support.places import digest
from support.stores import shelf

from xcache.wire import seals
from xcached.store.aliases import AliasRows
from xcached.store.reader import Reader

PROGRAM = digest(b"raw p")
QUERIES = {
    "find": lambda reader: reader.find(key_of("a")),
    "content": lambda reader: reader.content(digest(b"a")),
    "aliases of a structure": lambda reader: reader.alias_rows(digest(b"s")),
    "aliases of a program": lambda reader: reader.alias_rows_of(PROGRAM, [2]),
    "alias": lambda reader: reader.alias(1),
    "structures": lambda reader: reader.structures([2], 10),
    "toolchains": lambda reader: reader.toolchains_of(PROGRAM, [2]),
    "expected time": lambda reader: reader.expected_seconds(key_of("b"), PROGRAM, [2]),
    "mark": lambda reader: reader.why_not(key_of("a"), lambda _: True),
    "writers of a program": lambda reader: reader.writers("entries", program=PROGRAM),
    "writers of aliases": lambda reader: reader.writers("aliases"),
    "writers of aliases of a program": lambda reader: reader.writers("aliases", program=PROGRAM),
    "writers of compile times": lambda reader: reader.writers("compile_times", key=key_of("a")),
}


@pytest.fixture
def made(tmp_path):
    with shelf(tmp_path, shared=True) as made:
        rows = AliasRows(made.store, lambda reader, writer: reader == writer)
        for uid in (3, 1, 2):
            made.put(key_of("a"), b"a", b"p", uid=uid)
            alias = seals.sealed(digest(b"s%d" % (uid % 2)), PROGRAM, b"facts")
            made.call(lambda _, alias=alias, uid=uid: rows.remember(uid, [alias]))
        yield made


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_a_query_uses_an_index(made, query):
    class Explained:
        """A connection that asks for the plan of each query as well."""

        def execute(self, sql, values=()):
            plan.extend(step for *_, step in made.store.database.reading.execute(f"EXPLAIN QUERY PLAN {sql}", values))
            return made.store.database.reading.execute(sql, values)

    plan: list[str] = []
    query(Reader(Explained()))
    assert plan
    # The table of the writers in question, and those that were found so far, are short.
    scans = [step for step in plan if step.startswith("SCAN") and not step.startswith(("SCAN json_each", "SCAN found"))]
    assert scans in ([], ["SCAN CONSTANT ROW"]), plan
    assert not any("TEMP B-TREE" in step for step in plan if "DISTINCT" in step), plan


def test_the_writers_of_rows_are_found(made):
    reader = made.store.reader
    assert reader.writers("entries", program=PROGRAM) == [1, 2, 3]
    assert reader.writers("entries", program=digest(b"raw q")) == []
    assert reader.writers("aliases") == [1, 2, 3]
    assert [row.writer_uid for row in reader.alias_rows(digest(b"s1"))] == [1, 3]
    assert [row.writer_uid for row in reader.alias_rows_of(PROGRAM, None)] == [2, 1, 3]
    assert [row.writer_uid for row in reader.alias_rows_of(PROGRAM, [3, 2])] == [2, 3]
    assert reader.structures([2], 5) == [digest(b"s0")]
