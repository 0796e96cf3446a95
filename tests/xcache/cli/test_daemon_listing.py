"""The commands of users who may not look into the store, as all of a whole machine's daemon but root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import names

from xcache.cli import store_file
from xcache.errors import ClosedStoreError


@pytest.fixture
def closed(monkeypatch):
    def exists(path: Path) -> bool:
        raise ClosedStoreError("not for you")

    monkeypatch.setattr(store_file, "_exists", exists)


def test_entries_are_listed_and_named(shell, closed):
    keys = [shell.put(name, key=start * 64) for name, start in (("jit_f", "a"), ("jit_g", "b"))]
    keys.append(shell.put("pmap_h", key="b" * 10 + "c" * 54))
    assert names(shell.json("ls", "--name", "JIT", "--sort", "name")) == ["jit_f", "jit_g"]
    assert all(key in shell.say("ls", "--long") for key in keys)
    assert shell.json("pin", "aaaa")["keys"] == keys[:1]
    assert shell.json("ls", "--sort", "name")["entries"][0]["pinned"] is True
    assert "more than one entry begins with bbbb" in shell.say("rm", "bbbb", code=2)
    assert "no entry begins with 1234" in shell.say("rm", "1234", code=1)
    assert shell.json("rm", "bbbbbbbbbbc", "aaaa")["removed"] == 2
    shell.json("stop")
    assert "not for you" in shell.say("ls", code=1)


def test_a_whole_key_that_fits_nothing_is_refused_like_the_beginning_of_one(shell, closed):
    good, bad = shell.put("jit_f", key="a" * 64), "b" * 64
    for command in ("rm", "pin", "unpin"):
        for arguments in ((good, bad), (bad,)):
            assert f"begins with {bad}" in shell.say(command, *arguments, code=1)
    assert names(shell.json("ls")) == ["jit_f"]
    assert shell.json("pin", good)["entries"] == 1


def test_status_says_what_it_cannot_know(shell, closed):
    shell.put("jit_f")
    found = shell.json("status")
    assert (found["running"], found["entries"], found["stale"], found["closed"]) == (True, 1, None, "not for you")
    assert ", of all users" in shell.say("status")
    shell.json("stop")
    found = shell.json("status")
    assert (found["running"], found["problem"], found["entries"], found["bytes"]) == (False, None, None, None)
    said = shell.say("status")
    assert "nobody listens on this socket" in said
    assert "cannot be known: not for you" in said
    assert f"nobody listens on {shell.config.socket}, and not for you" in shell.say("ls", code=1)


def test_a_socket_that_is_not_trusted_is_a_problem_with_a_document(shell, place):
    """The user's own folder of the store's name, which is not the machine's daemon's, changes nothing."""
    planted = place.root / "planted"
    planted.mkdir()
    planted.chmod(0o777)
    shell.env |= {"XCACHE_SOCKET": str(planted / "s"), "XCACHE_DAEMON_USER": "54321"}
    shell.directory.mkdir()
    done = shell.run("status", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["running"], found["socket"]) == (1, False, str(planted / "s"))
    assert found["problem"] == f"{planted} can be written by other users (untrusted socket)"
    assert done.stderr == f"xcache: {found['problem']}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "1234"), 1, "no entry begins with or is named 1234"),
        (("ls", "--sort", "luck"), 2, "luck"),
        (("rm", "xyz"), 2, "not the beginning of a key"),
        (("frobnicate",), 2, "frobnicate"),
        (("clear",), 1, "aborted"),
    ],
)
def test_a_command_that_fails_prints_a_document_where_it_was_to_print_one(shell, arguments, code, said):
    shell.put("jit_f", key="a" * 64)
    failed = shell.run(*arguments, "--json")
    assert failed.returncode == code
    assert said in json.loads(failed.stdout)["error"]
    assert failed.stderr
    assert shell.run(*arguments).stdout == ""
