"""Every text in a store, and every text that a process tells the daemon, is another user's: none steers a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3

import pytest
from click.testing import CliRunner
from support.command_line import NAMES
from support.conversation import talking
from support.places import get_message
from support.terminal import on_terminal

from xcache.cli import main, writers

# It renames the window, moves the cursor by one character, blinks, rings, and turns the order of what follows around.
STEERING = "\x1b]0;owned\x07\x9b2J\x1b[5m\r\u202e"
# What click and rich write on a terminal for bold and for colours.
_STYLES = re.compile(r"\x1b\[(0|1|2|3\d|1;3\d)?m")
# These columns name rows and are looked up; a daemon takes only digests in them, or writes the value itself.
_NAMING = re.compile(
    r"key|digest|blob|.*_component|run|structure|seal|toolchain|state|file|files|kind|tier|program|cause|outcome|stored"
)

# What no command of this test makes.
_ROWS = (
    "INSERT INTO toolchains (digest, platform, jaxlib_version, description, first_seen)"
    " SELECT toolchain_component, 'cpu', '0.1', 'text', 1.0 FROM entries LIMIT 1",
    "INSERT INTO installations (toolchain, uid, place, files, state, seen_at)"
    " SELECT toolchain_component, 0, '/place', '[]', 'here', 1.0 FROM entries LIMIT 1",
    "INSERT INTO quarantined (key, writer_uid, module_name, platform, device_kind, jaxlib_version, compile_seconds,"
    " created_at, stored_size, blob, reason, set_aside_at)"
    " SELECT key, 0, 'jit_q', 'cpu', 'cpu', '0.1', 1.0, 1.0, 1, blob, 'why', 1.0 FROM entries LIMIT 1",
)


@pytest.fixture
def altered(place, shell):
    """A store in which all texts that people chose could steer a terminal, and a daemon that serves it."""
    key = shell.put("jit_f")
    shell.put("jit_other", platform="gpu")
    shell.record_run(key, run="0123456789abcdef", facts={"host": "there"})
    shell.record_run(key, run="fedcba9876543210", module_name="jit_g")
    shell.report({"uncacheable:reason": 1.0, "errors:kind": 1.0, "lowerings:why": 2.0, "calls:why": 2.0, "causes:x": 1})
    shell.say("invalidate", "--jaxlib", "0.0.1")
    shell.say("stop")
    with contextlib.closing(sqlite3.connect(shell.directory / "store.db")) as database:
        for sql in _ROWS:
            database.execute(sql)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[2].upper() == "TEXT"]
            for column in columns:
                if not _NAMING.fullmatch(column) and not table.startswith(("_", "sqlite", "totals")):
                    known = " WHERE name LIKE '%:%'" if table == "statistics" else ""
                    sql = f"UPDATE {table} SET {column} = {column} || ?{known}"  # noqa: S608 - its own names
                    with contextlib.suppress(sqlite3.IntegrityError):
                        database.execute(sql, (STEERING,))
        database.execute("UPDATE runs SET program = program || ?", (STEERING,))
        database.execute("UPDATE ledger SET cause = 'new: ' || ?", (STEERING,))
        database.commit()
    shell.say("start")
    with talking(place, named=f"program{STEERING}") as talk:
        talk.ask(get_message("cd" * 32, 60.0)._replace(module_name=f"jit_h{STEERING}"))
        shell.key = key
        yield shell


@pytest.mark.slow
def test_no_command_lets_a_text_steer_the_terminal(altered, tmp_path):
    key, other = altered.key[:12], tmp_path / "x.xcb"
    arguments = {
        **{name: [key] for name in ("show", "pin", "unpin", "rm", "hlo --stage stablehlo", "graph", "cost")},
        "run": ["last"],
        "compare": ["01234567", "fedcba98"],
        "trace": ["-o", "-"],
        "report": ["-o", str(tmp_path / "x.html")],
        "monitor": ["--once"],
        "export": ["-o", str(other)],
        "import": [str(other)],
        "bundle inspect": [str(other)],
        "bundle verify": [str(other)],
        "prebuild": ["json:loads", str(other)],
        "preflight": [str(other)],
        "key trust": [str(other)],
        "invalidate": ["--jaxlib", "0.10"],
        "clear": ["--yes"],
        "key new": ["me"],
        "key revoke": ["ab" * 8],
        "ls": [],
        "remote rm": [key],
        "ls --quarantined": [],
        "rewarm": ["--dry-run"],
    }
    # What ends the daemon, or empties the store, comes last.
    last = ("rm", "invalidate", "clear", "import", "restart", "stop", "start")
    names = [*(name for name in NAMES if name not in last), "ls --quarantined", "hlo --stage stablehlo", *last]
    shown = {name: said(altered, *name.split(), *arguments.get(name, [])) for name in names}
    for name, text in shown.items():
        assert steering_in(text) == set(), (name, text)
    # The texts are there.
    for name in ("status", "stats", "ls", "show", "runs", "run", "why", "toolchains", "ls --quarantined", "monitor"):
        assert "owned" in shown[name], (name, shown[name])


def test_a_live_view_lets_no_text_steer_the_terminal(altered):
    with on_terminal(altered.env, "monitor", columns=150, rows=40) as terminal:
        assert terminal.shows(lambda lines: any("owned" in line for line in lines))
        terminal.type(b"q")
        terminal.wait()
        assert not {"\x07", "\x9b", "\u202e"} & {*terminal.text}
        assert "\x1b[5m" not in terminal.text
        assert "\x1b]" not in terminal.text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "show"])
def test_what_is_no_text_is_not_written_to_a_terminal(altered, command):
    arguments = {"report": ["-o", "-"], "show": [altered.key, "--program-bytes", "-"]}[command]
    with on_terminal(altered.env, command, *arguments) as terminal:
        assert terminal.wait() == 2
        assert "not for a terminal" in terminal.text


def said(shell, *arguments: str) -> str:
    """Return what a command prints, as on a terminal that has colours."""
    for remembered in (writers.writer_name, writers.trusted_signers, writers._keys):
        remembered.cache_clear()
    others = {name: None for name in os.environ if name.startswith("XCACHE")}
    result = CliRunner().invoke(main, arguments, env=others | shell.env, color=True)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    return result.output


def steering_in(text: str) -> set[str]:
    return {c for c in _STYLES.sub("", text) if not c.isprintable() and c not in "\n\t"}
