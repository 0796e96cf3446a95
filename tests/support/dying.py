"""Processes that end while they load an entry, in every way a process can."""

from __future__ import annotations

import subprocess
import sys

from support.conversation import Conversation, talking
from support.places import Place, until
from support.setting_aside import KEY
from xcache.wire import commands

# In the order of the arguments: the place, the key, whether it was loaded ahead, and how it ends.
PROGRAM = """
import os, resource, signal, sys
from pathlib import Path
from support.conversation import Conversation
from support.places import Place, digest
from xcache.wire import protocol
root, key, ahead, end = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
talk = Conversation(Place(Path(root)))
talk.greet()
talk.say(protocol.Loading(key, digest(talk.get(key)), ahead == "ahead"))
exec(end)
"""
CRASH = "os.kill(os.getpid(), signal.SIGSEGV)"


def begin_to_die(
    place: Place, end: str = CRASH, key: str = KEY, *, ahead: bool = False, **options: object
) -> subprocess.Popen[bytes]:
    """Start a process that loads an entry and ends by itself."""
    arguments = [sys.executable, "-c", PROGRAM, str(place.root), key, "ahead" if ahead else "", end]
    return subprocess.Popen(arguments, env=place.with_support, **options)


def die_while_loading(place: Place, end: str = CRASH, key: str = KEY, *, ahead: bool = False) -> int:
    """Run a process that loads an entry and ends; return its status when the daemon has saved its judgement."""
    with talking(place) as talk:
        others = int(talk.status()["connections"] or 0) - 1
        with begin_to_die(place, end, key, ahead=ahead) as process:
            code = process.wait(20)
        settle(talk, others)
    return code


def settle(talk: Conversation, others: int = 0) -> None:
    """Wait until the daemon has judged and saved the ends of processes that have ended."""
    assert until(lambda: talk.status()["connections"] == 1 + others)
    # The daemon hears of their ends before it hears this.
    talk.status()
    talk.ask(commands.Sync())
