"""``xcache preflight``: real daemons, a folder as the remote store, and made-up entries."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import jaxlib
import pytest
from support.command_line import Shell
from support.conversation import key_of, talking
from support.places import Place, digest
from support.sharing import host, put_and_upload, silent_server
from support.terminal import on_terminal

from xcache import lock_file
from xcache.keys import toolchain
from xcache.lock_file import Made, Program
from xcache.wire import protocol
from xcache.wire.names import Names

JAXLIB = Path(jaxlib.__file__).parent
HERE, THERE, NOWHERE, DEAR = (key_of(name) for name in ("here", "there", "nowhere", "dear"))


@pytest.fixture(scope="session")
def mine() -> Made:
    """The compiler that programs of this Python are made with."""
    found = toolchain.describe("cpu", JAXLIB, jaxlib.__version__, None)
    return Made("cpu", "cpu", jaxlib.__version__, digest(found.content))


def write(place: Place, made: Made, **programs: tuple[str, float]) -> str:
    """Write a lock file with these programs, by name; return its path."""
    path = place.root / "run.lock"
    wanted = {key: Program(f"jit_{name}", seconds, made) for name, (key, seconds) in programs.items()}
    path.write_text(lock_file.render(wanted))
    return str(path)


def put(place: Place, key: str) -> None:
    with talking(place) as talk:
        assert talk.put(key, b"content") == protocol.Stored(True)


def test_what_is_where_and_what_it_would_cost(folder, mine):
    tier = f"file://{folder}"
    with host(tier) as other:
        put_and_upload(other, THERE)
    with host(tier) as place:
        put(place, HERE)
        shell = Shell(place)
        path = write(place, mine, here=(HERE, 1.0), there=(THERE, 2.0), nowhere=(NOWHERE, 3.0), dear=(DEAR, 125.0))
        said = shell.say("preflight", path, code=1)
        lines = said.splitlines()
        assert lines[:2] == [
            f"{path} wants 4 programs",
            f"  4 for cpu (cpu), jaxlib {mine.jaxlib}: {sys.executable} has the same toolchain",
        ]
        assert lines[2:5] == ["      1  here", f"      1  in {tier}", "      2  missing"]
        assert lines[5] == ("Compiling what is missing takes about 2m 08s, one program after the other. The dearest:")
        assert [line.split() for line in lines[6:]] == [
            ["program", "key", "platform", "compile"],
            ["jit_dear", DEAR[:12], "cpu", "2m", "05s"],
            ["jit_nowhere", NOWHERE[:12], "cpu", "3.0", "s"],
        ]
        assert "jit_nowhere" not in (limited := shell.say("preflight", path, "--limit", "1", code=1))
        assert "... and 1 more (--limit 0 shows all)" in limited
        found = shell.json_with_status("preflight", path, code=1)
        counts = {name: found[name] for name in ("programs", "here", "remote", "missing", "unknown", "fetched")}
        assert counts == {"programs": 4, "here": 1, "remote": 1, "missing": 2, "unknown": 0, "fetched": 0}
        assert (found["compile_seconds"], found["problems"]) == (128.0, [])
        assert found["toolchains"] == [mine._asdict() | {"programs": 4, "differs": False}]
        assert [each["key"] for each in found["entries"]] == [HERE, THERE, DEAR, NOWHERE]
        assert found["entries"][1] == {
            "key": THERE, "module_name": "jit_there", "platform": "cpu", "compile_seconds": 2.0,
            "state": "remote", "remote": tier, "reason": "",
        }  # fmt: skip
        # An entry in a remote store is enough, and a quick compile may not matter.
        path = write(place, mine, here=(HERE, 1.0), there=(THERE, 2.0), nowhere=(NOWHERE, 0.4))
        assert "wants 2 of 3 programs" in (quick := shell.say("preflight", path, "--at-least", "500ms"))
        assert "      0  missing\n" in quick
        assert place.query("SELECT key FROM entries") == [(HERE,)]


def test_fetch_brings_it_here_and_says_what_did_not_come(folder, mine):
    tier = f"file://{folder}"
    keys = [key_of(str(number)) for number in range(10)]
    with host(tier) as other:
        for key in keys:
            put_and_upload(other, key)
    damaged = folder / Names("").entry(keys[3])
    # Its header is whole.
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with host(tier) as place:
        shell = Shell(place)
        path = write(place, mine, **{f"f{number}": (key, 1.0) for number, key in enumerate(keys)})
        shell.say("preflight", path)
        said = shell.say("preflight", path, "--fetch", code=1)
        assert "      9  here, of which 9 were fetched now\n" in said
        assert f"jit_f3   {keys[3][:12]}" in said and f"{tier}: " in said
        shutil.rmtree(folder)
        folder.mkdir()
        path = write(place, mine, **{f"f{number}": (keys[number], 1.0) for number in (1, 2)})
        assert shell.json("preflight", path)["here"] == 2


@pytest.mark.parametrize("columns", [80, 40])
def test_on_a_terminal_there_is_a_bar_and_nothing_is_lost(folder, mine, columns):
    tier = f"file://{folder}"
    keys = [key_of(str(number)) for number in range(10)]
    with host(tier) as other:
        for key in keys:
            put_and_upload(other, key)
    with host(tier) as place:
        programs = {f"f{number}": (key, 1.0) for number, key in enumerate(keys)}
        path = write(place, mine, dear=(DEAR, 125.0), **programs)
        with on_terminal(place.env, "preflight", path, "--fetch", columns=columns) as shown:
            assert shown.wait() == 1
            assert "fetching" in shown.text
            text = " ".join(shown.text.split())
            assert "10 here, of which 10 were fetched now" in text
            assert "Compiling what is missing takes about 2m 05s, one program after the other." in text
            assert f"jit_dear {DEAR[:12]}" in text if columns == 80 else DEAR[:12] in text


def test_a_store_that_fails_is_named(folder, mine):
    away = f"file://{folder}/away"
    with silent_server() as port, host(away, f"redis://127.0.0.1:{port}", XCACHE_REMOTE_TIMEOUT="200ms") as place:
        put(place, HERE)
        shell = Shell(place)
        path = write(place, mine, here=(HERE, 1.0), there=(THERE, 2.0))
        said = shell.run("preflight", path)
        assert said.returncode == 1
        assert "      1  unknown\n" in said.stdout and "what is missing, or unknown, takes about 2.0 s" in said.stdout
        complaints = said.stderr.splitlines()
        assert len(complaints) == 2
        assert complaints[0].startswith(f"xcache: what {away} has is not known: ")
        assert complaints[1] == f"xcache: what redis://127.0.0.1:{port} has is not known: no answer within 0.6 s"
        # Nobody need know what a store has of which everything is here.
        assert shell.run("preflight", write(place, mine, here=(HERE, 1.0))).stderr == ""


@pytest.mark.parametrize(
    ("changes", "differs", "code", "said"),
    [
        ({"jaxlib": "0.0.1"}, True, 1, f"has jaxlib {jaxlib.__version__}, so that its programs want none of this"),
        ({"toolchain": digest(b"other")}, True, 1, "has other files of that version, so that its programs want none"),
        ({"platform": "tpu"}, None, 0, "whether plugin and tools are the same shows only on the device"),
    ],
)
def test_the_compiler_is_compared(place, mine, changes, differs, code, said):
    place.start_daemon()
    put(place, HERE)
    shell = Shell(place)
    path = write(place, mine._replace(**changes), here=(HERE, 1.0))
    assert said in shell.say("preflight", path, code=code)
    found = shell.json_with_status("preflight", path, code=code)
    assert found["toolchains"][0]["differs"] is differs
    assert (found["python"], found["python_jaxlib"]) == (sys.executable, jaxlib.__version__)


def test_another_python_may_be_named(place, mine):
    place.start_daemon()
    put(place, HERE)
    shell = Shell(place)
    path = write(place, mine, here=(HERE, 1.0))
    without = place.root / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    without.chmod(0o755)
    assert f"{without} has no jaxlib" in shell.say("preflight", path, "--python", str(without), code=2)
    # A tool may have an environment of its own.
    assert "is no Python that runs here" in shell.say("preflight", path, "--python", "/bin/false", code=2)
    assert "is no Python that runs here" in shell.say("preflight", path, "--python", str(place.root), code=2)
    assert shell.json("preflight", path, "--python", sys.executable)["python"] == sys.executable


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"numpy==2\n", "it is no lock file of xcache"),
        (b"xcache lock 7\n", "its format is another one"),
        (b"xcache lock 1\n=======\n", "line 2 is not understood"),
        (b"\xff\xfe\x00", "it is no lock file of xcache"),
    ],
)
def test_a_file_that_is_none_is_wrong_usage(place, content, said):
    path = place.root / "run.lock"
    path.write_bytes(content)
    done = Shell(place).run("preflight", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert not place.dir.exists()


def test_no_file_no_daemon_and_an_empty_run(place, mine):
    shell = Shell(place)
    for path, said in ((place.root / "none", "No such file or directory"), (place.root, "Is a directory")):
        assert shell.say("preflight", str(path), code=2) == f"xcache: {path}: {said}\n"
    path = write(place, mine)
    assert "wants 0 programs" in shell.say("preflight", path)
    shell.say("stop")
    place.env["XCACHE_AUTOSTART"] = "0"
    said = Shell(place).run("preflight", path)
    assert (said.returncode, said.stdout) == (1, "") and "start one: xcache start" in said.stderr
    assert os.environ.get("XCACHE_AUTOSTART") is None
