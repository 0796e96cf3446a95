"""Imports at a daemon of several users: what one of them has waiting costs the others nothing."""

from __future__ import annotations

import contextlib
import random
import select
import shutil
import subprocess
from pathlib import Path

import pytest
from support import parcels
from support.conversation import Conversation, key_of
from support.places import PATIENCE, until
from support.users import ALICE, BOB, DAEMON, talking_as

from xcache.client.contents import write_sealed
from xcache.wire import commands, protocol

MB = 1_000_000


def import_of(name: str, size: int) -> tuple[commands.ImportEntry, list[bytes]]:
    """Return a request for an entry that nobody has signed, and its contents."""
    payload = random.Random(name).randbytes(size)
    put = parcels.put(payload, b"program", key=key_of(name), overwrite=False)
    content = parcels.packed(put, payload, b"program", namespace="", signer=None)
    return commands.ImportEntry(put.key, True, None, len(content)), [content]


def staged_until_refused(talk: Conversation, size: int) -> tuple[int, protocol.Refused]:
    """Have entries wait until one is refused; return how many wait, and the refusal."""
    for number in range(200):
        answer = talk.ask(*import_of(f"waiting {number}", size))
        if isinstance(answer, protocol.Refused):
            return number, answer
        assert answer == protocol.Done()
    raise AssertionError("there is no end")


def bytes_in_memory_files(pid: int) -> int:
    """Return what a process holds in memory files."""
    held = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        # The daemon closes some meanwhile.
        with contextlib.suppress(FileNotFoundError):
            held += file.stat().st_blocks * 512 if "memfd:" in str(file.readlink()) else 0
    return held


SIZE = 150 * MB


@pytest.mark.parametrize("is_garbage", [False, True])
def test_a_large_entry_takes_none_of_the_daemons_memory(machine, is_garbage):
    """It comes in its sender's memory, and waits on disk."""
    # Of memory of its own it gets no more.
    machine.command += ["prlimit", f"--data={SIZE}"]
    machine.start()
    pid = machine.place.daemon_pid()
    request, contents = import_of("large", SIZE)
    with talking_as(machine, BOB) as bob:
        bob.socket.settimeout(PATIENCE)
        assert bob.ask(*import_of("small", MB)) == protocol.Done()
        if is_garbage:
            refused = bob.ask(request, [bytes(request.size)])
            assert (refused.kind, refused.reason) == ("damaged", "it is no parcel of xcache")
        else:
            assert bob.ask(request, contents) == protocol.Done()
        assert until(lambda: not bytes_in_memory_files(pid))
        assert bob.ask(commands.EndImport()).entries == 2 - is_garbage
        assert bob.get(key_of("small")) is not None
        assert (bob.get(key_of("large")) is not None) != is_garbage


def test_no_more_waits_than_the_quota_allows(machine):
    machine.start(XCACHE_USER_QUOTA="5M")
    with talking_as(machine, BOB) as bob:
        count, refused = staged_until_refused(bob, MB)
        assert (count, refused.kind) == (5, "quota")
        # Nor on a second connection.
        with talking_as(machine, BOB) as second:
            assert staged_until_refused(second, MB)[0] == 0
        stored = bob.ask(commands.EndImport())
        assert stored.entries == 5
    with talking_as(machine, ALICE) as alice:
        assert staged_until_refused(alice, MB)[0] == 5


def test_what_waits_leaves_the_disk_its_free_space(machine):
    store = machine.place.root / "store"
    options = f"size={60 * MB},mode=700,uid={DAEMON},gid={DAEMON}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(store)], check=True)
    try:
        machine.start(XCACHE_MIN_FREE=str(20 * MB))
        with talking_as(machine, ALICE) as alice, talking_as(machine, BOB) as bob:
            assert alice.put(key_of("first"), bytes(MB)).kept
            count, refused = staged_until_refused(bob, MB)
            assert refused.kind == "disk full"
            assert count > 10
            assert shutil.disk_usage(store).free > 15 * MB
            for number in range(10):
                assert alice.put(key_of(f"{number}"), random.Random(number).randbytes(MB)).kept
    finally:
        machine.place.stop()
        subprocess.run(["umount", "-l", str(store)], check=True)


def test_a_small_import_does_not_wait_for_all_of_another_user(machine):
    machine.start()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(talking_as(machine, BOB)) for _ in range(8)]
        alice = stack.enter_context(talking_as(machine, ALICE))
        imports = [import_of(f"{number}", 16 * MB) for number in range(len(crowd))]
        for bob, (_, contents) in zip(crowd, imports, strict=True):
            for file, content in zip(bob.files(1), contents, strict=True):
                with file:
                    write_sealed(file, content)
        told = [(bob, bob.say(message)) for bob, (message, _) in zip(crowd, imports, strict=True)]
        sockets = [bob.socket for bob in crowd]
        # When the first is done, the others are in the queue.
        assert select.select(sockets, [], [], PATIENCE)[0]
        message, (content,) = import_of("small", 1000)
        assert alice.ask(message._replace(content=content)) == protocol.Done()
        assert len(select.select(sockets, [], [], 0)[0]) < len(crowd)
        assert {bob.answer(number) for bob, number in told} == {protocol.Done()}
