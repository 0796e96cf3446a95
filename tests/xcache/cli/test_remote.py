"""``xcache remote`` and what doctor says of remote stores: real daemons, and a folder as the store."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from support.command_line import Shell
from support.conversation import key_of, talking
from support.places import Place, digest, new_place, until
from support.sharing import host, remote_of, silent_server, trust
from support.signing import OURS, SECOND, STRANGER

from xcache.cli import main, remote_asking
from xcache.errors import RefusedError
from xcache.wire import commands, protocol
from xcache.wire.names import Names
from xcached.caller import Caller, Reply
from xcached.requests.remotes import RemoteRequests
from xcached.requests.trust import NOT_PERMITTED, Trust
from xcached.tiers.tier import KINDS

FIRST, SECOND_KEY, OTHER = "abcd" + "1" * 60, "abcd" + "2" * 60, "ef01" + "3" * 60
DAY = 86400.0


@contextlib.contextmanager
def shell(*tiers: str, **settings: object) -> Iterator[Shell]:
    """Give a shell in a place whose daemon has these remote stores."""
    with host(*tiers, **settings) as place:
        yield Shell(place)


def write(folder: Path, key: str, content: bytes = b"an object", age: float = 0.0, names: Names | None = None) -> Path:
    """Put an object there as another machine would have."""
    path = folder / (names or Names("")).entry(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def uploaded(place: Place) -> bool:
    return until(lambda: not remote_of(place)["waiting"])


def test_a_store_is_checked_and_nothing_stays_there(folder):
    with shell(f"file://{folder}") as here:
        said = here.say("remote", "check")
        assert f"ok    keys: ours ({OURS.public.id}) signs; 1 key trusted\n" in said
        assert f"ok    file://{folder}: written, read back and removed in " in said
        assert not files(folder)
        found = here.json("remote", "check", "--tier", str(folder))
        (one,) = found["remotes"]
        assert (one["state"], one["problem"], one["can_list"], one["seconds"] > 0) == ("ok", "", True, True)
        assert (found["keys"]["signer"], found["keys"]["why_not_trusted"]) == ("ours", "")
        assert "no remote store matches nowhere" in here.say("remote", "check", "--tier", "nowhere", code=2)


@pytest.mark.thorough
def test_what_the_keys_lack_is_said(folder):
    options = {"plain": "", "read": "?readonly=1", "written": "?writeonly=1", "trusted": "?trust=tier"}
    for name in options:
        (folder / name).mkdir()
    with host(*(f"file://{folder}/{name}{option}" for name, option in options.items())) as place:
        here, key = Shell(place), place.root / "config" / "xcache" / "signing-key"

        def said(name: str) -> tuple[str, str]:
            result = here.run("remote", "check", "--tier", f"/{name}")
            lines = result.stdout.splitlines()
            assert result.returncode == lines[0].startswith("wrong")
            return lines[0], lines[1].strip()

        assert said("plain")[0] == f"ok    keys: ours ({OURS.public.id}) signs; 1 key trusted"
        trust(place, SECOND.public)
        found, advice = said("plain")
        assert found.startswith("note ") and "signs; 1 key trusted, but not its own: " in found
        assert "xcache key trust" in advice
        assert said("written")[0].endswith("signs; 1 key trusted")
        trust(place, SECOND.public, "nonsense")
        assert "line 2" in said("plain")[0] and said("plain")[1] == "Correct the line, or remove it."
        trust(place)
        assert "no key in" in said("plain")[0] and "xcache key trust LINE" in said("plain")[1]
        assert said("written")[0].startswith("ok ")
        key.chmod(0o644)
        assert "others may open it" in said("plain")[0]
        key.unlink()
        assert said("plain")[0].startswith(
            "wrong keys: no key signs, so that nothing is uploaded; and nothing from there"
        )
        assert said("plain")[1].startswith("Make one: xcache key new NAME; and trust those of others")
        assert said("trusted")[0] == "ok    keys: no key signs; 0 keys trusted"
        trust(place, SECOND.public)
        assert said("read")[0] == "ok    keys: no key signs; 1 key trusted"


def test_each_store_is_checked_whatever_is_wrong_with_the_others(folder):
    missing, broken = folder / "missing", "s3://bucket/x?unknown=1"
    with silent_server() as port:
        silent = f"redis://127.0.0.1:{port}"
        with shell(f"file://{missing}", silent, broken, f"file://{folder}", XCACHE_REMOTE_TIMEOUT="300ms") as here:
            began = time.monotonic()
            found = here.json_with_status("remote", "check", code=1)["remotes"]
            # All at once, and each within three times the time.
            assert time.monotonic() - began < 10
            kinds = ["missing", "unreachable", "unusable", ""]
            assert {each["name"]: each["kind"] for each in found} == dict(
                zip((f"file://{missing}", silent, "s3://bucket/x", f"file://{folder}"), kinds, strict=True)
            )
            assert all(each["advice"] == remote_asking.ADVICE.get(each["kind"], "") for each in found)
            for command in (["ls"], ["stats"], ["gc"], ["rm", FIRST]):
                said = here.say("remote", *command, "--tier", silent, code=1)
                assert f"{silent}: no answer within 0.9 s" in said


def test_there_is_advice_for_each_kind_of_trouble():
    assert set(remote_asking.ADVICE) == {*KINDS, "unusable"}


def test_a_store_that_is_only_read_from_is_not_written_to(folder):
    write(folder, FIRST)
    folder.chmod(0o555)
    with shell(f"file://{folder}?readonly=1") as here:
        before = files(folder)
        assert "it is only read from" in here.say("remote", "check")
        assert "says that it is only read from" in here.say("remote", "rm", FIRST, code=1)
        assert here.json("remote", "gc", "--older-than", "0s")["problems"][0]["kind"] == remote_asking.READ_ONLY
        assert here.json("remote", "push") == {"remotes": []}
        assert files(folder) == before
    folder.chmod(0o755)


def test_objects_are_listed_the_newest_first(folder):
    blue = Names("blue")
    with shell(f"file://{folder}") as here:
        key = here.put("jit_mine")
        assert until(lambda: len(files(folder)) == 1)
        for age, each in ((2 * DAY, FIRST), (3 * DAY, SECOND_KEY)):
            write(folder, each, age=age)
        write(folder, OTHER, names=blue)
        (folder / "v1" / "all" / "entries" / "of somebody else").write_text("x")
        lines = here.say("remote", "ls").splitlines()
        assert [line.split()[0] for line in lines] == ["object", key[:12], FIRST[:12], SECOND_KEY[:12]]
        assert lines[1].split()[1:3] == ["entry", "jit_mine"]
        assert lines[2].split()[1:] == ["entry", "9", "B", "2d"]
        found = here.json("remote", "ls")
        assert [each["id"] for each in found["objects"]] == [key, FIRST, SECOND_KEY]
        assert [each["module_name"] for each in found["objects"]] == ["jit_mine", None, None]
        limited = here.json("remote", "ls", "--limit", "1")
        assert ([each["id"] for each in limited["objects"]], limited["matched"]) == ([key], 3)
        assert "... and 2 more (--limit 0 shows all)" in here.say("remote", "ls", "--limit", "1")
        kinds = {each["kind"]: each for each in here.json("remote", "stats")["remotes"][0]["kinds"]}
        assert (kinds["entries"]["objects"], kinds["runs"]["objects"]) == (3, 0)
        assert kinds["entries"]["bytes"] == sum(each["bytes"] for each in found["objects"])
        assert round(kinds["entries"]["newest"] - kinds["entries"]["oldest"], -3) == round(3 * DAY, -3)
        assert f"file://{folder}  entries        3" in here.say("remote", "stats")


def test_what_does_not_fit_into_one_answer_comes_in_pages(folder):
    keys = {key_of(f"{number}") for number in range(2 * protocol.MAX_LISTED + 5)}
    for key in keys:
        write(folder, key)
    with host(f"file://{folder}") as place:
        found = Shell(place).json("remote", "ls")
        assert {each["id"] for each in found["objects"]} == keys
        assert found["matched"] == len(keys)
        with talking(place) as talk:
            asked = commands.AskObjects(f"file://{folder}", "entries/", 0, 5.0)
            first = talk.ask(asked)
            assert isinstance(first, commands.Objects) and len(first.objects) == protocol.MAX_LISTED
            # A position serves once, and only for what was asked.
            for wrong in (asked._replace(position=12345), asked._replace(position=first.position, under="runs/")):
                answer = talk.ask(wrong)
                assert isinstance(answer, protocol.Refused) and "the listing is over" in answer.reason
            # Those that nobody reads to their end are forgotten in time.
            positions = [talk.ask(asked).position for _ in range(20)]
            assert isinstance(talk.ask(asked._replace(position=positions[0])), protocol.Refused)
            assert isinstance(talk.ask(asked._replace(position=positions[-1])), commands.Objects)


def test_entries_are_removed_by_the_beginnings_of_their_keys(folder):
    paths = [write(folder, key) for key in (FIRST, SECOND_KEY, OTHER)]
    with shell(f"file://{folder}") as here:
        said = here.say("remote", "rm", "ef01", "abcd", code=2)
        assert "more than one entry begins with abcd" in said and FIRST in said
        assert "no entry of the remote stores begins with 9999" in here.say("remote", "rm", "ef01", "9999", code=1)
        assert "is not the beginning of a key" in here.say("remote", "rm", "ab", code=2)
        assert all(path.exists() for path in paths)
        said = here.say("remote", "rm", "EF01", FIRST[:5])
        assert "removed 2 entries, 18 B" in said and f"{OTHER[:12]}  file://{folder}" in said
        assert [path.exists() for path in paths] == [False, True, False]
        assert here.json("remote", "rm", SECOND_KEY) == {
            "removed": [{"remote": f"file://{folder}", "key": SECOND_KEY, "bytes": 9}],
            "problems": [],
        }


def test_names_that_are_none_of_the_namespace_s_are_not_removed(folder):
    write(folder, FIRST, names=Names("blue"))
    with host(f"file://{folder}") as place, talking(place) as talk:
        for name in ("../in-blue/entries/ab/" + FIRST, "", "/x", "entries/../../in-blue"):
            answer = talk.ask(commands.RemoveObjects(f"file://{folder}", [name], 5.0))
            assert isinstance(answer, protocol.Refused), name
    assert len(files(folder)) == 1


def test_what_is_old_is_removed_within_the_namespace(folder):
    old, new = write(folder, FIRST, age=100 * DAY), write(folder, SECOND_KEY, age=80 * DAY)
    others = [write(folder, OTHER, age=1000 * DAY, names=Names(name)) for name in ("", "blue")]
    stranger = folder / "old-file"
    stranger.write_text("x")
    os.utime(stranger, (0, 0))
    with shell(f"file://{folder}") as here:
        assert f"file://{folder}: would remove 2 objects, 18 B" in here.say("remote", "gc", "--dry-run")
        assert old.exists()
        done = here.json("remote", "gc")
        assert done["remotes"] == [
            {"name": f"file://{folder}", "matched": 2, "without_time": 0, "unknown": 0, "removed": 2}
            | {"bytes": 18, "toolchains": []}
        ]
        assert [path.exists() for path in (old, new, *others, stranger)] == [False, True, False, True, True]
        assert "removed 1 object, 9 B" in here.say("remote", "gc", "--older-than", "79d")
        assert "removed 0 objects, 0 B" in here.say("remote", "gc")


def test_many_are_removed_in_several_messages(folder):
    for number in range(450):
        write(folder, key_of(f"{number}"), age=100 * DAY)
    with shell(f"file://{folder}") as here:
        assert here.json("remote", "gc")["remotes"][0]["removed"] == 450
    assert not files(folder)


def test_what_the_store_had_before_is_pushed(folder):
    quick, slow, run = key_of("quick"), key_of("slow"), protocol.Predict("train.py", digest(b"arguments"))
    with host() as place:
        here = Shell(place)
        assert "no remote store is set" in here.say("remote", "push", code=1)
        place.env["XCACHE_REMOTE"] = here.env["XCACHE_REMOTE"] = f"file://{folder}?no-upload-below=500ms"
        assert "it was started with other settings; xcache restart" in here.say("remote", "push", code=1)
        with talking(place) as talk:
            assert talk.put(quick, b"quick", compile_seconds=0.1) == protocol.Stored(True)
            assert talk.put(slow, b"slow", compile_seconds=3.0) == protocol.Stored(True)
            item = {"key": slow, "options": "o", "devices": "0", "platform": "cpu", "seconds": 0.1}
            assert talk.ask(protocol.Remember(*run, [item], {"o": b"options"})) == protocol.Done()
        place.stop()
        place.start_daemon()
        assert not files(folder)
        assert f"file://{folder}: queued 1 entry and 1 run\n" in here.say("remote", "push")
        assert uploaded(place)
        assert {path.name for path in files(folder)} == {slow, Path(Names("").run(*run)).name}
        assert here.json("remote", "push", "--all", "--tier", "file:")["remotes"] == [
            {"name": f"file://{folder}", "entries": 2, "runs": 1, "left": 0}
        ]
        assert uploaded(place)
        assert (folder / Names("").entry(quick)).exists()
        # The objects that were there are not written again.
        assert remote_of(place)["puts"] == 3


def test_push_waits_until_all_is_there(folder):
    with host() as place:
        here = Shell(place)
        keys = [here.put(f"jit_{number}") for number in range(20)]
        place.stop()
        place.env["XCACHE_REMOTE"] = here.env["XCACHE_REMOTE"] = f"file://{folder}"
        assert "queued 20 entries" in here.say("remote", "push", "--wait", "60s")
        assert {path.name for path in files(folder)} == set(keys)
        folder.rename(folder.with_name("gone"))
        here.put("jit_more")
        found = here.json_with_status("remote", "push", "--all", "--wait", "200ms", code=1)["remotes"]
        assert found[0]["waiting"] > 0
        said = here.run("remote", "push", "--wait", "0s")
        assert (said.returncode, "wait still; see xcache status" in said.stderr) == (1, True), said
        assert "is not a duration" in here.say("remote", "push", "--wait", "soon", code=2)


def test_what_came_from_others_is_not_pushed(folder):
    with host(f"file://{folder}") as there:
        key = Shell(there).put("jit_f")
        assert uploaded(there)
        there.stop()
        assert "ERROR" not in (there.dir / "daemon.log").read_text()
    with host(f"file://{folder}", signer=SECOND) as place, talking(place) as talk:
        assert talk.get(key) is not None
        (row,) = Shell(place).json("remote", "push", "--all")["remotes"]
        assert (row["entries"], row["left"]) == (0, 0)


def test_an_http_cache_is_checked_and_needs_whole_keys(http_engine, folder):
    where = http_engine.at("remote-commands")
    with host(where.url) as place:
        here = Shell(place)
        name = str(remote_of(place)["name"])
        assert f"ok    {name}: written, read back and removed in" in here.say("remote", "check")
        key = here.put("jit_f")
        assert uploaded(place)
        for command in ("ls", "stats", "gc"):
            assert f"{name}: it cannot list what it has" in here.say("remote", command)
            assert here.json("remote", command)["problems"][0]["kind"] == remote_asking.CANNOT_LIST
        assert "need all 64 digits" in here.say("remote", "rm", key[:12], code=1)
        assert here.json("remote", "rm", key)["removed"] == [{"remote": name, "key": key, "bytes": None}]
        assert here.json_with_status("remote", "rm", key, code=1)["removed"] == []


def test_redis_does_not_know_how_old_its_objects_are(redis_engine):
    with host(redis_engine.at("remote-commands").url) as place:
        here = Shell(place)
        key = here.put("jit_f")
        assert uploaded(place)
        (one,) = here.json("remote", "ls")["objects"]
        assert (one["id"], one["modified_at"]) == (key, None)
        assert "1 object of unknown age stay" in here.say("remote", "gc", "--older-than", "0s")
        assert here.json("remote", "rm", key[:4])["removed"][0]["key"] == key


def test_only_administrators_may(folder):
    with new_place() as place:
        trust_of = Trust(place.config())
    handlers = RemoteRequests(None, None, trust_of).handlers  # type: ignore[arg-type]
    requests = (
        commands.CheckRemotes("", 1.0), commands.AskObjects("x", "", 0, 1.0), commands.RemoveObjects("x", [], 1.0),
        commands.Push("", False), commands.DescribeEntries("x", [], 1.0),
    )  # fmt: skip
    assert {type(request) for request in requests} == set(handlers)
    for request in requests:
        assert handlers[type(request)](Caller(1, os.getuid() + 12345), request) == Reply(NOT_PERMITTED)
        answer = handlers[type(request)](Caller(1, os.getuid()), request)
        assert isinstance(answer, Reply) and answer.message.kind == "no remote store"


def test_doctor_has_a_line_for_the_keys_and_for_each_store(folder):
    with shell(f"file://{folder}", f"file://{folder}/missing", trusts=(STRANGER.public,)) as here:
        said = here.say("doctor", "--no-compile", code=1)
        assert "note  keys: ours" in said
        assert f"ok    remote file://{folder}: written, read back and removed in" in said
        assert f"wrong remote file://{folder}/missing: " in said and remote_asking.ADVICE["missing"] in said
    with host() as place:
        assert "keys:" not in Shell(place).say("doctor", "--no-compile")
        trust(place, OURS.public)
        here = Shell(place)
        here.env["XCACHE_REMOTE"] = f"file://{folder}"
        said = here.say("doctor", "--no-compile", code=1)
        assert "wrong remotes: the daemon has no remote store: it was started with other settings" in said


def test_doctor_does_not_blame_the_stores_when_this_user_may_not_ask(folder, monkeypatch):
    def refuse(*_arguments: object) -> None:
        raise RefusedError(NOT_PERMITTED.kind, NOT_PERMITTED.reason)

    monkeypatch.setattr(remote_asking.Remotes, "check", refuse)
    with shell(f"file://{folder}/missing") as here:
        assert "note  remotes: the daemon refuses: only root and" in here.say("doctor", "--no-compile")
        assert "the daemon refuses: only root and" in here.say("remote", "check", code=1)


@pytest.mark.parametrize("command", ["check", "ls", "gc"])
def test_stores_are_completed_without_what_a_shell_would_cut(monkeypatch, command):
    monkeypatch.setenv("XCACHE_REMOTE", "s3://bucket/one?readonly=1 redis://user:secret@host")
    complete = ShellComplete(main, {}, "xcache", "_XCACHE_COMPLETE").get_completions
    assert [each.value for each in complete(["remote", command, "--tier"], "")] == ["bucket/one", "host"]
    assert [each.value for each in complete(["remote", command, "--tier"], "bu")] == ["bucket/one"]
    monkeypatch.setenv("XCACHE_REMOTE", "nonsense")
    assert not complete(["remote", command, "--tier"], "")
