"""One daemon for all users of a machine, and users who mean each other no good: with real accounts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jaxlib
import pytest
from support.conversation import key_of
from support.places import REPOSITORY, TESTS, digest, until
from support.users import ALICE, BOB, BUILDER, CAROL, DAEMON, KEY, NOBODY, TALK, Machine, become, command

from xcache import lock_file
from xcache.wire import envelope

PROGRAM = """
import dataclasses, json, os, jax, xcache
from xcache import executables
load = executables.deserialize
def deserialize(client, raw, *arguments):
    if raw == b"evil":
        os.abort()
    return load(client, raw, *arguments)
executables.deserialize = deserialize
import xcache.hook.wrapper
xcache.hook.wrapper.deserialize = deserialize
result = float(jax.jit(lambda v: v * 3 + 1)(2.0))
print(json.dumps([result, dataclasses.asdict(xcache.stats())]))
"""


STALE = "SELECT 1 FROM toolchains WHERE stale_since IS NOT NULL"
PUT = "said.append(text(talk.put(KEY, {!r}, **{})))"
GET = "found = talk.get(KEY); said.append(found and found.decode('latin-1'))"


def put(machine: Machine, uid: int, payload: bytes, **changes: object) -> list[str]:
    return machine.talk(uid, PUT.format(payload, changes))


def get(machine: Machine, uid: int) -> str | None:
    (found,) = machine.talk(uid, GET)
    return found


def test_one_users_entry_reaches_no_other_user(machine):
    machine.start()
    assert put(machine, BOB, b"evil") == ["Stored"]
    assert get(machine, ALICE) is None
    assert put(machine, ALICE, b"good") == ["Stored"]
    assert get(machine, ALICE) == "good"
    assert get(machine, BOB) == "evil"
    assert get(machine, CAROL) is None


def test_what_another_user_stored_is_missing_before_a_run_too(machine):
    machine.start()
    assert put(machine, BOB, b"evil") == ["Stored"]
    path = machine.place.root / "run.lock"
    made = lock_file.Made("cpu", "cpu", jaxlib.__version__, digest(b"toolchain"))
    path.write_text(lock_file.render({KEY: lock_file.Program("jit_f", 2.0, made)}))
    for uid, state, reason in ((ALICE, "missing", "not trusted"), (BOB, "here", "")):
        _, said, _ = command(machine, uid, "preflight", str(path), "--json")
        (found,) = json.loads(said)["entries"]
        assert (found["state"], found["reason"]) == (state, reason)


def test_a_planted_entry_never_reaches_a_program_of_another_user(machine):
    """Bob puts under Alice's key an entry that would kill a program with jax that loads it."""
    machine.start()
    first = json.loads(machine.run(ALICE, PROGRAM, XCACHE="1").stdout)
    assert (first[0], first[1]["misses"], first[1]["errors"]) == (7.0, 1, {})
    ((key,),) = machine.place.query("SELECT key FROM entries")
    plant = (
        f"from xcache.wire import envelope\nsealed = envelope.seal({key!r}, b'evil')\n"
        f"said.append(text(talk.put({key!r}, sealed, overwrite=True)))"
    )
    assert machine.talk(BOB, plant) == ["Stored"]
    assert machine.run(BOB, PROGRAM, XCACHE="1").returncode < 0
    again = json.loads(machine.run(ALICE, PROGRAM, XCACHE="1").stdout)
    assert (again[0], again[1]["hits"], again[1]["errors"]) == (7.0, 1, {})
    carol = json.loads(machine.run(CAROL, PROGRAM, XCACHE="1").stdout)
    assert (carol[0], carol[1]["hits"], carol[1]["misses"]) == (7.0, 0, 1)
    assert {uid for (uid,) in machine.place.query("SELECT writer_uid FROM entries")} == {ALICE, BOB, CAROL}


FAKE = """
from support.environments import Environment
fake = Environment(Path.cwd() / "fake", "1.0")
said.append(text(talk.ask(fake.announcement())))
parts = {name: digest(name.encode()) for name in ("program", *protocol.DESCRIBED_COMPONENTS)}
said.append(text(talk.put(KEY, b"evil", components=parts | {"toolchain": fake.toolchain})))
fake.library.unlink()
"""


def test_nobody_makes_stale_what_is_anothers(machine):
    """Alice stores under Bob's key what she says was made by something that is installed nowhere any more."""
    machine.start()
    assert put(machine, BOB, b"good") == ["Stored"]
    assert machine.talk(ALICE, FAKE) == ["Done", "Stored"]
    assert until(lambda: machine.place.query(STALE))
    assert get(machine, BOB) == "good"


GUESS = """
links = {}
for name, content in (("right", b"secret"), ("wrong", b"public"), ("none", b"absent"), ("of her own", b"of own")):
    links[name], file = Path.cwd() / name, Path.cwd() / f"{name}.txt"
    file.write_bytes(content)
    links[name].symlink_to(file)
    there = file.stat()
    mark = {"path": str(links[name]), "size": 6, "mtime_ns": there.st_mtime_ns, "inode": there.st_ino}
    toolchain = digest(name.encode())
    said.append(text(talk.ask(protocol.Announce(toolchain, "cpu", "1", name, [mark | {"digest": digest(content)}]))))
    parts = {part: digest(part.encode()) for part in ("program", *protocol.DESCRIBED_COMPONENTS)}
    said.append(text(talk.put(key_of(name), b"x", components=parts | {"toolchain": toolchain})))
for name, link in links.items():
    link.unlink()
    if name != "of her own":
        link.symlink_to(SECRET if name != "none" else SECRET + " that is not there")
"""


def test_nobody_learns_from_the_daemon_what_only_it_may_read(machine):
    """Alice guesses the content of a file of the daemon's, and whether there is one, behind links of hers."""
    machine.start()
    secret = machine.place.dir / "secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o600)
    os.chown(secret, DAEMON, DAEMON)
    assert machine.talk(ALICE, f"SECRET = {str(secret)!r}\n{GUESS}") == ["Done", "Stored"] * 4
    # Of what she may see for herself the daemon tells her.
    assert until(lambda: machine.place.query(STALE))
    gone = machine.place.query("SELECT digest FROM toolchains WHERE stale_since IS NOT NULL")
    assert gone == [(digest(b"of her own"),)]


def test_users_pin_their_own_up_to_their_quota(machine):
    machine.start(XCACHE_USER_QUOTA="50000")
    put(machine, ALICE, b"a" * 20_000)
    pinning = (
        "for name in 'xyz': talk.put(key_of(name), name.encode() * 20_000, b'program')\n"
        "for keys in ([KEY], [key_of('x')], [key_of('z')], [key_of('y'), key_of('z')]):\n"
        "    answer = talk.ask(commands.Pin(keys))\n"
        "    said.append(answer.entries + answer.already if isinstance(answer, commands.Pinned) else text(answer))\n"
        "said.append(text(talk.ask(commands.CollectGarbage())))\n"
    )
    # Bob's quota holds two: x went to make room for y and z.
    assert machine.talk(BOB, pinning) == [0, 0, 1, 2, "Refused: not permitted"]
    refused = "said.append(text(talk.put(key_of('w'), b'w' * 20_000, b'program')))"
    assert machine.talk(BOB, refused) == ["Refused: quota"]
    assert get(machine, ALICE) == "a" * 20_000


def test_nobody_overwrites_removes_or_sets_aside_what_is_anothers(machine):
    machine.start()
    good = envelope.seal(KEY, b"good")
    put(machine, ALICE, good)
    attack = (
        "said.append(text(talk.put(KEY, b'evil', overwrite=True)))\n"
        "said.append(talk.ask(commands.Remove([KEY])).entries)\n"
        f"digest_of_good = {digest(good)!r}\n"
        "said.append(text(talk.ask(protocol.Complain(KEY, digest_of_good, 'it is damaged', False))))\n"
        "said.append(talk.ask(commands.Clear()).entries)\n"
        "said.append(text(talk.ask(protocol.MarkNotCacheable(KEY, 'm', 'no'))))\n"
        "for _ in range(3):\n"
        "    other = speaker()\n"
        "    other.say(protocol.Loading(KEY, digest_of_good, False)); other.close()\n"
        "said.append(text(talk.ask(commands.ZeroStatistics())))\n"
        "said.append(text(talk.ask(commands.Stop('bye'))))\n"
    )
    assert machine.talk(BOB, attack) == [
        *("Stored", 1, "Done", 0, "Done"),
        *("Refused: not permitted", "Refused: not permitted"),
    ]
    assert get(machine, ALICE) == good.decode("latin-1")
    assert machine.place.query("SELECT key FROM quarantined") == []


def test_nobody_waits_for_or_hears_of_somebody_they_do_not_trust(machine):
    machine.start()
    hold = (
        "import subprocess, time\n"
        "said.append(text(talk.ask(get_message(KEY, 60.0))))\n"
        "print(json.dumps(said), flush=True)\nsys.stdin.readline()\nsys.exit()"
    )
    holder = subprocess.Popen(
        [*become(BOB), sys.executable, "-c", TALK + hold, str(machine.place.root)],
        env=machine.place.env,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert json.loads(holder.stdout.readline()) == ["Missing"]
        ask = (
            "answer = talk.ask(get_message(KEY, 60.0)); said.append(bool(answer.lease))\n"
            "said.append([c['pid'] == os.getpid() for c in talk.ask(protocol.AskStatus()).compiles])"
        )
        assert machine.talk(ALICE, ask) == [True, [True]]
    finally:
        holder.kill()
        holder.communicate()


def test_trusted_are_root_oneself_those_who_are_named_and_ones_group(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder, @team")
    for writer, readers in {
        BUILDER: {ALICE, BOB, CAROL, BUILDER, 0},
        ALICE: {ALICE, CAROL},
        BOB: {BOB},
        0: {ALICE, BOB, CAROL, BUILDER, 0},
    }.items():
        assert put(machine, writer, b"by %d" % writer) == ["Stored"]
        seen = {uid for uid in (ALICE, BOB, CAROL, BUILDER, 0) if get(machine, uid) == f"by {writer}"}
        assert seen == readers, writer
        machine.talk(writer, "said.append(talk.ask(commands.Remove([KEY])).entries)")


def test_ones_own_goes_before_that_of_others(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder")
    put(machine, BUILDER, b"of the builder")
    assert get(machine, ALICE) == "of the builder"
    put(machine, ALICE, b"of alice")
    assert get(machine, ALICE) == "of alice"
    assert get(machine, BOB) == "of the builder"


def test_a_reader_whose_programs_it_ends_gets_it_no_more_and_the_others_do(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder")
    put(machine, BUILDER, b"of the builder")
    die = "talk.get(KEY)\ntalk.say(protocol.Loading(KEY, digest(b'of the builder'), False))\nos.abort()"
    for count in (1, 2):
        machine.run(ALICE, TALK + die)
        assert until(lambda count=count: machine.place.query("SELECT count FROM strikes") == [(count,)])
    assert get(machine, ALICE) is None
    assert get(machine, BOB) == "of the builder"


def test_a_damaged_entry_is_set_aside_whoever_finds_it(machine):
    machine.start(XCACHE_TRUSTED_WRITERS="builder")
    put(machine, BUILDER, b"of the builder")
    machine.place.execute("UPDATE blobs SET content = ? WHERE digest = ?", b"altered", digest(b"of the builder"))
    complain = (
        "talk.get(KEY)\ncomplaint = protocol.Complain(KEY, digest(b'of the builder'), 'damaged', False)\n"
        "said.append(text(talk.ask(complaint)))"
    )
    assert machine.talk(ALICE, complain) == ["Done"]
    assert get(machine, BOB) is None
    assert [row[0] for row in machine.place.query("SELECT reason FROM quarantined")] == ["damaged"]


def test_a_quota_makes_room_among_ones_own(machine):
    machine.start(XCACHE_USER_QUOTA="100K")
    fill = (
        "for n in range({}):\n    said.append(text(talk.put(key_of(f'{} {{n}}'), os.urandom(9_000), b'p')))\n"
        "said.append(text(talk.put(KEY, os.urandom(200_000))))"
    )
    assert machine.talk(ALICE, fill.format(5, "alice")) == ["Stored"] * 5 + ["Refused: quota"]
    assert machine.talk(BOB, fill.format(40, "bob")) == ["Stored"] * 40 + ["Refused: quota"]
    count = dict(machine.place.query("SELECT writer_uid, count(*) FROM entries GROUP BY writer_uid"))
    assert count == {ALICE: 5, BOB: 11}
    latest = {key_of(f"bob {n}") for n in range(29, 40)}
    assert {key for (key,) in machine.place.query("SELECT key FROM entries WHERE writer_uid = ?", BOB)} == latest


def test_one_user_cannot_take_all_connections(machine):
    machine.start(XCACHE_MAX_CONNECTIONS="20")
    greedy = (
        "import time\nothers = []\n"
        "try:\n    for _ in range(30):\n"
        "        others.append(speaker())\n"
        "except (AssertionError, ConnectionError, OSError):\n    pass\n"
        "print(len(others), flush=True)\nsys.stdin.readline()"
    )
    holder = subprocess.Popen(
        [*become(BOB), sys.executable, "-c", TALK + greedy, str(machine.place.root)],
        env=machine.place.env,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        # And the one it asked with at first.
        assert int(holder.stdout.readline()) == 4
        assert put(machine, ALICE, b"x") == ["Stored"]
    finally:
        holder.kill()
        holder.communicate()


def test_a_user_that_the_kernel_cannot_name_is_turned_away(machine):
    machine.start()
    result = machine.run(NOBODY, TALK)
    assert result.returncode != 0
    assert "not for other users (uid 65534)" in (machine.place.dir / "daemon.log").read_text()


def test_uids_that_an_account_got_after_the_start_are_no_users(machine):
    """With each of them Bob would have a share of his own."""
    table, theirs = machine.place.root / "subuid", 200_000
    if not table.exists():
        pytest.skip("this system has no table of subordinate uids")
    machine.start()
    assert machine.talk(theirs, "said.append('welcome')") == ["welcome"]
    with table.open("a") as lines:
        lines.write(f"bob:{theirs}:65536\n")
    assert machine.run(theirs + 1, TALK).returncode != 0
    assert f"not for other users (uid {theirs + 1})" in (machine.place.dir / "daemon.log").read_text()
    assert machine.talk(BOB, "said.append('welcome')") == ["welcome"]


def test_the_store_is_closed_to_users_and_the_socket_open(machine):
    machine.start()
    assert machine.talk(ALICE, "said.append(text(talk.put(KEY, os.urandom(100_000))))") == ["Stored"]
    assert machine.place.socket.stat().st_mode & 0o777 == 0o666
    for path in (machine.place.dir, *machine.place.dir.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.stat().st_uid == DAEMON


def test_a_user_does_not_start_the_machines_daemon_and_trusts_no_other_account(machine):
    """No client talks to a socket that a user planted in the daemon's place."""
    alone = machine.run(ALICE, PROGRAM, XCACHE="1")
    assert json.loads(alone.stdout)[0] == 7.0
    assert alone.stderr.count("\n") == 1
    assert not machine.place.socket.exists()
    os.chown(machine.place.root / "run", BOB, BOB)
    planted = machine.run(ALICE, PROGRAM, XCACHE="1")
    assert json.loads(planted.stdout)[0] == 7.0
    assert f"belongs to another user (uid {BOB})" in planted.stderr


def test_a_daemon_of_ones_own_is_not_for_others(place):
    if os.getuid() != 0:
        pytest.skip("needs root to become several users")
    place.start_daemon()
    place.root.chmod(0o755)
    place.socket.chmod(0o777)
    place.env["PYTHONPATH"] = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "daemon", TESTS)))
    assert Machine(place, []).run(ALICE, TALK).returncode != 0
    assert f"not for other users (uid {ALICE})" in (place.dir / "daemon.log").read_text()


THREE = "for name in 'abc': said.append(text(talk.put(key_of(name), b'x' * 50)))"


def test_users_are_told_of_what_is_theirs_and_root_of_everything(machine):
    machine.start()
    assert machine.talk(ALICE, THREE) == ["Stored"] * 3
    assert put(machine, BOB, b"another") == ["Stored"]
    keys = {name: key_of(name) for name in "abc"}
    assert "pinned 2 entries; 2 entries with" in command(machine, ALICE, "pin", keys["a"], keys["b"])[1]
    assert "pinned 1 entry; 1 entry with" in command(machine, BOB, "pin", keys["a"])[1]
    assert "pinned 1 entry (3 already were pinned); 4 entries with" in command(machine, 0, "pin", *keys.values())[1]
    titles, *rows = command(machine, 0, "ls")[1].splitlines()
    assert "user" in titles.split()
    assert len(rows) == 4 and sum(str(BOB) in row for row in rows) == 1
    assert "user" not in command(machine, ALICE, "ls")[1]
    assert "of all users" in command(machine, BOB, "status")[1]
    assert "you have stored nothing here" in command(machine, CAROL, "ls")[1]
    code, _, refused = command(machine, ALICE, "restart")
    assert (code, refused) == (1, "xcache: the daemon refuses: only root and the daemon's own account may do this\n")
    # A user who has a folder of another store gets the machine's store all the same.
    own = machine.place.root / f"home-{ALICE}" / "own"
    own.mkdir()
    os.chown(own, ALICE, ALICE)
    code, said, problem = command(machine, ALICE, "status", "--json", XCACHE_DIR=str(own))
    assert (code, json.loads(said)["running"], json.loads(said)["entries"]) == (1, True, 4)
    assert f"serves {machine.place.dir}, not {own}" in problem
    assert command(machine, ALICE, "stop", XCACHE_DIR=str(own))[0] == 2
