"""Large contents on their way in: which files are taken, and how users take turns."""

from __future__ import annotations

import fcntl
from concurrent.futures import Future

import pytest
from support.conversation import key_of, talking
from support.places import digest, put_message
from support.stores import WRITER, quick_folder, shelf, source_of

from xcache.wire import commands, protocol
from xcached.store.jobs import PutJob

MB = 1024 * 1024
CONTENT = b"x" * 100_000
ALL_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


UNFIT = {
    "nothing in it": (b"", 0, ALL_SEALS, "wrong size"),
    "no seals": (CONTENT, 0, 0, "wrong file"),
    "it can still be written": (CONTENT, 0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "wrong file"),
    "it can still shrink": (CONTENT, 0, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW, "wrong file"),
    "holes": (b"", len(CONTENT), ALL_SEALS, "wrong file"),
}


@pytest.mark.parametrize(("content", "size", "seals", "kind"), UNFIT.values(), ids=list(UNFIT))
def test_only_what_is_written_and_sealed_is_taken(place, talk, content, size, seals, kind):
    message = put_message(key_of("a"), CONTENT, b"p", payload=None)
    (file,) = talk.files(1)
    with file:
        file.write(content)
        file.truncate(max(size, len(content)))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        answer = talk.ask(message)
    assert isinstance(answer, protocol.Refused) and answer.kind == kind, answer
    assert talk.ask(message, [CONTENT]) == protocol.Stored(True)
    assert talk.get(key_of("a")) == CONTENT


def jobs_of(uid: int, *sizes: int) -> list[PutJob]:
    jobs = []
    for number, size in enumerate(sizes):
        payload = digest(f"{uid} {number}".encode()).encode() * (size // 64)
        message = put_message(key_of(f"{uid} {number}"), payload, b"p", payload=None)
        source = source_of(message.digest, len(payload), payload)
        done: Future[protocol.Message] = Future()
        jobs.append(PutJob(message, source, source_of(digest(b"p"), 1, b"p"), WRITER._replace(uid=uid), done))
    return jobs


def test_large_contents_of_one_user_delay_no_other():
    with shelf(quick_folder()) as made:
        large, (small,) = jobs_of(1, *[24 * MB] * 5), jobs_of(2, 40_000)
        for job in (*large, small):
            made.intake.submit(job, job.writer.uid)
        assert small.done.result(20) == protocol.Stored(True)
        assert sum(job.done.done() for job in large) <= 1
        assert [job.done.result(20) for job in large] == [protocol.Stored(True)] * 5
        made.check()


def test_one_of_several_users_has_only_so_much_on_the_way():
    with shelf(quick_folder()) as made:
        (first, second, third), (other,) = jobs_of(1, *[40_000] * 3), jobs_of(2, 40_000)
        with made.busy():
            for job in (first, second, other):
                made.intake.submit(job, job.writer.uid, 50_000)
            refused = second.done.result(20)
            assert isinstance(refused, protocol.Refused) and refused.kind == "store busy"
        assert first.done.result(20) == other.done.result(20) == protocol.Stored(True)
        made.sync()
        made.intake.submit(third, 1, 50_000)
        assert third.done.result(20) == protocol.Stored(True)
        made.check()


def test_a_collection_of_garbage_leaves_alone_what_is_on_its_way(place, talk):
    """It deletes unfinished files that a killed daemon left, and no others."""
    (place.dir / "blobs" / "unfinished" / "left").write_bytes(b"x")
    contents = {key_of(str(number)): str(number).encode() * 3_000_000 for number in range(4)}
    with talking(place) as other:
        puts = [talk.begin_put(key, content) for key, content in contents.items()]
        for _ in range(5):
            assert isinstance(other.ask(commands.CollectGarbage()), commands.Collected)
        answers = talk.answers(puts)
    assert set(answers.values()) == {protocol.Stored(True)}
    assert all(talk.get(key) == content for key, content in contents.items())
    assert not list((place.dir / "blobs" / "unfinished").iterdir())


def test_an_entry_that_is_there_costs_no_copy(place, talk):
    assert talk.put(key_of("a"), CONTENT) == protocol.Stored(True)
    # With another digest it would be refused if anybody looked.
    message = put_message(key_of("a"), CONTENT, b"p", payload=None, digest=key_of("other"))
    assert talk.ask(message, [CONTENT]) == protocol.Stored(False)


@pytest.mark.parametrize("where", ["copy_in", "admit", "settle", "put"])
def test_a_defect_is_told_to_the_client_and_logged_with_where_it_came_up(tmp_path, monkeypatch, caplog, where):
    with shelf(tmp_path) as made:

        def fail(*arguments):
            raise ZeroDivisionError(where)

        of = {"copy_in": made.store.files, "admit": made.evictor, "settle": made.store.files, "put": made.store}[where]
        with monkeypatch.context() as patch:
            patch.setattr(of, where, fail)
            answer = made.put(key_of("a"), CONTENT, b"program")
        assert isinstance(answer, protocol.Refused) and "ZeroDivisionError" in answer.reason
        assert "Traceback" in caplog.text and "in fail" in caplog.text
        # The thread goes on.
        assert made.put(key_of("a"), CONTENT, b"program") == protocol.Stored(True)
        made.check()
