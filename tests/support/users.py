"""A machine with real user accounts and one daemon, in a mount namespace."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.conversation import Conversation, key_of
from support.places import REPOSITORY, TESTS, Place, until
from support.program_files import program_text

KEY = key_of("a")
# Accounts that exist only as the daemon sees the machine.
DAEMON, ALICE, BOB, CAROL, BUILDER, NOBODY = 60001, 60002, 60003, 60004, 60005, 65534
ACCOUNTS = {"xcached-test": DAEMON, "alice": ALICE, "bob": BOB, "carol": CAROL, "builder": BUILDER}
GROUPS = {"team": (61000, ["alice", "carol"])}

TALK = program_text("greet")
# Runs a command for which the store is closed, as it is to users.
COMMAND = """
import os, sys
from xcache.cli import main, store_file
from xcache.errors import ClosedStoreError
def closed(path):
    raise ClosedStoreError("not for you")
if os.getuid():
    # Here users may read whatever they like: become().
    store_file._exists = closed
main(sys.argv[2:])
"""


@dataclasses.dataclass
class Machine:
    """A daemon under its own account, and users."""

    place: Place
    command: list[str]

    def start(self, **environment: str) -> None:
        """Start the daemon under its account."""
        with self.place.said_file().open("ab") as said:
            child = subprocess.Popen(
                [*self.command, *become(DAEMON), sys.executable, "-P", "-m", "xcached"],
                env=self.place.env | environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stderr=said,
            )
        self.place.adopt(child)
        assert until(lambda: self.place.answers() or child.poll() is not None)
        assert child.poll() is None, self.place.said()

    def talk(self, uid: int, source: str) -> list[str]:
        """Have a user talk to the daemon; return what the source appends to ``said``."""
        result = self.run(uid, TALK + source + "\nprint(json.dumps(said))")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def run(self, uid: int, source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program as a user."""
        home = self.place.root / f"home-{uid}"
        if not home.exists():
            home.mkdir()
            os.chown(home, uid, uid)
        return subprocess.run(
            [*become(uid), sys.executable, "-c", source, str(self.place.root), *arguments],
            env=self.place.env | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")} | environment,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def become(uid: int) -> list[str]:
    """Return the beginning of a command that runs it as another user, who can read Python wherever root put it."""
    reading = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *reading]


def make_machine(place: Place) -> Machine:
    """Prepare accounts and folders; skip the test if that cannot be done."""
    if os.getuid() != 0:
        pytest.skip("needs root to become several users")
    folders = {"store": 0o700, "run": 0o755}
    for name, mode in folders.items():
        (place.root / name).mkdir(mode=mode)
        (place.root / name).chmod(mode)
        os.chown(place.root / name, DAEMON, DAEMON)
    place.root.chmod(0o755)
    place.socket = place.root / "run" / "s"
    place.env |= {
        "XCACHE_SOCKET": str(place.socket),
        "XCACHE_DAEMON_USER": str(DAEMON),
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "daemon", TESTS))),
    }
    accounts = "".join(f"{name}:x:{uid}:{uid}::/:/bin/sh\n" for name, uid in ACCOUNTS.items())
    groups = "".join(f"{name}:x:{gid}:{','.join(members)}\n" for name, (gid, members) in GROUPS.items())
    # Not every system has the table of subordinate uids.
    tables = {"passwd": accounts, "group": groups} | ({"subuid": ""} if Path("/etc/subuid").exists() else {})
    for name, lines in tables.items():
        (place.root / name).write_text(Path("/etc", name).read_text() + lines)
    mounts = " && ".join(f"mount --bind {place.root}/{name} /etc/{name}" for name in tables)
    command = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    everything = [*command, *become(ALICE), sys.executable, "-c", ""]
    tried = subprocess.run(everything, capture_output=True, text=True, check=False)
    if shutil.which("setpriv") is None or tried.returncode:
        pytest.skip(f"accounts cannot be made up here: {tried.stderr.strip()}")
    return Machine(place, command)


@contextlib.contextmanager
def talking_as(machine: Machine, uid: int) -> Iterator[Conversation]:
    """Open a connection of a user that has said Hello, for the length of the block."""
    # The kernel reports who connected by the effective uid at that moment.
    os.seteuid(uid)
    try:
        conversation = Conversation(machine.place)
    finally:
        os.seteuid(0)
    try:
        conversation.greet()
        yield conversation
    finally:
        conversation.close()


def command(machine: Machine, uid: int, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command as a user; return its exit status, what it said, and its complaints."""
    done = machine.run(uid, COMMAND, *arguments, **environment)
    return done.returncode, done.stdout, done.stderr
