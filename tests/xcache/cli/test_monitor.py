"""``xcache monitor`` with real daemons: in a pipe, and on terminals of several kinds and sizes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from support.command_line import LONG, Shell
from support.conversation import Conversation
from support.leasing import KEY, begin_to_wait, take
from support.terminal import on_terminal

from xcache.wire import protocol

MISS = [0, "jit_step", "train.py:1", "f32[8]", KEY, "miss", "other flags", "", "", "[]"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


@pytest.fixture
def busy(place):
    """A place where a program compiles and another connection of it waits."""
    place.start_daemon()
    with contextlib.closing(Conversation(place)) as holder, contextlib.closing(Conversation(place)) as waiter:
        for talk in (holder, waiter):
            talk.greet()
        take(holder)
        begin_to_wait(waiter)
        holder.ask(protocol.Report({"hits": 3, "misses": 1}))
        yield holder


def miss(talk: Conversation, **changes: object) -> None:
    row = dict(zip(("position", "module_name", "site", "shapes", "key", "outcome", "cause"), MISS, strict=False))
    fields = [*(row | changes).values(), "", "", "[]"]
    assert talk.ask(protocol.RecordRun("0123456789abcdef", 1.0, False, {}, [fields])) == protocol.Done()


class Lines:
    """The lines that a monitor prints into a pipe; each is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.all: list[str] = []
        # It prints for ever, so a test that waits in vain must not.
        self._alarm = threading.Timer(LONG, process.kill)
        self._alarm.start()

    def until(self, part: str) -> str:
        """Return the first of the next lines that has this part."""
        for line in self.process.stdout:
            self.all.append(line)
            if part in line:
                return line
        raise AssertionError(f"{part!r} is not in {self.all}, {self.process.stderr.read()}")

    def close(self) -> None:
        self._alarm.cancel()
        self._alarm.join()
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def monitoring(shell: Shell, *arguments: str):
    with contextlib.closing(Lines(shell.begin("monitor", *arguments, PYTHONUNBUFFERED="1"))) as lines:
        yield lines


# In a pipe.


def test_in_a_pipe_each_event_is_a_line(shell, busy):
    with monitoring(shell) as lines:
        assert "the daemon (process" in lines.until("holds 0 entries")
        mine = f"test.py ({os.getpid()})"
        lines.until(f"{mine}: connected")
        lines.until(f"{mine}: compiling jit_f")
        lines.until(f"{mine}: waiting for jit_f of process {os.getpid()}")
        miss(busy)
        lines.until(f"{mine}: miss of jit_step (other flags)")
        # The row comes again with its end, and is no other miss.
        miss(busy)
        busy.ask(protocol.Report({"hits": 2, "misses": 1}))
        lines.until(f"{mine}: hits +2, misses +1")
        assert "\x1b" not in "".join(lines.all)
        assert sum("jit_step" in line for line in lines.all) == 1


def test_a_program_that_ends_has_left(shell, busy, place):
    program = (
        "import sys; from support.conversation import Conversation; from support.places import Place; from pathlib"
        f" import Path; talk = Conversation(Place(Path({str(place.root)!r}))); talk.greet(); sys.stdin.read()"
    )
    with monitoring(shell) as lines:
        other = subprocess.Popen([sys.executable, "-c", program], env=place.with_support, stdin=subprocess.PIPE)
        assert lines.until(f"({other.pid}): connected")
        assert not any(f"({other.pid}): left" in line for line in lines.all)
        other.communicate(timeout=LONG)
        assert lines.until(f"({other.pid}): left")


def test_json_is_a_document_a_line(shell, busy):
    with monitoring(shell, "--json") as lines:
        first = json.loads(lines.until("{"))
        assert (first["running"], first["problem"], first["entries"]) == (True, None, 0)
        assert {row["kind"] for row in first["doing"]} == {"compiling", "waiting"}
        miss(busy)
        assert json.loads(lines.until("jit_step"))["missed"][0]["cause"] == "other flags"


def test_without_a_daemon_it_says_so_and_waits_for_one(shell, place):
    with monitoring(shell) as lines:
        said = lines.until("no daemon runs")
        assert str(place.dir) in said and "xcache start" in said
        assert not shell.held()
        daemon = place.start_daemon()
        lines.until(f"the daemon (process {daemon.pid}) holds")
        shell.say("stop")
        lines.until(f"the daemon (process {daemon.pid}) has left; waiting")
        place.start_daemon()
        lines.until("holds")
        # Said once each, however long it lasted.
        assert [line for line in lines.all if "holds" not in line].count(said) == 1
    with monitoring(shell, "--json") as lines:
        place.stop()
        gone = json.loads(lines.until('"running": false'))
        assert gone["problem"]
        assert (gone["entries"], gone["programs"]) == (None, [])


def test_once_needs_a_daemon_and_shows_this_moment(shell, busy, place):
    said = shell.run("monitor", "--once")
    assert (said.returncode, said.stderr) == (0, "")
    assert "compiling jit_f for" in said.stdout
    # What was found and missed before is not known.
    assert "hits/s" not in said.stdout
    assert "no miss yet" not in said.stdout
    assert shell.json("monitor", "--once")["connected"] == 1
    place.stop()
    failed = shell.run("monitor", "--once")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("xcache: no daemon runs for ")
    assert failed.stderr.count("\n") == 1


def test_ctrl_c_ends_a_pipe_quietly(shell, busy):
    with monitoring(shell) as lines:
        lines.until("holds")
        lines.process.send_signal(signal.SIGINT)
        assert lines.process.wait(LONG) == 0
        assert lines.process.stderr.read() == ""


def test_a_reader_that_goes_ends_it(shell, busy):
    with monitoring(shell, "--json") as lines:
        lines.until("{")
        lines.process.stdout.close()
        assert lines.process.wait(LONG) == 1
        assert lines.process.stderr.read() == ""
        lines.process.stdout = open(os.devnull)  # noqa: SIM115 - for communicate


# On a terminal.


def compiles(screen: list[str]) -> bool:
    return any("compiling jit_f for" in line for line in screen)


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (lambda terminal: terminal.type(b"q"), 0),
        (lambda terminal: terminal.type(b"\x03"), 0),
        (lambda terminal: terminal.send_signal(signal.SIGTERM), 143),
        (lambda terminal: terminal.send_signal(signal.SIGHUP), 129),
    ],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_whatever_ends_it_the_terminal_is_restored(shell, busy, leave, status):
    with on_terminal(shell.env, "monitor") as terminal:
        assert terminal.shows(compiles), terminal.text
        assert not terminal.is_restored
        leave(terminal)
        assert terminal.wait() == status
        assert terminal.is_restored
        assert "Traceback" not in terminal.text


def test_a_terminal_that_goes_away_ends_it(shell, busy):
    with on_terminal(shell.env, "monitor") as terminal:
        assert terminal.shows(compiles)
        terminal.hang_up()
        assert terminal._process.wait(LONG) in (0, 129)


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(shell, busy):
    with on_terminal(shell.env, "monitor") as terminal:
        assert terminal.shows(compiles)
        terminal.type(b"\x1a")
        assert terminal.is_stopped()
        assert terminal.shows(lambda _: terminal.is_restored)
        terminal.text = ""
        terminal.send_signal(signal.SIGCONT)
        assert terminal.shows(compiles)
        terminal.type(b"q")
        assert terminal.wait() == 0
        assert terminal.is_restored


def fits(screen: list[str], width: int, height: int) -> bool:
    fitting = max(map(len, screen)) <= width and len(screen) <= height
    return fitting and any("jit_long_" in line for line in screen)


@pytest.mark.parametrize("columns", [80, 40])
def test_it_fits_the_terminal_also_when_that_changes(shell, busy, columns):
    with on_terminal(shell.env, "monitor", columns=columns) as terminal:
        assert terminal.shows(compiles)
        miss(busy)
        miss(busy, position=1, module_name="jit_" + "long_" * 30)
        for width, height in ((columns, 24), (120 - columns, 12)):
            terminal.resize(width, height)
            assert terminal.shows(lambda screen, size=(width, height): fits(screen, *size)), terminal.screen
            screen = terminal.screen
            for part in ("q leaves", "compiling jit_f for", "waiting for jit_f of", "other flags", "20 GiB", "hits/s"):
                assert any(part in line for line in screen), (part, screen)


def test_without_colours_nothing_is_coloured(shell, busy):
    with on_terminal(shell.env, "monitor", NO_COLOR="1") as plain, on_terminal(shell.env, "monitor") as coloured:
        assert plain.shows(compiles)
        assert coloured.shows(compiles)
        assert not COLOUR.search(plain.text)
        assert COLOUR.search(coloured.text)


@pytest.mark.parametrize("kind", ["dumb", ""])
def test_a_terminal_that_can_only_append_gets_a_line_for_each_event(shell, busy, kind):
    with on_terminal(shell.env, "monitor", TERM=kind) as terminal:
        assert terminal.shows(lambda screen: any(line.endswith("compiling jit_f") for line in screen))
        assert "\x1b" not in terminal.text
        terminal.type(b"\x03")
        assert terminal.wait() == 0


def test_an_ascii_terminal_gets_no_other_characters(shell, busy):
    with on_terminal(shell.env, "monitor", PYTHONIOENCODING="ascii") as terminal:
        assert terminal.shows(compiles)
        miss(busy, module_name="jit_" + "naïve_" * 30)
        assert terminal.shows(lambda screen: any("jit_na?ve" in line for line in screen))
        assert terminal.text.isascii()


def test_the_screen_says_that_the_daemon_has_gone_and_shows_the_next_one(shell, place):
    place.start_daemon()
    with on_terminal(shell.env, "monitor") as terminal:
        assert terminal.shows(lambda screen: any("no program is connected" in line for line in screen))
        place.stop()
        assert terminal.shows(lambda screen: any("waiting" in line and "daemon" in line for line in screen))
        daemon = place.start_daemon()
        assert terminal.shows(lambda screen: any(f"daemon {daemon.pid}" in line for line in screen))
        terminal.type(b"q")
        assert terminal.wait() == 0


def test_a_wrong_setting_is_one_sentence(shell):
    with on_terminal(shell.env, "monitor", XCACHE_TIMEOUT="never") as terminal:
        assert terminal.wait() == 2
        assert "XCACHE_TIMEOUT='never'" in terminal.text
        assert terminal.is_restored


def test_a_daemon_that_cannot_be_used_is_one_sentence_on_a_restored_terminal(shell, place, tmp_path):
    place.start_daemon()
    (tmp_path / "daemon.lock").touch()
    with on_terminal(shell.env, "monitor", XCACHE_DIR=str(tmp_path)) as terminal:
        assert terminal.wait() == 2
        assert terminal.is_restored
        assert "serves" in terminal.text.rpartition("\x1b[?1049l")[2]
        assert "Traceback" not in terminal.text
