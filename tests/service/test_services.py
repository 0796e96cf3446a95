"""The service under a real systemd: a user's and the machine's, through everything that can happen to them."""

from __future__ import annotations

import re

import pytest
from support.machine import booted, why_not
from support.marks import thorough
from support.places import until
from support.services import (
    DAMAGES,
    NEWER,
    NEWER_STORE,
    OTHER,
    PUTS_AND_STOPS,
    TALK,
    USER,
    Service,
    files,
    furnish,
    pip_install,
    shown,
)

from xcache import __version__

pytestmark = pytest.mark.slow
either = pytest.mark.parametrize("kind", thorough(("user", "system"), usual=("system",)))


@pytest.fixture(scope="module")
def machine():
    # Before anything is built for it.
    if reason := why_not():
        pytest.skip(f"no systemd can be booted here: {reason}")
    with booted(shown()) as made:
        furnish(made)
        yield made


@pytest.fixture
def service(machine, kind):
    made = Service(machine, kind)
    yield made
    made.clean()


@either
def test_the_whole_life_of_a_service(machine, service):
    """Install twice, first use, kill, stop, uninstall; a program with jax finds what it stored all the while."""
    before, accounts = files(machine), machine.read("/etc/passwd") + machine.read("/etc/group")
    first = service.install()
    assert "wrote " in first
    assert f"checked: process {service.main_pid()}, xcache {__version__}, serves {service.directory}" in first
    pid = service.main_pid()
    again = service.install()
    assert again.startswith("everything is as it should be\n")
    assert service.main_pid() == pid
    # systemd does not notice that somebody removed the socket.
    machine.run("rm", service.socket)
    assert service.json("service", "status", f"--{service.kind}", code=1)["listening"] is False
    assert "started xcached.socket" in service.install()
    # The first who asks starts it: not by itself, and nothing beside it.
    service.systemctl("stop", "xcached.service")
    assert service.daemons() == []
    assert service.json("service", "status", f"--{service.kind}") | {"says": ""} == {
        "scope": service.kind,
        "installed": True,
        "enabled": True,
        "listening": True,
        "running": False,
        "pid": None,
        "restarts": 0,
        "says": "",
        "socket": service.socket,
        "directory": service.directory,
        "units": [
            f"{service.drop_in.rpartition('/')[0].rpartition('/')[0]}/xcached.{end}" for end in ("socket", "service")
        ],
    }
    assert service.daemons() == []
    assert service.program() == "7.0 0 1"
    assert service.daemons() == [service.main_pid()]
    assert service.program() == "7.0 1 0"
    killed = service.main_pid()
    machine.run("kill", "-9", str(killed))
    assert until(lambda: service.main_pid() not in (0, killed))
    assert service.program() == "7.0 1 0"
    assert service.daemons() == [service.main_pid()]
    assert service.show("NRestarts") == "1"
    said = service.xcache("service", "uninstall", f"--{service.kind}").stdout
    assert f"kept the store {service.directory}" in said
    assert service.daemons() == []
    assert {line for line in files(machine) - before if service.directory not in line} == set()
    assert "removed the store" in service.uninstall()
    assert service.uninstall().startswith("nothing was installed\n")
    assert files(machine) == before
    assert machine.read("/etc/passwd") + machine.read("/etc/group") == accounts
    assert service.xcache("service", "status", f"--{service.kind}", code=1).stdout.startswith("service   not installed")


@either
def test_clients_that_come_at_once_activate_one_daemon(machine, service):
    service.install()
    service.systemctl("stop", "xcached.service")
    environment = {"PYTHONPATH": "/opt/tests", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["/opt/xcache/bin/python", "-c", TALK]
    programs = [machine.begin(*command, key, user=USER, **environment) for key in "0123456789"]
    said = [program.communicate(timeout=60) for program in programs]
    assert {line for line, _ in said} == {f"stored {service.main_pid()}\n"}, said
    assert service.daemons() == [service.main_pid()]


@pytest.mark.thorough
@either
def test_a_daemon_that_hangs_is_restarted(machine, service):
    service.install()
    service.override("WatchdogSec=1s")
    service.systemctl("stop", "xcached.service")
    _, pid = service.talk("a")
    machine.run("kill", "-STOP", str(pid))
    assert until(lambda: service.main_pid() not in (0, pid)), machine.log()
    assert service.talk("a") == ("found", service.main_pid())
    # And one that is well is let be.
    assert not until(lambda: service.show("NRestarts") != "1", 3.0)


@pytest.mark.thorough
@either
def test_a_change_of_the_settings_takes_effect_and_one_that_is_wrong_is_refused(machine, service):
    service.install()
    _, pid = service.talk("a")
    service.configure('max_size = "3G"')
    assert until(lambda: service.json("status")["max_size"] == 3 * 2**30)
    service.configure('max_size = "lots"')
    assert service.says("refused: max_size='lots' .*must be a size")
    assert "keeps its former settings: max_size='lots'" in service.xcache("status", code=None).stderr + machine.run(
        "journalctl", "--no-pager", "-o", "cat"
    ).stdout.replace("the settings were not changed", "keeps its former settings")
    service.configure('max_size = "4G"\nlog = "debug"')
    service.systemctl("reload", "xcached.service")
    assert service.show("ActiveState") == "active"
    assert service.says(r"serves .*connections?$")
    assert service.main_pid() == pid
    logged = [entry["MESSAGE"] for entry in service.journal()]
    assert any(line.startswith("setting changed: max_size: 21474836480 -> 3221225472") for line in logged), logged
    assert any(line.startswith("setting changed: log: warning -> debug") for line in logged), logged
    service.configure('dir = "/var/tmp/elsewhere"')
    assert service.says("dir cannot change from .* while the daemon runs; restart it")


@pytest.mark.thorough
@either
def test_metrics_are_served_on_a_socket_and_on_a_port_once_a_drop_in_allows_it(machine, service):
    path = service.socket.replace("xcached.sock", "metrics.sock")
    service.configure(f'metrics = "{path}"')
    service.install()
    reading = """
import socket, sys
port = sys.argv[1].isdigit()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) if port else socket.socket(socket.AF_UNIX) as made:
    port or made.connect(sys.argv[1])
    made.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
    with made.makefile("rb") as answer:
        print("xcache_store_entries 0.0" in answer.read().decode())
"""
    read = ("/opt/xcache/bin/python", "-c", reading)
    assert machine.run(*read, path).stdout == "True\n"
    assert machine.run(*read, path, user=OTHER, check=False).returncode == 1
    service.configure('metrics = "127.0.0.1:9464"')
    service.systemctl("restart", "xcached.service")
    assert "127.0.0.1:9464: Address family not supported by protocol; under systemd the unit has to" in machine.log()
    service.override("PrivateNetwork=no\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\nIPAddressAllow=localhost")
    service.systemctl("restart", "xcached.service")
    assert machine.run(*read, "9464").stdout == "True\n"


@pytest.mark.thorough
@either
def test_it_logs_to_the_journal_with_levels(machine, service):
    service.install()
    service.configure('max_size = "lots"')
    assert service.says("refused")
    levels = {entry["MESSAGE"]: entry["PRIORITY"] for entry in service.journal()}
    assert [priority for message, priority in levels.items() if " serves " in message] == ["6"]
    assert [priority for message, priority in levels.items() if message.startswith("the settings were not")] == ["3"]
    assert machine.run("ls", service.directory).stdout.split() == [
        "blobs", "daemon.lock", "quarantine", "reserve", "store.db", "store.db-shm", "store.db-wal",
    ]  # fmt: skip


@pytest.mark.thorough
@either
def test_xcache_is_upgraded_underneath(machine, service):
    service.install()
    what, old = service.talk("a")
    assert what == "stored"
    pip_install(machine, NEWER)
    try:
        # The running daemon goes on; the next one to start is the newer one.
        assert service.talk("a") == ("found", old)
        machine.run("kill", "-9", str(old))
        assert until(lambda: service.main_pid() not in (0, old))
        assert service.talk("a")[0] == "found"
        assert service.json("service", "install", f"--{service.kind}")["version"] == NEWER
    finally:
        pip_install(machine, "")
    # Back again: installing has the running one replaced.
    said = service.install()
    assert re.search(rf"stopped process \d+, which was xcache {NEWER}\n", said), said
    assert service.talk("a")[0] == "found"


@pytest.mark.thorough
@either
def test_it_leaves_when_idle_and_comes_back_when_asked(machine, service):
    service.install()
    service.configure('idle_exit = "1s"')
    assert until(lambda: service.main_pid() == 0 and not service.daemons())
    assert service.show("ActiveState", "xcached.socket") == "active"
    assert service.show("Result") == "success"
    # Looking whether it runs does not start it.
    if service.kind == "user":
        assert service.json("status")["running"] is False
        assert "no daemon was running" in service.xcache("stop").stdout
        assert service.daemons() == []
    service.configure('idle_exit = "60s"')
    assert service.talk("a")[0] == "stored"
    if service.kind == "user":
        assert "already running" in service.xcache("start").stdout
        assert service.json("stop")["stopped"] is True
        assert service.json("start")["started"] is True
    assert service.daemons() == [service.main_pid()]


@either
def test_a_stopped_service_finishes_the_requests_in_flight(machine, service):
    service.install()
    path = "/opt/tests"
    command = ["/opt/xcache/bin/python", "-c", PUTS_AND_STOPS]
    with machine.begin(*command, user=USER, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1") as program:
        said = program.stdout.readline()
        service.systemctl("stop", "xcached.service")
        rest, complaints = program.communicate(timeout=60)
    assert (said, rest) == ("sent\n", "answered\n"), complaints + machine.log()
    assert service.show("Result") == "success"
    assert service.daemons() == []


@pytest.mark.thorough
@either
def test_a_damaged_database_is_replaced_by_the_same_process(machine, service):
    """It executes itself again, with the socket and the lock in hand."""
    service.install()
    _, pid = service.talk("a")
    machine.run("/opt/xcache/bin/python", "-c", DAMAGES, f"{service.directory}/store.db")

    def met() -> bool:
        service.talk("b", check=False, XCACHE_TIMEOUT="2s")
        return bool(service.journal("--grep=restarting"))

    assert until(met), machine.log()
    assert until(lambda: service.show("ActiveState") == "active")
    assert until(lambda: service.talk("c", check=False) in (("stored", pid), ("found", pid)))
    assert service.main_pid() == pid
    assert service.show("NRestarts") == "0"
    # It is still told apart from one that hangs, and can be reloaded and stopped.
    service.systemctl("reload", "xcached.service")
    service.systemctl("stop", "xcached.service")
    assert service.show("Result") == "success"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_a_daemon_that_a_program_started_makes_way(machine, service):
    what, beside = service.talk("a")
    assert (what, service.daemons()) == ("stored", [beside])
    said = service.install()
    assert f"process {beside}, which served {service.directory}, has ended" in said
    assert service.talk("a") == ("found", service.main_pid())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_a_program_outside_of_the_session_finds_the_socket(machine, service):
    """A cron job has no XDG_RUNTIME_DIR, looks elsewhere, and must not start a second daemon beside the service's."""
    service.install()
    service.systemctl("stop", "xcached.service")
    assert service.talk("a", XDG_RUNTIME_DIR="") == ("stored", service.main_pid())
    assert service.daemons() == [service.main_pid()]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_the_service_takes_over_from_a_daemon_that_was_started_elsewhere(machine, service):
    service.install()
    service.systemctl("stop", "xcached.service", "xcached.socket")
    what, beside = service.talk("a", XDG_RUNTIME_DIR="")
    assert (what, service.main_pid()) == ("stored", 0)
    service.systemctl("start", "xcached.socket")
    assert service.talk("a") == ("found", service.main_pid())
    assert service.daemons() == [service.main_pid()]
    assert service.main_pid() != beside
    assert service.show("NRestarts") == "0"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_where_the_service_cannot_start_programs_do_without(machine, service):
    service.install()
    service.override("ExecStart=\nExecStart=/bin/false\n[Unit]\nStartLimitBurst=3")
    service.systemctl("stop", "xcached.service")
    command = ["/opt/xcache/bin/python", "-c", "import jax; print(jax.jit(lambda v: v * 3 + 1)(2.0))"]
    for _ in range(2):
        run = machine.run(*command, user=USER, XCACHE="1", JAX_PLATFORMS="cpu", XCACHE_TIMEOUT="500ms")
        assert run.stdout == "7.0\n"
    assert "does not answer" in service.xcache("service", "install", "--user", code=1).stderr or service.daemons()


@pytest.mark.parametrize("kind", ["system"])
def test_the_machines_daemon_serves_all_users_under_its_account(machine, service):
    service.install()
    assert service.talk("a", user=USER) == ("stored", service.main_pid())
    # A user gets no entry of another user who is not trusted.
    assert service.talk("a", user=OTHER)[0] == "stored"
    owner = machine.run("stat", "-c", "%U %a", service.directory).stdout
    assert owner == "xcache 700\n"
    assert machine.run("ps", "-o", "user=", "-p", str(service.main_pid())).stdout.strip() == "xcache"
    service.configure(f'trusted_writers = "u{USER}"')
    service.systemctl("reload", "xcached.service")
    service.talk("b", user=USER)
    assert service.talk("b", user=OTHER)[0] == "found"
    service.configure('trusted_writers = "nobody-of-this-name"')
    assert service.says("cannot be used: there is no account 'nobody-of-this-name'")
    assert service.talk("b", user=OTHER)[0] == "found"


@pytest.mark.parametrize("kind", ["system"])
def test_the_machines_daemon_sees_users_files_and_cannot_change_them(machine, service):
    """Users' environments can be looked at, and even what root would let it write cannot be written."""
    service.install()
    pid = service.main_pid()
    look = f"nsenter -t {pid} -m setpriv --reuid=xcache --clear-groups"
    home = f"/home/u{USER}"
    machine.run("sh", "-c", f"mkdir -p {home}/env && chmod 777 {home} {home}/env && touch {home}/env/f")
    machine.run("sh", "-c", "mkdir -m 777 /tmp/env && touch /tmp/env/f")
    for place in (f"/home/u{USER}/env", "/tmp/env"):
        machine.run("sh", "-c", f"{look} cat {place}/f")
        assert "Read-only" in machine.run("sh", "-c", f"LC_ALL=C {look} touch {place}/g", check=False).stderr
    assert machine.run("sh", "-c", f"{look} cat /proc/{pid}/stat").stdout
    machine.run("rm", "-rf", f"/home/u{USER}/env", "/tmp/env")
    machine.run("chmod", "755", home)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_one_that_cannot_start_says_why_and_is_well_when_that_is_put_right(machine, service):
    service.install()
    service.systemctl("stop", "xcached.service")
    change = ["/opt/xcache/bin/python", "-c", NEWER_STORE, f"{service.directory}/store.db"]
    right = machine.run(*change, "99", user=USER).stdout.strip()
    for _ in range(3):
        assert "newer xcache" in service.xcache("start", code=1).stderr
    assert service.says("cannot start: .*newer xcache")
    assert service.show("ActiveState", "xcached.socket") == "active"
    assert {entry["PRIORITY"] for entry in service.journal("--grep=newer xcache")} == {"3"}
    machine.run(*change, right, user=USER)
    service.install()
    assert service.talk("a") == ("stored", service.main_pid())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["user"])
def test_a_shell_with_folders_of_its_own(machine, service):
    """The service manager does not know of them."""
    home = machine.home(USER)
    elsewhere = {"XDG_CACHE_HOME": f"{home}/other/5% caches", "XDG_CONFIG_HOME": f"{home}/other/settings"}
    service.xcache("service", "install", "--user", **elsewhere)
    assert service.talk("a", **elsewhere) == ("stored", service.main_pid())
    assert service.daemons() == [service.main_pid()]
    service.xcache("service", "uninstall", "--user", "--purge", **elsewhere)
    assert machine.run("find", f"{home}/other", "-type", "f").stdout == ""
    machine.run("rm", "-r", f"{home}/other")
    # And what the manager knows of, as by ~/.config/environment.d, is known to programs that it starts.
    service.systemctl("set-environment", f"XCACHE_DIR={home}/other/a store")
    try:
        assert "knows nothing of it" in service.xcache("service", "install", "--user", XCACHE_DIR="/x").stderr
        assert service.talk("a", XCACHE_DIR=f"{home}/other/a store") == ("stored", service.main_pid())
        assert service.daemons() == [service.main_pid()]
        service.uninstall()
    finally:
        service.systemctl("unset-environment", "XCACHE_DIR")
    machine.run("rm", "-r", f"{home}/other")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["system"])
def test_the_machines_store_may_be_elsewhere_and_nobodys_own_is_in_its_way(machine, service):
    own = Service(machine, "user")
    own.install()
    machine.write(service.config, 'dir = "/srv/big disk/store"\n')
    service.install()
    assert service.talk("a") == ("stored", service.main_pid())
    assert machine.run("stat", "-c", "%U %a", "/srv/big disk/store").stdout == "xcache 700\n"
    assert "one daemon for all users" in own.xcache("service", "install", "--user", code=2).stderr
    assert "removed " in own.uninstall()
    assert service.daemons() == [service.main_pid()]
    # Where the machine does not start it, nobody does.
    service.systemctl("stop", "xcached.socket", "xcached.service")
    assert "nobody listens on /run/xcache/xcached.sock" in service.xcache("start", code=1).stderr
    assert service.daemons() == []
    assert "removed the store /srv/big disk/store" in service.uninstall()
    machine.run("rmdir", "/srv/big disk")


def test_where_there_is_no_service_manager_nothing_is_done(machine):
    before, accounts = files(machine), machine.read("/etc/passwd")
    command = "mount -t tmpfs tmpfs /run && xcache service install --system"
    run = machine.run("unshare", "-m", "sh", "-c", command, check=False)
    assert run.returncode == 1 and "no systemd running" in run.stderr, run.stderr
    run = machine.run("xcache", "service", "install", "--user", user=USER, XDG_RUNTIME_DIR="/tmp", check=False)
    assert run.returncode == 1 and "systemctl --user show-environment: Failed to connect" in run.stderr, run.stderr
    assert (files(machine), machine.read("/etc/passwd")) == (before, accounts)


def test_a_user_cannot_install_for_the_machine_and_others_files_stay(machine):
    service = Service(machine, "user")
    assert "--system is for root" in service.xcache("service", "install", "--system", code=2).stderr
    unit = f"{machine.home(USER)}/.config/systemd/user/xcached.service"
    machine.write(unit, "[Service]\nExecStart=/bin/true\n", user=USER)
    try:
        assert "was not written by xcache" in service.xcache("service", "install", "--user", code=1).stderr
        assert "was not written by xcache and stays" in service.xcache("service", "uninstall", "--user").stderr
        assert machine.read(unit) == "[Service]\nExecStart=/bin/true\n"
    finally:
        service.clean()
