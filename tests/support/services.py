"""The service of a user or of the machine, installed from a wheel, under a real systemd."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from support.machine import Machine
from support.places import REPOSITORY, until
from support.program_files import program_text

USER, OTHER = 2001, 2002
NEWER = "99.0.0"
# A program that stores something, and finds it; what it prints is the daemon's process.
TALK = program_text("store_or_find")
PROGRAM = """
import jax, xcache
result = float(jax.jit(lambda v: v * 3 + 1)(2.0))
counted = xcache.stats()
print(result, counted.hits, counted.misses)
"""
# A program with much in flight.
PUTS_AND_STOPS = program_text("put_until_hung_up")
# Damages a database.
DAMAGES = """
import contextlib, os, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1], isolation_level=None)) as database:
    # A commit makes other connections drop their cached pages.
    database.execute("INSERT INTO statistics VALUES ('hits', 1) ON CONFLICT (name) DO UPDATE SET amount = amount + 1")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
with open(sys.argv[1], "r+b") as file:
    file.seek(4096)
    file.write(os.urandom(os.path.getsize(sys.argv[1]) - 4096))
"""
# Gives a database another version, and prints the one it had.
NEWER_STORE = """
import contextlib, sqlite3, sys
with contextlib.closing(sqlite3.connect(sys.argv[1], isolation_level=None)) as database:
    print(database.execute("PRAGMA user_version").fetchone()[0])
    database.execute(f"PRAGMA user_version = {sys.argv[2]}")
"""


@functools.cache
def wheel(version: str) -> Path:
    """Build a wheel of this tree as ``version``; empty keeps its own."""
    folder = Path(tempfile.mkdtemp(prefix="xcache-wheel-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder)
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "dist", "build")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    if version:
        (source / "xcache" / "_version.py").write_text(f'"""The version."""\n\n__version__ = "{version}"\n')
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, timeout=300)
    shutil.rmtree(source)
    (built,) = folder.glob("*.whl")
    return built


def furnish(machine: Machine) -> None:
    """Install xcache in /opt/xcache, and add two users."""
    # The interpreter may be in root's home; changes there stay inside the machine.
    for folder in Path(sys.base_prefix).resolve().parents:
        machine.run("chmod", "a+x", str(folder))
    machine.run(sys._base_executable, "-m", "venv", "--without-pip", "/opt/xcache")
    site = machine.run("/opt/xcache/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout
    machine.write(f"{site.strip()}/packages.pth", "/opt/packages\n")
    pip_install(machine, "")
    machine.add_user(USER)
    machine.add_user(OTHER)


def shown() -> dict[Path, str]:
    """Return the host's folders that such a machine sees."""
    # It sees the file system of / by itself, and no other that is mounted within.
    base = Path(sys.base_prefix).resolve()
    elsewhere = {base: str(base)} if base.stat().st_dev != Path("/").stat().st_dev else {}
    return elsewhere | {
        Path(sysconfig.get_path("purelib")): "/opt/packages",
        REPOSITORY / "tests": "/opt/tests",
        wheel("").parent: "/opt/wheels",
        wheel(NEWER).parent: "/opt/newer",
    }


def pip_install(machine: Machine, version: str) -> None:
    """Upgrade as a user does."""
    built = f"/opt/{'newer' if version else 'wheels'}/{wheel(version).name}"
    options = [
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
    ]
    machine.run("/opt/xcache/bin/python", "-m", "pip", "install", "-q", *options, built, PYTHONDONTWRITEBYTECODE="1")


def files(machine: Machine) -> set[str]:
    """List every file that an installation could leave, with owner and mode."""
    places = ["/etc", "/home", "/opt/xcache", "/run", "/tmp", "/var/cache", "/var/lib", "/var/tmp", "/root/.cache"]
    # Every machine keeps writing these: the journal, the transient state of units, and the accounts' backups.
    passed_over = re.compile(
        r"^/(run/(log|systemd|credentials|user/\d+/systemd)|etc/[a-z]+-$|etc/\.pwd|opt/.*__pycache__)"
    )
    # A program keeps these for itself beside a machine's store.
    machine.run("rm", "-f", f"{machine.home(USER)}/.cache/xcache/library-digests.json")
    machine.run("rmdir", "--ignore-fail-on-non-empty", f"{machine.home(USER)}/.cache/xcache", check=False)
    found = machine.run("find", *places, "-printf", "%p %y %m %U %l\n", check=False).stdout.splitlines()
    return {line for line in found if not passed_over.match(line.split()[0])}


class Service:
    """The service of one scope: the administrator's commands, and programs that use it."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine = machine
        self.kind = kind
        # The administrator, and the user whose programs use it.
        self.administrator = USER if kind == "user" else None
        self.directory = f"{machine.home(USER)}/.cache/xcache" if kind == "user" else "/var/cache/xcache"
        self.socket = f"/run/user/{USER}/xcache/xcached.sock" if kind == "user" else "/run/xcache/xcached.sock"
        self.config = (
            f"{machine.home(USER)}/.config/xcache/config.toml" if kind == "user" else "/etc/xcache/config.toml"
        )
        units = f"{machine.home(USER)}/.config/systemd/user" if kind == "user" else "/etc/systemd/system"
        self._began = time.time()
        self.drop_in = f"{units}/xcached.service.d/test.conf"

    def xcache(self, *arguments: str, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the administrator."""
        # A careful administrator's umask: files for everybody must not depend on it.
        command = ["sh", "-c", 'umask 077 && exec xcache "$@"', "sh", *arguments]
        result = self.machine.run(*command, user=self.administrator, check=False, **environment)
        said = f"{arguments}: {result.returncode} {result.stdout}{result.stderr}"
        assert code is None or result.returncode == code, f"{said}{self.machine.log()}"
        assert "Traceback" not in result.stderr, said
        return result

    def json(self, *arguments: str, code: int | None = 0) -> dict[str, Any]:
        """Return the document that a command prints."""
        return json.loads(self.xcache(*arguments, "--json", code=code).stdout)

    def install(self) -> str:
        """Return what install prints."""
        return self.xcache("service", "install", f"--{self.kind}").stdout

    def uninstall(self) -> str:
        """Return what uninstall --purge prints."""
        return self.xcache("service", "uninstall", f"--{self.kind}", "--purge").stdout

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Ask its service manager."""
        command = ["systemctl", *(("--user",) if self.kind == "user" else ()), *arguments]
        return self.machine.run(*command, user=self.administrator, check=check).stdout

    def show(self, name: str, unit: str = "xcached.service") -> str:
        """Return a property of a unit."""
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def configure(self, text: str) -> None:
        """Write its configuration file."""
        named = 'daemon_user = "xcache"  # by xcache service install\n' if self.kind == "system" else ""
        self.machine.write(self.config, f"{named}{text}\n", user=self.administrator)

    def override(self, text: str) -> None:
        """Add to its unit."""
        self.machine.write(self.drop_in, f"[Service]\n{text}\n", user=self.administrator)
        self.systemctl("daemon-reload")

    def talk(self, key: str = "a", user: int = USER, *, check: bool = True, **environment: str) -> tuple[str, int]:
        """Have a program use it; return its output and the daemon's process; without ``check`` it may fail."""
        path = "/opt/tests"
        command = ["/opt/xcache/bin/python", "-c", TALK, key]
        environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        result = self.machine.run(*command, user=user, check=check, **environment)
        what, pid = result.stdout.split() or ("failed", "0")
        return what, int(pid)

    def program(self) -> str:
        """Run a program with jax; return its result, hits and misses."""
        command = ["/opt/xcache/bin/python", "-c", PROGRAM]
        run = self.machine.run(*command, user=USER, XCACHE="1", JAX_PLATFORMS="cpu", XCACHE_TIMEOUT="20s")
        assert not run.stderr, run.stderr
        return run.stdout.strip()

    def daemons(self) -> list[int]:
        """Return the processes of all daemons in the machine."""
        said = self.machine.run("pgrep", "-f", "^[^ ]*python[^ ]* -P -m xcached", check=False).stdout
        return [int(pid) for pid in said.split()]

    def main_pid(self) -> int:
        """Return the daemon that the service manager knows, or 0."""
        return int(self.show("MainPID"))

    def journal(self, *options: str) -> list[dict[str, Any]]:
        """Return the daemon's log since this service was made."""
        unit = "_SYSTEMD_USER_UNIT" if self.kind == "user" else "_SYSTEMD_UNIT"
        command = ["journalctl", "--no-pager", "-o", "json", f"--since=@{self._began:.6f}"]
        said = self.machine.run(*command, *options, f"{unit}=xcached.service", check=False).stdout
        return [json.loads(line) for line in said.splitlines()]

    def says(self, pattern: str) -> bool:
        """Return whether the status line comes to match."""
        return until(lambda: re.search(pattern, self.show("StatusText")))

    def clean(self) -> None:
        """Remove everything, whatever its state."""
        if self.machine.run("test", "-e", self.config, check=False).returncode == 0:
            # The command would be refused with invalid settings.
            self.configure("")
        self.xcache("service", "uninstall", f"--{self.kind}", "--purge", code=None)
        for pid in self.daemons():
            self.machine.run("kill", "-9", str(pid), check=False)
        leftovers = [str(Path(self.drop_in).parent), self.directory, str(Path(self.socket).parent), self.config]
        home = self.machine.home(USER)
        folders = [f"{home}/.config/xcache", f"{home}/.config/systemd", f"{home}/.cache/xcache", f"/tmp/xcache-{USER}"]
        self.machine.run("rm", "-rf", *leftovers, *folders)
        self.systemctl("daemon-reload")
