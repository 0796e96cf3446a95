"""Leases that reach across machines: daemons of their own, and a tier between them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import Shell
from support.conversation import Conversation, key_of, talking
from support.engines import Engine, Where, listens, running
from support.leasing import begin_to_wait, outcome
from support.marks import thorough
from support.places import Place, free_port, get_message, until
from support.sharing import BOUND, CONTENT, KEY, host, put_and_upload, remote_of
from support.signing import STRANGER, in_memory

from xcache.wire import protocol
from xcache.wire.names import Names
from xcached.tiers import lease_object

# Of an entry by which the next compile of the same program is expected to take so long.
OF_PROGRAM = {"program_digest": get_message(KEY).program_digest, "compile_seconds": 0.1}
# Instead of those of users, so that the tests are quick; a busy machine may be late by less than DEAD.
DEAD = 2.0
SHORT = f"""
from xcached.tiers import claims
claims.PERIODS = claims.Periods(0.1, {DEAD}, 0.05, 0.2, 0.3, 1.0)
"""
_NUMBERS = itertools.count()


@pytest.fixture
def modules(tmp_path) -> Path:
    """Where a daemon finds its periods."""
    made = tmp_path / "modules"
    made.mkdir()
    (made / "sitecustomize.py").write_text(SHORT)
    return made


@pytest.fixture
def machine(modules):
    """Gives a place whose daemon has short periods."""

    @contextlib.contextmanager
    def start(where: Where, *under: str, **settings: str) -> Iterator[Place]:
        path = os.pathsep.join([str(modules), *_paths()])
        environment = where.environment | {"PYTHONPATH": path} | settings
        with host(where.url, under=under, **environment) as place:
            yield place

    return start


def _paths() -> list[str]:
    root = Path(__file__).parents[3]
    return [str(root), str(root / "daemon")]


@pytest.fixture
def tier(tmp_path) -> Where:
    (tmp_path / "tier").mkdir()
    return Where(f"file://{tmp_path}/tier", {})


# For the session: what it starts is not left behind by a test.
@pytest.fixture(scope="session", params=thorough(["folder", "redis", "s3"], usual=["redis"]))
def creating_engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn that has leases."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


@pytest.fixture
def any_tier(creating_engine: Engine) -> Where:
    return creating_engine.at(f"leases{next(_NUMBERS)}")


def lease_of(tier: Where, key: str = KEY) -> lease_object.Held | None:
    """Return what the lease in a folder says."""
    try:
        content = Path(tier.url.removeprefix("file://"), name := Names("").lease(key)).read_bytes()
    except FileNotFoundError:
        return None
    found = lease_object.decoded(content, name, in_memory(), 0.0)
    return found and found.held


def take(talk: Conversation, key: str) -> int:
    """Ask for a key and get its lease, perhaps after a while."""
    answer = outcome(talk, talk.say(get_message(key, 60.0)))
    assert isinstance(answer, protocol.Missing), answer
    assert answer.lease
    return answer.lease


def is_held(tier: Where) -> bool:
    return lease_of(tier) is not None


def content_of(talk: Conversation, answer: protocol.Message) -> bytes:
    assert isinstance(answer, protocol.Found), answer
    assert answer.payload is not None
    return answer.payload


def test_one_machine_compiles_and_the_other_waits(any_tier, machine):
    # SeaweedFS makes room at its first write, which may take seconds.
    patient = {"XCACHE_REMOTE_TIMEOUT": "20s"}
    with (
        machine(any_tier, **patient) as here,
        machine(any_tier, **patient) as there,
        talking(here) as holder,
        talking(there) as other,
    ):
        take(holder, KEY)
        waiting = begin_to_wait(other, KEY)
        words = iter(lambda: other.hear()[1], None)
        word = next(word for word in words if " on " in word.program)
        assert (word.pid, word.program) == (os.getpid(), f"test.py on {os.uname().nodename}")
        assert "being compiled" in (said := Shell(there).say("status"))
        assert f"(test.py) on {os.uname().nodename}" in said
        assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        assert content_of(other, outcome(other, waiting)) == CONTENT
        # What was compiled next is nobody else's.
        take(other, key_of("another"))


def test_the_lease_goes_when_the_entry_is_there(tier, machine):
    with machine(tier) as here, talking(here) as holder:
        take(holder, KEY)
        assert is_held(tier)
        beats = lease_of(tier).beats
        assert until(lambda: lease_of(tier).beats > beats)
        assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not is_held(tier))
        assert remote_of(here)["puts"] == 1


def test_a_miss_has_its_cause_all_the_same(tier, machine):
    with machine(tier) as here, talking(here) as talk:
        answer = outcome(talk, talk.say(get_message(KEY, 60.0)))
        assert answer == protocol.Missing(answer.lease, "new", None)
        assert answer.lease


def test_the_next_machine_compiles_at_once_when_the_program_ends(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(there) as other:
        with talking(here) as holder:
            take(holder, KEY)
            waiting = begin_to_wait(other, KEY)
        since = time.monotonic()
        answer = outcome(other, waiting)
        assert answer.lease
        assert time.monotonic() - since < DEAD
        assert until(lambda: lease_of(tier) is not None)


def test_the_next_one_on_the_same_machine_goes_on_with_the_lease(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(there) as other, talking(here) as second:
        with talking(here) as holder:
            take(holder, KEY)
            mine = begin_to_wait(second, KEY)
            theirs = begin_to_wait(other, KEY)
            before = lease_of(tier).holder
        assert outcome(second, mine).lease
        assert lease_of(tier).holder == before
        assert second.put(KEY, CONTENT) == protocol.Stored(True)
        assert content_of(other, outcome(other, theirs)) == CONTENT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_of_the_others_compiles_when_the_daemon_is(number, tier, machine):
    with contextlib.ExitStack() as stack:
        here, second, third = (stack.enter_context(machine(tier)) for _ in range(3))
        holder, one, two = (stack.enter_context(talking(place)) for place in (here, second, third))
        take(holder, KEY)
        waiting = {talk: begin_to_wait(talk, KEY) for talk in (one, two)}
        os.kill(here.daemon_pid(), number)
        answers: dict[Conversation, protocol.Message] = {}

        def hear(talk: Conversation) -> None:
            answers[talk] = answer = outcome(talk, waiting[talk])
            if isinstance(answer, protocol.Missing):
                assert answer.lease
                assert talk.put(KEY, CONTENT) == protocol.Stored(True)

        in_parallel(hear, [(one,), (two,)])
        assert sorted(type(answer).__name__ for answer in answers.values()) == ["Found", "Missing"]
        if number == signal.SIGSTOP:
            # When it goes on, it leaves the lease to whoever has it by then.
            (compiled,) = (talk for talk, answer in answers.items() if isinstance(answer, protocol.Missing))
            take(compiled, key_of("next"))
            os.kill(here.daemons()[0], signal.SIGCONT)
            assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not is_held(tier))


def in_parallel(work, arguments) -> None:
    """Call a function in a thread for each, and raise what one raises."""
    failed: list[BaseException] = []

    def call(each) -> None:
        try:
            work(*each)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failed.append(error)

    threads = [threading.Thread(target=call, args=(each,)) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_a_stopped_daemon_does_not_take_the_lease_of_another_back(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        take(holder, KEY)
        waiting = begin_to_wait(other, KEY)
        pid = here.daemon_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert outcome(other, waiting).lease
        finally:
            os.kill(pid, signal.SIGCONT)
        assert until(lambda: is_held(tier))
        mine = lease_of(tier)
        assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not remote_of(here)["waiting"])
        assert until(lambda: lease_of(tier).beats > mine.beats)
        assert lease_of(tier).holder == mine.holder


def give_back(talk: Conversation, lease: int) -> None:
    talk.say(protocol.Release(KEY, lease))


def be_refused(talk: Conversation, _lease: int) -> None:
    assert isinstance(talk.put(KEY, CONTENT, digest=key_of("another")), protocol.Refused)


def mark(talk: Conversation, _lease: int) -> None:
    assert talk.ask(protocol.MarkNotCacheable(KEY, "jit_f", "of the test")) == protocol.Done()


@pytest.mark.parametrize("give_up", [give_back, be_refused, mark])
def test_the_others_go_on_when_the_holder_gives_up(give_up, tier, machine):
    with machine(tier) as here, machine(tier) as there, machine(tier) as late, contextlib.ExitStack() as stack:
        holder, other, local, last = (stack.enter_context(talking(place)) for place in (here, there, there, late))
        lease = take(holder, KEY)
        waiting, behind = begin_to_wait(other, KEY), begin_to_wait(local, KEY)
        since = time.monotonic()
        give_up(holder, lease)
        assert outcome(other, waiting).lease
        assert time.monotonic() - since < DEAD
        # The one behind it waits for its compile.
        assert other.put(KEY, CONTENT) == protocol.Stored(True)
        assert content_of(local, outcome(local, behind)) == CONTENT
        assert until(lambda: not remote_of(there)["waiting"])
        assert isinstance(outcome(last, last.say(get_message(KEY, 60.0))), protocol.Found)
        assert until(lambda: not is_held(tier))


def test_nobody_waits_for_the_entry_of_a_stranger(tier, modules, machine):
    path = os.pathsep.join([str(modules), *_paths()])
    stranger = host(tier.url, signer=STRANGER, trusts=(STRANGER.public,), PYTHONPATH=path)
    with stranger as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        take(holder, KEY)
        since = time.monotonic()
        take(other, KEY)
        assert time.monotonic() - since < DEAD
        # The lease is the stranger's as before.
        assert lease_of(tier).signer == STRANGER.public.id


def test_a_machine_that_cannot_sign_takes_no_lease(tier, modules):
    path = os.pathsep.join([str(modules), *_paths()])
    with host(tier.url, signer=None, PYTHONPATH=path) as here, talking(here) as talk:
        take(talk, KEY)
        assert not is_held(tier)


def test_nobody_waits_for_what_is_not_uploaded(tier, machine):
    with (
        machine(Where(f"{tier.url}?no-upload-below=500ms", {})) as here,
        machine(tier) as there,
        talking(here) as holder,
        talking(there) as other,
    ):
        take(holder, KEY)
        waiting = begin_to_wait(other, KEY)
        assert holder.put(KEY, CONTENT, **OF_PROGRAM) == protocol.Stored(True)
        assert outcome(other, waiting).lease
        # Now it is known how long such a program takes, and no lease is needed.
        take(holder, key_of("of the same program"))
        assert lease_of(tier, key_of("of the same program")) is None


def test_an_end_that_is_still_shown_keeps_nobody(tier, machine):
    """Neither on another machine nor on the same."""
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        take(holder, KEY)
        be_refused(holder, 0)
        assert until(lambda: is_held(tier) and lease_of(tier).ended)
        assert holder.ask(get_message(KEY, 60.0)).lease
        be_refused(holder, 0)
        assert outcome(other, other.say(get_message(KEY, 60.0))).lease


def test_a_tier_that_goes_away_meanwhile_is_not_waited_for(tier, machine, tmp_path):
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        take(holder, KEY)
        waiting = begin_to_wait(other, KEY)
        (tmp_path / "tier").rename(tmp_path / "away")
        since = time.monotonic()
        assert outcome(other, waiting).lease
        assert time.monotonic() - since < DEAD
        assert other.put(KEY, CONTENT) == protocol.Stored(True)


@pytest.mark.skipif(not shutil.which("redis-server"), reason="there is no Redis: apt-get install redis-server")
def test_a_tier_that_falls_silent_is_waited_for_once(machine, tmp_path):
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--set-proc-title", "no"]
    tier = Where(f"redis://127.0.0.1:{port}", {})
    with (
        running(command, tmp_path, lambda: listens(port)) as pid,
        machine(tier, XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as here,
        machine(tier, XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as there,
        talking(here) as holder,
        talking(there) as other,
    ):
        take(holder, KEY)
        waiting = begin_to_wait(other, KEY)
        os.kill(pid, signal.SIGSTOP)
        try:
            since = time.monotonic()
            assert outcome(other, waiting).lease
            # The tier's answer is waited for, and then nothing.
            assert time.monotonic() - since < 2 * BOUND
            take(other, key_of("the next one"))
            assert holder.put(KEY, CONTENT) == protocol.Stored(True)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_nobody_waits_longer_than_it_wants(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        take(holder, KEY)
        since = time.monotonic()
        assert outcome(other, other.say(get_message(KEY, 0.5))) == protocol.Missing(0)
        assert 0.5 <= time.monotonic() - since < DEAD
        # Nobody asks the tier any more, and the lease is still the other's.
        assert "being compiled" not in Shell(there).say("status")
        assert is_held(tier)


@pytest.mark.thorough
@pytest.mark.slow
def test_nobody_waits_much_longer_than_a_compile_takes(tier, machine):
    """The holder knows how long, and the other does not."""
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        assert holder.put(key_of("before"), CONTENT, **OF_PROGRAM) == protocol.Stored(True)
        take(holder, KEY)
        since = time.monotonic()
        answer = outcome(other, other.say(get_message(KEY, 60.0)))
        assert isinstance(answer, protocol.Missing)
        assert 5.0 < time.monotonic() - since < 8.0


def test_processes_that_do_not_wait_take_no_lease(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(here) as holder, talking(there) as other:
        assert other.ask(get_message(KEY)) == protocol.Missing(0, "new", None)
        assert not is_held(tier)
        take(holder, KEY)
        since = time.monotonic()
        assert other.ask(get_message(KEY)) == protocol.Missing(0, "new", None)
        assert time.monotonic() - since < 1.0
        # Who waits gets what such a process stores, and so does another machine.
        assert other.put(KEY, CONTENT) == protocol.Stored(True)
        assert until(lambda: not remote_of(there)["waiting"])
        with talking(here) as behind:
            assert isinstance(outcome(behind, behind.say(get_message(KEY, 1.0))), protocol.Found)


def test_a_daemon_that_leaves_gives_its_leases_back(tier, machine):
    with machine(tier) as here, machine(tier) as there, talking(there) as other:
        with talking(here) as holder:
            take(holder, KEY)
            waiting = begin_to_wait(other, KEY)
            since = time.monotonic()
            here.stop()
        assert outcome(other, waiting).lease
        assert time.monotonic() - since < DEAD + 2.0


@pytest.mark.parametrize("options", ["?readonly=1", "?writeonly=1"])
def test_a_tier_that_cannot_have_both_has_no_leases(options, tier, machine):
    with machine(Where(tier.url + options, {})) as here, talking(here) as talk:
        take(talk, KEY)
        assert not is_held(tier)


def test_a_lease_that_is_none_is_dead_after_a_while(tier, machine):
    path = Path(tier.url.removeprefix("file://"), Names("").lease(KEY))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff garbage")
    with machine(tier) as here, talking(here) as talk:
        assert outcome(talk, talk.say(get_message(KEY, 60.0))).lease
        assert is_held(tier)


@pytest.mark.slow
def test_many_programs_on_many_machines_compile_each_key_once(any_tier, machine):
    keys = [key_of(f"program {number}") for number in range(8)]
    compiled, found = Counter[str](), Counter[str]()
    with contextlib.ExitStack() as stack:
        # A slow answer would have them compile alone.
        machines = [stack.enter_context(machine(any_tier, XCACHE_REMOTE_TIMEOUT="20s")) for _ in range(4)]
        # The store makes room at the first write, which takes it long.
        put_and_upload(machines[0], KEY, CONTENT)
        talks = [stack.enter_context(talking(machines[number % 4])) for number in range(16)]

        def run(talk: Conversation, first: int) -> None:
            for key in keys[first:] + keys[:first]:
                answer = outcome(talk, talk.say(get_message(key, 60.0)))
                if isinstance(answer, protocol.Missing):
                    assert answer.lease
                    compiled[key] += 1
                    time.sleep(0.05)
                    assert talk.put(key, key.encode()) == protocol.Stored(True)
                else:
                    assert content_of(talk, answer) == key.encode()
                    found[key] += 1

        in_parallel(run, [(talk, number % 3) for number, talk in enumerate(talks)])
        said = "\n".join((place.dir / protocol.LOG).read_text() for place in machines)
    assert compiled == dict.fromkeys(keys, 1), said
    assert found == dict.fromkeys(keys, 15)
