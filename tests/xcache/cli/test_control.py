"""The commands that start and stop a daemon, and those that only a daemon carries out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.command_line import LONG, names
from support.places import until

from xcache.config.table import LIMITS
from xcache.wire import commands, framing, protocol


def test_start_stop_and_status(shell):
    assert shell.json("status")["running"] is False
    started = shell.json("start")
    assert started["started"] is True
    again = shell.run("start")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"already running: process {started['pid']}" in again.stdout
    found = shell.json("status")
    assert (found["running"], found["pid"], found["problem"]) == (True, started["pid"], None)
    assert found["connections"] == 0
    assert found["uptime_seconds"] >= 0
    assert shell.json("stop") == {"stopped": True, "pid": started["pid"]}
    assert not shell.held()
    assert shell.json("stop") == {"stopped": False, "pid": None}
    assert "no daemon was running" in shell.say("stop")


def test_one_of_many_simultaneous_starts_starts_the_daemon(shell):
    starting = [shell.begin("start", "--json") for _ in range(5)]
    said = [json.loads(process.communicate(timeout=LONG)[0]) for process in starting]
    assert sorted(one["started"] for one in said) == [False, False, False, False, True]
    assert len({one["pid"] for one in said}) == 1


def test_restart_gives_another_daemon_with_new_settings(shell):
    shell.env["XCACHE_MAX_SIZE"] = "1G"
    first = shell.json("restart")
    assert first["stopped_pid"] is None
    shell.env["XCACHE_MAX_SIZE"] = "2G"
    assert shell.json("status")["max_size"] == 2**30
    second = shell.json("restart")
    assert second["stopped_pid"] == first["pid"] != second["pid"]
    assert shell.json("status")["max_size"] == 2 * 2**30
    assert "'xcache restart'" in (shell.directory / "daemon.log").read_text()


def test_a_daemon_that_cannot_start_says_why(shell):
    shell.put("jit_f")
    shell.say("stop")
    shell.change("PRAGMA user_version = 99")
    failed = shell.run("start")
    assert failed.returncode == 1
    assert failed.stderr.startswith("xcache: the daemon did not start: ")
    assert "newer xcache" in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_the_machines_daemon_is_nobodys_to_start(place, shell):
    """One that root or a user started would serve nobody, and its store would be in the way of the right one."""
    for command in ("start", "restart"):
        failed = shell.run(command, XCACHE_DAEMON_USER="54321")
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        for way in ("systemctl start xcached.socket", "its container", "runuser -u 54321 -- xcached"):
            assert way in failed.stderr
    by_hand = place.daemon(XCACHE_DAEMON_USER="54321")
    assert by_hand.wait(LONG) == 1
    assert "would serve nobody" in place.said()
    # A store that a container does not see is not empty.
    for command in (("ls",), ("clear", "--yes")):
        assert "the store is empty" not in shell.run(*command, XCACHE_DAEMON_USER="54321").stdout
    assert not place.dir.exists()


@pytest.mark.parametrize("arguments", [("status",), ("stop",), ("start",), ("restart",), ("clear", "--yes")])
def test_a_daemon_that_does_not_answer_is_one_line_and_no_wait(shell, arguments):
    shell.put("jit_f")
    pid = shell.json("status")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        result = shell.run(*arguments, XCACHE_TIMEOUT="300ms")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert result.returncode == 1
    assert "does not answer" in result.stderr
    assert arguments == ("status",) or f"to end it: kill -9 {pid} " in result.stderr
    assert result.stderr.startswith("xcache: ")
    assert result.stderr.count("\n") == 1


def test_reading_does_without_a_daemon_that_does_not_answer(shell):
    shell.put("jit_f")
    pid = shell.json("status")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        result = shell.run("ls", "--json", XCACHE_TIMEOUT="300ms")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert result.returncode == 0
    assert names(json.loads(result.stdout)) == ["jit_f"]
    assert "the latest uses may be missing" in result.stderr


def test_a_daemon_of_another_store_is_left_alone(shell, tmp_path):
    shell.put("jit_f")
    other = str(tmp_path / "other")
    for command in ("stop", "stats", "start"):
        result = shell.run(command, XCACHE_DIR=other)
        assert (result.returncode, result.stdout) == (2, "")
        assert "XCACHE_SOCKET" in result.stderr
    # A program gets what this daemon has.
    found = shell.run("status", "--json", XCACHE_DIR=other)
    document = json.loads(found.stdout)
    assert (found.returncode, document["running"], document["directory"]) == (1, True, str(shell.directory))
    assert document["entries"] == 1
    assert "programs use it all the same" in document["problem"]
    assert "the store is empty" in shell.run("clear", "--yes", XCACHE_DIR=other).stdout
    assert names(shell.json("ls")) == ["jit_f"]


def test_a_store_that_had_a_daemon_does_not_hide_that_programs_use_another(shell, tmp_path):
    other = tmp_path / "other"
    # The one that made this store listened elsewhere, and has left.
    elsewhere = {"XCACHE_DIR": str(other), "XCACHE_SOCKET": shell.env["XCACHE_SOCKET"] + "2"}
    assert shell.run("start", **elsewhere).returncode == shell.run("stop", **elsewhere).returncode == 0
    assert (other / protocol.LOCK).exists()
    shell.json("start")
    found = shell.run("status", "--json", XCACHE_DIR=str(other))
    document = json.loads(found.stdout)
    assert (found.returncode, document["running"], document["directory"]) == (1, True, str(shell.directory))
    for command in ("stop", "ls", "stats"):
        refused = shell.run(command, XCACHE_DIR=str(other))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("xcache: nothing was done: the daemon on ")
    assert shell.json("status")["running"] is True


def test_looking_starts_no_daemon_where_a_service_manager_listens(shell, place):
    """The manager's daemon has left its address in the lock file; a connection would start the next one."""
    place.dir.mkdir(mode=0o700)
    lock = place.dir / protocol.LOCK
    lock.touch()
    lock.write_text(f"1 {lock.stat().st_ino}\n{place.socket}")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as manager:
        manager.bind(str(place.socket))
        manager.listen()
        manager.setblocking(False)
        assert shell.json("status")["running"] is False
        assert "no daemon was running" in shell.say("stop")
        with pytest.raises(BlockingIOError):
            manager.accept()


def test_a_store_whose_daemon_listens_elsewhere(shell, tmp_path):
    shell.put("jit_f")
    elsewhere = shell.env["XCACHE_SOCKET"] + "2"
    result = shell.run("start", XCACHE_SOCKET=elsewhere)
    assert (result.returncode, result.stderr) == (0, "")
    assert "already running" in result.stdout
    assert shell.run("stop", XCACHE_SOCKET=elsewhere).returncode == 0
    assert "not running" in shell.run("status", XCACHE_SOCKET=elsewhere).stdout


@contextlib.contextmanager
def daemon_of_another_time(shell):
    """Something on the socket that speaks a protocol of the future, and knows only Hello and Stop."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(shell.env["XCACHE_SOCKET"])
    listener.listen()
    listener.settimeout(LONG)
    stopped = threading.Event()

    def serve():
        while not stopped.is_set():
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LONG)
                reader = framing.FrameReader()
                while data := connection.recv(65536):
                    for request, message in reader.feed(data):
                        answer = protocol.Welcome(99, "9.9.9", os.getpid(), str(shell.directory))
                        if isinstance(message, commands.Stop):
                            answer = protocol.Done()
                            stopped.set()
                        connection.sendall(framing.encode(request, answer))
                    if stopped.is_set():
                        break
        listener.close()
        Path(shell.env["XCACHE_SOCKET"]).unlink()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    assert stopped.is_set()
    thread.join(LONG)


def test_a_daemon_of_another_version_can_be_replaced(shell):
    with daemon_of_another_time(shell):
        found = shell.run("status")
        assert found.returncode == 1
        assert "version 99 of the protocol" in found.stderr
        assert "xcache restart" in found.stderr
        assert shell.run("stats", "--zero").returncode == 1
        assert shell.json("restart")["stopped_pid"] == os.getpid()
    assert shell.json("status")["running"] is True


def test_removing(shell):
    made = [shell.put(f"jit_{number}") for number in range(4)]
    shell.say("stop")
    assert "no entry begins with" in shell.say("rm", made[0], "0" * 64, code=1)
    assert not shell.held()
    gone = shell.json("rm", made[0][:20], made[0], made[1])
    assert gone["removed"] == 2
    assert gone["bytes"] > 0
    assert gone["keys"] == made[:2]
    assert shell.json("status")["running"] is True
    assert set(names(shell.json("ls"))) == {"jit_2", "jit_3"}
    said = shell.say("rm", made[2][:4]).splitlines()
    assert said[0].startswith("removed 1 entry")
    assert said[1:] == [f"  {made[2][:12]}  jit_2"]


def test_what_was_removed_or_pinned_is_named_if_it_is_little(shell):
    made = {shell.put(f"jit_{number}"): f"jit_{number}" for number in range(11)}
    first, *_ = made
    line = f"  {first[:12]}  jit_0"
    for command in ("pin", "unpin"):
        assert shell.say(command, first).splitlines()[1:] == [line]
        assert len(shell.say(command, *made).splitlines()) == 1
    assert len(shell.say("rm", *made).splitlines()) == 1


def test_clearing_asks_first(shell):
    for number in range(3):
        shell.put(f"jit_{number}")
    unasked = shell.run("clear")
    assert unasked.returncode == 1
    assert unasked.stdout == ""
    assert "Remove 3 entries" in unasked.stderr
    shell.say("clear", answer="n\n", code=1)
    assert shell.json("status")["entries"] == 3
    assert "removed 3 entries" in shell.say("clear", answer="y\n")
    shell.put("jit_f")
    assert shell.json("clear", "--yes")["removed"] == 1
    assert shell.json("status")["bytes"] == 0


def test_where_daemons_do_not_start_by_themselves(shell):
    key = shell.put("jit_f")
    shell.say("stop")
    shell.env["XCACHE_AUTOSTART"] = "0"
    for command in (["rm", key], ["clear", "--yes"], ["stats", "--zero"]):
        assert "xcache start" in shell.say(*command, code=1)
    assert not shell.held()
    assert shell.json("start")["started"] is True
    assert shell.json("rm", key)["removed"] == 1


def test_a_setting_that_the_daemon_refuses_as_well_is_told_once(shell, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("")
    shell.env["XCACHE_CONFIG"] = str(file)
    shell.json("start")
    file.write_text("max_size = 'lots'\n")
    assert until(lambda: json.loads(shell.run("status", "--json").stdout)["configuration_problem"])
    (told,) = shell.run("status").stderr.splitlines()
    assert "programs run without the cache, and the daemon keeps its former settings: max_size='lots'" in told


def test_a_guard_that_cannot_be_understood_is_said_to_stop_programs(shell):
    shell.env["XCACHE_ON_MISS"] = "forbid"
    assert "programs stop at their first compile: XCACHE_ON_MISS='forbid'" in shell.run("status").stderr
    checks = json.loads(shell.run("doctor", "--no-compile", "--json").stdout)["checks"]
    (told,) = [each["advice"] for each in checks if each["name"] == "settings"]
    assert told == "Programs stop at their first compile until this is corrected."


def test_settings_that_cannot_be_used_keep_nobody_from_seeing_and_stopping_the_daemon(shell, tmp_path):
    pid = shell.json("start")["pid"]
    file = tmp_path / "config.toml"
    for content, problems in (("max_size = 'lots'\nmax_age = '9d'\nnonsense = 1\n", 2), ("no toml", 1)):
        file.write_text(content)
        shell.env["XCACHE_CONFIG"] = str(file)
        found = json.loads(shell.run("status", "--json").stdout)
        assert (found["running"], found["pid"], len(found["settings_problems"])) == (True, pid, problems)
        said = shell.run("status")
        assert said.returncode == 0
        assert said.stderr.count("programs run without the cache") == problems
        assert shell.run("restart").returncode == 2
    # An account is missed only when it is looked for.
    file.write_text("daemon_user = 'no-such-one'\n")
    found = json.loads(shell.run("status", "--json").stdout)
    assert (found["running"], found["pid"]) == (True, pid)
    assert f"daemon_user='no-such-one' ({file}) cannot be used" in found["settings_problems"][0]
    stopped = shell.run("stop", "--json", XCACHE_MAX_ENTRIES="many")
    assert json.loads(stopped.stdout) == {"stopped": True, "pid": pid}
    assert "XCACHE_MAX_ENTRIES" in stopped.stderr
    # The unreadable file may have named another store.
    none = shell.run("stop", XCACHE_MAX_ENTRIES="many")
    assert (none.returncode, none.stdout.count(str(shell.directory))) == (1, 1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, who may stop the daemon of another account")
def test_a_daemon_that_nobody_could_start_again_is_not_restarted(shell):
    pid = shell.json("start")["pid"]
    done = shell.run("restart", XCACHE_DAEMON_USER="daemon")
    assert done.returncode == 1
    assert f"process {pid} was started by hand, as 'daemon'" in done.stderr
    assert shell.json("status")["pid"] == pid


def test_status_names_the_socket_and_the_log_of_the_daemon(shell, place):
    assert shell.json("status")["log"] is None
    shell.json("start")
    assert shell.json("status")["log"] == str(place.dir / "daemon.log")
    assert str(place.dir / "daemon.log") in shell.say("status")
    there = str(place.socket)
    assert shell.json("status")["socket"] == there
    shell.env["XCACHE_SOCKET"] = f"{there}-elsewhere"
    found = shell.json("status")
    assert (found["running"], found["socket"]) == (True, there)
    shell.json("stop")
    assert shell.json("status")["socket"] == f"{there}-elsewhere"


def test_gc_says_that_a_limit_of_its_own_is_none(shell):
    shell.json("start")
    assert shell.run("gc").stderr == ""
    own = {"max_size": "20K", "max_entries": "7", "max_age": "3d", "min_free": "7%", "user_quota": "1M"}
    own["max_ledger"] = "2M"
    assert set(own) == set(LIMITS)
    said = shell.run("gc", **{f"XCACHE_{name.upper()}": value for name, value in own.items()}).stderr
    for name in own:
        assert f"XCACHE_{name.upper()}" in said
    assert "do not count: the daemon runs with" in said
