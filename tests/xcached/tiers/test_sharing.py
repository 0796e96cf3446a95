"""Daemons that share entries by a tier: a folder here, because the engines have tests of their own."""

from __future__ import annotations

import contextlib
import time

import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.leasing import outcome
from support.places import Place, digest, free_port, get_message, new_place, put_message, until
from support.sharing import BOUND, CONTENT, KEY, host, put_and_upload, remote_of, silent_host, trust
from support.signing import OURS, SECOND, STRANGER

from xcache.client.client import Client
from xcache.wire import protocol
from xcache.wire.names import Names
from xcache.wire.ownership import signer_uid


def got(place: Place, key: str = KEY, wait: float = 0.0) -> tuple[protocol.Message, bytes | None]:
    """Return the answer to a Get, and the content."""
    with talking(place) as talk:
        answer = talk.ask(get_message(key, wait))
        if not isinstance(answer, protocol.Found):
            return answer, None
        if answer.payload is not None:
            return answer, answer.payload
        with open(talk.descriptors.pop(), "rb") as file:
            return answer, file.read()


@pytest.mark.parametrize("size", [10, 100_000], ids=["in a row", "in a file"])
def test_an_entry_of_one_machine_is_found_on_another(folder, size):
    content = b"x" * size
    with host(f"file://{folder}") as here:
        put_and_upload(here, content=content, compile_seconds=12.5)
    with host(f"file://{folder}") as there:
        answer, found = got(there)
        assert (found, answer.compile_seconds, answer.digest) == (content, 12.5, digest(content))
        # It is kept, and the tier is not asked again.
        (folder / Names("").entry(KEY)).unlink()
        assert got(there)[1] == content
        assert remote_of(there)["found"] == 1
        ((uid,),) = there.query("SELECT writer_uid FROM entries")
        assert uid == signer_uid(OURS.public.id)
        shell = Shell(there)
        assert "key ours" in shell.say("ls")
        assert "signed by key ours" in shell.say("show", KEY)
        assert "1 of 1 found" in shell.say("status")


def test_what_a_stranger_signed_is_not_loaded_and_said_once(folder):
    with host(f"file://{folder}", signer=STRANGER, trusts=(STRANGER.public,)) as here:
        put_and_upload(here)
        put_and_upload(here, key_of("another"))
    with host(f"file://{folder}") as there:
        for key in (KEY, KEY, key_of("another")):
            answer, _ = got(there, key)
            assert isinstance(answer, protocol.Missing)
            assert answer.cause.startswith(f"rejected: file://{folder}: the key {STRANGER.public.id} is not in ")
        assert remote_of(there)["rejected"] == 3
        assert (there.dir / "daemon.log").read_text().count("is not used") == 1
        assert not there.query("SELECT 1 FROM entries")


def test_a_revocation_counts_at_once_for_what_was_copied(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}", trusts=(OURS.public, SECOND.public)) as there:
        assert got(there)[1] == CONTENT
        trust(there, f"{OURS.public} revoked=2026-11-27", SECOND.public)
        # The daemon looks at the list fifty times a second.
        assert until(lambda: isinstance(got(there)[0], protocol.Missing))
        trust(there, OURS.public)
        assert until(lambda: got(there)[1] == CONTENT)


def test_what_was_copied_is_trusted_as_before_when_the_tier_is_given_up(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}") as there:
        assert got(there)[1] == CONTENT
        there.stop()
        del there.env["XCACHE_REMOTE"]
        there.start_daemon()
        assert got(there)[1] == CONTENT
        trust(there, f"{OURS.public} revoked=2026-11-27")
        assert until(lambda: isinstance(got(there)[0], protocol.Missing))


def test_an_unsigned_entry_is_loaded_only_where_the_tier_is_trusted(folder):
    with host(f"file://{folder}?trust=tier", signer=None, trusts=()) as here:
        put_and_upload(here)
    with host(f"file://{folder}") as careful, host(f"file://{folder}?trust=tier", signer=None, trusts=()) as trusting:
        assert isinstance(got(careful)[0], protocol.Missing)
        assert got(trusting)[1] == CONTENT


def test_without_a_key_nothing_leaves_a_machine_and_the_reason_is_seen(folder):
    with host(f"file://{folder}", signer=None) as here:
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: "xcache key new" in str(remote_of(here)["problem"]))
        assert remote_of(here)["waiting"] == 1
        assert not any(folder.rglob("*"))


def test_namespaces_are_apart(folder):
    tier = f"file://{folder}"
    with host(tier, XCACHE_NAMESPACE="red") as red, host(tier, XCACHE_NAMESPACE="blue") as blue:
        put_and_upload(red)
        assert isinstance(got(blue)[0], protocol.Missing)
        # Not even by a hand that copies the object.
        target = folder / Names("blue").entry(KEY)
        target.parent.mkdir(parents=True)
        target.write_bytes((folder / Names("red").entry(KEY)).read_bytes())
        assert isinstance(got(blue)[0], protocol.Missing)
        assert remote_of(blue)["rejected"] == 1


def test_an_object_under_another_key_is_not_served(folder):
    other = key_of("another")
    with host(f"file://{folder}") as here:
        put_and_upload(here)
        target = folder / Names("").entry(other)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder / Names("").entry(KEY)).read_bytes())
        assert isinstance(got(here, other)[0], protocol.Missing)


@pytest.mark.parametrize("content", [b"", b"garbage", b"xcparcel\1\1\0\0\0\5"], ids=["nothing", "garbage", "cut off"])
def test_an_object_that_is_none_is_a_miss(folder, content):
    with host(f"file://{folder}") as here:
        target = folder / Names("").entry(KEY)
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
        assert isinstance(got(here)[0], protocol.Missing)
        assert remote_of(here)["rejected"] == 1


@pytest.mark.parametrize(
    ("trusts", "is_replaced"),
    [((SECOND.public, f"{OURS.public} revoked=2020-01-01"), True), ((SECOND.public,), False)],
    ids=["revoked", "unknown"],
)
def test_what_a_revoked_key_signed_is_replaced_and_what_an_unknown_one_signed_stays(folder, trusts, is_replaced):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    before = (folder / Names("").entry(KEY)).read_bytes()
    with host(f"file://{folder}", signer=SECOND, trusts=trusts) as there:
        assert isinstance(got(there)[0], protocol.Missing)
        put_and_upload(there)
    assert ((folder / Names("").entry(KEY)).read_bytes() != before) == is_replaced


def test_a_damaged_object_is_replaced(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    path = folder / Names("").entry(KEY)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with host(f"file://{folder}") as there:
        assert isinstance(got(there)[0], protocol.Missing)
        put_and_upload(there)
    assert len(path.read_bytes()) >= len(whole) - 100
    with host(f"file://{folder}") as third:
        assert got(third)[1] == CONTENT


def test_options_of_a_tier_are_kept(folder):
    quick, slow = key_of("quick"), key_of("slow")
    with host(f"file://{folder}?no-upload-below=500ms") as here:
        put_and_upload(here, quick, compile_seconds=0.4)
        put_and_upload(here, slow, compile_seconds=0.6)
        assert [path.name for path in folder.rglob("*") if path.is_file()] == [slow]
    with host(f"file://{folder}?readonly=1") as reader, host(f"file://{folder}?writeonly=1") as writer:
        assert got(reader, slow)[1] == CONTENT
        put_and_upload(reader, KEY)
        assert not (folder / Names("").entry(KEY)).exists()
        assert isinstance(got(writer, slow)[0], protocol.Missing)
        put_and_upload(writer, KEY)
        assert (folder / Names("").entry(KEY)).exists()


def test_what_is_not_to_be_uploaded_is_not_in_a_run_either(folder):
    quick, slow = key_of("quick"), key_of("slow")
    with host(f"file://{folder}?no-upload-below=500ms") as here:
        with talking(here) as talk:
            assert talk.put(quick, CONTENT, compile_seconds=0.4) == protocol.Stored(True)
            assert talk.put(slow, CONTENT, compile_seconds=0.6) == protocol.Stored(True)
            assert talk.ask(history([quick, slow])) == protocol.Done()
        assert until(lambda: not remote_of(here)["waiting"])
    with host(f"file://{folder}") as there, talking(there) as talk:
        found = talk.ask(PROGRAM)
        assert isinstance(found, protocol.Prediction)
        assert [item["key"] for item in found.items] == [slow]


def test_the_queue_survives_a_restart_and_a_tier_that_was_away(folder):
    folder.rmdir()
    with host(f"file://{folder}") as here:
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: remote_of(here)["state"] == "failing")
        here.stop()
        assert here.query("SELECT name FROM uploads") == [(KEY,)]
        folder.mkdir()
        here.start_daemon()
        assert until((folder / Names("").entry(KEY)).exists)
        assert until(lambda: not remote_of(here)["waiting"])


def test_an_entry_that_was_damaged_here_is_not_uploaded_and_others_are(folder):
    damaged, whole = key_of("damaged"), key_of("whole")
    folder.rmdir()
    with host(f"file://{folder}") as here:
        with talking(here) as talk:
            assert talk.put(damaged, b"x" * 100_000) == protocol.Stored(True)
            assert talk.put(whole, b"y") == protocol.Stored(True)
        (file,) = (path for path in (here.dir / "blobs").rglob("*") if path.is_file())
        file.write_bytes(b"z" * 100_000)
        folder.mkdir()
        assert until(lambda: not remote_of(here)["waiting"])
        assert [path.name for path in folder.rglob("*") if path.is_file()] == [whole]
        log = (here.dir / protocol.LOG).read_text()
        assert "the digest of its executable differs" in log
        assert "Traceback" not in log


def test_what_the_tier_has_is_not_uploaded_again(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}") as there:
        with talking(there) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not remote_of(there)["waiting"])
        assert remote_of(there)["puts"] == 0


def test_a_tier_that_is_silent_is_waited_for_once():
    with silent_host() as here:
        began = time.monotonic()
        for number in range(20):
            assert isinstance(got(here, key_of(f"{number}"))[0], protocol.Missing)
        # Timing is no matter here but for the bound: twenty waits would take twenty of it.
        assert time.monotonic() - began < 10 * BOUND


def test_a_tier_that_comes_back_is_used_again(folder):
    aside = folder.with_name("aside")
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}") as there:
        folder.rename(aside)
        assert isinstance(got(there)[0], protocol.Missing)
        assert until(lambda: remote_of(there)["state"] == "failing")
        aside.rename(folder)
        assert until(lambda: remote_of(there)["state"] == "ok")
        assert got(there)[1] == CONTENT


def test_nobody_there_is_no_trouble():
    with host(f"redis://127.0.0.1:{free_port()}") as here:
        assert isinstance(got(here)[0], protocol.Missing)
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
            assert talk.get(KEY) == CONTENT


def test_an_address_that_no_engine_takes_is_said_and_the_rest_works(folder):
    with host(f"file://{folder}", "s3://bucket/x?unknown=1") as here:
        assert until(lambda: sorted(str(each["state"]) for each in _remotes(here)) == ["ok", "unusable"])
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
        assert until((folder / Names("").entry(KEY)).exists)


def _remotes(place: Place) -> list[dict[str, object]]:
    with talking(place) as talk:
        status = talk.ask(protocol.AskStatus())
        assert isinstance(status, protocol.Status)
        return status.remotes


def test_a_daemon_that_began_without_the_tier_of_the_settings_is_told(folder):
    with new_place() as here:
        here.start_daemon()
        shell = Shell(here)
        shell.env["XCACHE_REMOTE"] = f"file://{folder}"
        assert "began without file://" in shell.say("status")
        assert "began without" not in Shell(here).say("status")


def test_a_crowd_that_wants_one_entry_asks_once(folder):
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}") as there, contextlib.ExitStack() as stack:
        talks = [stack.enter_context(talking(there)) for _ in range(16)]
        asked = [(talk, talk.say(get_message(KEY, 30.0))) for talk in talks]
        assert [type(outcome(talk, request)) for talk, request in asked] == [protocol.Found] * 16
        assert remote_of(there)["gets"] == 1


def test_after_a_miss_in_the_tier_one_compiles_and_the_others_wait(folder):
    with host(f"file://{folder}") as here, talking(here) as first, talking(here) as second:
        asked = first.say(get_message(KEY, 30.0))
        lease = outcome(first, asked)
        assert isinstance(lease, protocol.Missing) and lease.lease
        waiting = second.say(get_message(KEY, 30.0))
        assert isinstance(second.hear()[1], protocol.Wait)
        assert first.put(KEY, CONTENT) == protocol.Stored(True)
        assert isinstance(outcome(second, waiting), protocol.Found)


def test_a_client_that_leaves_while_the_tier_is_asked_takes_no_lease():
    with silent_host() as here:
        with talking(here) as gone:
            gone.say(get_message(KEY, 30.0))
        with talking(here) as talk:
            answer = outcome(talk, talk.say(get_message(KEY, 30.0)))
            assert isinstance(answer, protocol.Missing) and answer.lease


PROGRAM = protocol.Predict("train.py", digest(b"arguments"))


def history(keys: list[str]) -> protocol.Remember:
    items = [{"key": key, "options": "o", "devices": "0", "platform": "cpu", "seconds": 0.1} for key in keys]
    return protocol.Remember(*PROGRAM, items, {"o": b"options"})


def test_what_a_program_wanted_comes_in_one_object_with_its_entries_and_aliases(folder):
    keys = [key_of(f"program {number}") for number in range(130)]
    program = digest(b"raw program")
    alias = protocol.Alias(digest(b"structure"), program, b"facts", digest(b"seal"))
    with host(f"file://{folder}") as here:
        with talking(here) as talk:
            for key in keys:
                assert talk.put(key, key.encode()) == protocol.Stored(True)
            assert talk.ask(protocol.RememberAliases([[*alias]])) == protocol.Done()
            assert talk.ask(history(keys)) == protocol.Done()
        assert until(lambda: not remote_of(here)["waiting"])
    with host(f"file://{folder}") as there, talking(there) as talk:
        found = talk.ask(PROGRAM)
        assert isinstance(found, protocol.Prediction)
        assert [item["key"] for item in found.items] == keys
        assert [*alias] in found.aliases
        assert talk.get(keys[-1]) == keys[-1].encode()
        assert remote_of(there)["gets"] == 1


@pytest.mark.thorough
def test_two_keys_have_a_part_each_of_what_a_program_wanted(folder):
    """So do two toolchains; and an unchanged list is not uploaded again."""
    both = OURS.public, SECOND.public
    with host(f"file://{folder}", trusts=both) as here, host(f"file://{folder}", signer=SECOND, trusts=both) as there:
        for place, key in ((here, key_of("of ours")), (there, key_of("of the second"))):
            with talking(place) as talk:
                assert talk.put(key, key.encode()) == protocol.Stored(True)
                assert talk.ask(history([key])) == protocol.Done()
            assert until(lambda place=place: not remote_of(place)["waiting"])
        puts = remote_of(here)["puts"]
        for _ in range(2):
            # The second time, the tier is not even asked.
            gets = remote_of(here)["gets"]
            with talking(here) as talk:
                assert talk.ask(history([key_of("of ours")])) == protocol.Done()
            assert until(lambda: not remote_of(here)["waiting"])
            assert remote_of(here)["puts"] == puts
        assert remote_of(here)["gets"] == gets
    of = {(OURS.public,): "of ours", (SECOND.public,): "of the second", both: "of the second"}
    for trusted, expected in of.items():
        with host(f"file://{folder}", trusts=trusted) as reader, talking(reader) as talk:
            found = talk.ask(PROGRAM)
            assert [item["key"] for item in found.items] == [key_of(expected)], expected


def test_a_get_waits_for_the_prediction_of_its_process(folder):
    with host(f"file://{folder}") as here:
        with talking(here) as talk:
            assert talk.put(KEY, CONTENT) == protocol.Stored(True)
            assert talk.ask(history([KEY])) == protocol.Done()
        assert until(lambda: not remote_of(here)["waiting"])
    with host(f"file://{folder}") as there, talking(there) as talk:
        asked = talk.say(PROGRAM), talk.say(get_message(KEY, 30.0))
        assert isinstance(talk.answer(asked[0]), protocol.Prediction)
        assert isinstance(outcome(talk, asked[1]), protocol.Found)
        assert remote_of(there)["gets"] == 1


def test_a_message_of_no_digest_asks_no_tier(folder):
    with host(f"file://{folder}") as here:
        assert isinstance(got(here, "no digest")[0], protocol.Missing)
        assert remote_of(here)["gets"] == 0


def test_entries_that_arrive_for_no_reason_of_ours_are_put_as_before(folder):
    """A local put of a key that came from a tier is the user's own, and counts first."""
    with host(f"file://{folder}") as here:
        put_and_upload(here)
    with host(f"file://{folder}") as there:
        assert got(there)[1] == CONTENT
        with talking(there) as talk:
            message = put_message(KEY, b"compiled here", b"program")
            assert talk.ask(message) == protocol.Stored(True)
            assert talk.get(KEY) == b"compiled here"


def test_a_program_is_told_once_that_the_daemon_runs_without_its_remote_store(folder, caplog):
    with host() as here:
        here.env["XCACHE_REMOTE"] = f"file://{folder}"
        with contextlib.closing(Client(here.config(), "test")) as client:
            client.get(get_message(KEY))
            here.stop()
            del here.env["XCACHE_REMOTE"]
            here.start_daemon()
            # It connects once more.
            client.get(get_message(KEY))
    (told,) = caplog.messages
    assert f"the daemon was started without file://{folder}, which the settings of this program name" in told


def test_a_miss_says_that_a_remote_store_could_not_be_asked(folder):
    with silent_host() as there:
        answer, _ = got(there)
        assert isinstance(answer, protocol.Missing)
        # Two clocks say so at the same time: that of the tiers, and that of the thread that answers.
        cause, _, trouble = answer.cause.partition("; ")
        assert (cause, trouble.partition(": ")[0]) == ("new", "remote trouble")
        assert "no answer" in trouble
