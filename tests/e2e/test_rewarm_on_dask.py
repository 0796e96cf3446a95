"""``xcache rewarm`` on a Dask cluster, alone and beside another host that wants the same programs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, dask_cluster, wanted, workers_of
from support.namespaces import HERE, THERE, inside
from support.namespaces import namespaces as namespaces
from support.places import Place, new_place, until
from support.toolchains import make_old

from xcache.errors import WorkerError
from xcache.warming import cluster as module
from xcache.warming.building import LocalWorkers, Task
from xcache.warming.cluster import DaskWorkers
from xcache.warming.frames import unpacked
from xcache.warming.place import Place as WorkersPlace
from xcache.warming.process import this_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG = 120
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
x = np.arange(8, dtype=np.float32)
jax.jit(lambda x: (x * 3 + 1).sum())(x)
jax.jit(lambda x: jnp.tanh(x))(x)
jax.jit(lambda x: x.sort())(x)
jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y * 2, x))(x)
import xcache
print(xcache.stats().hits, xcache.stats().misses)
"""
GONE = {
    "the cluster gave it up, or its scheduler is gone",
    # It was noticed before the task was sent.
    "on the cluster: ClosedClientError: Client is closed",
}
# All tasks at once, so that the two hosts certainly want the same at the same time.
TOGETHER = ("--workers", "8")


def ran(place: Place) -> tuple[int, int]:
    done = place.run(PROGRAM, XCACHE="1", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    hits, misses = map(int, done.stdout.split()[-2:])
    return hits, misses


def keys_of(place: Place) -> set[object]:
    return {key for (key,) in place.query("SELECT key FROM entries")}


def rewarm(place: Place, cluster: Cluster, *options: str, under: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Begin the command."""
    return subprocess.Popen(
        [*under, sys.executable, "-m", "xcache", "rewarm", "--dask", cluster.address, "--json", *options],
        env=place.env | {"DASK_TEMPORARY_DIRECTORY": str(place.root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told_by(command: subprocess.Popen[str], code: int = 0) -> dict[str, object]:
    """Return what a command prints once it has ended."""
    said, complaints = command.communicate(timeout=LONG)
    assert command.returncode == code, complaints
    assert "Traceback" not in complaints, complaints
    told: dict[str, object] = json.loads(said)
    return told


@pytest.fixture
def hosts(place: Place) -> Iterator[tuple[Place, Place, dict[str, str]]]:
    """Two hosts whose stores have the same programs, of another toolchain, and the keys that they had."""
    ran(place)
    wanted_keys = make_old(place)
    with new_place() as other:
        shutil.copytree(place.dir, other.dir)
        yield place, other, wanted_keys


@contextlib.contextmanager
def both_waiting(cluster: Cluster, hosts: tuple[Place, Place, dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the commands of two hosts, both of which want all tasks of a cluster that has no worker yet."""
    *places, keys = hosts
    with contextlib.ExitStack() as stack:
        commands = [stack.enter_context(rewarm(place, cluster, *TOGETHER)) for place in places]
        for command in commands:
            stack.callback(command.kill)
        with cluster.asking() as ask:
            assert until(lambda: ask(wanted)[2] == len(keys), LONG), ask(wanted)
        yield commands


@pytest.mark.thorough
def test_two_hosts_share_the_tasks(hosts):
    *places, keys = hosts
    with dask_cluster(places[0]) as cluster, both_waiting(cluster, hosts) as commands:
        cluster.add_worker()
        for command, place in zip(commands, places, strict=True):
            told = told_by(command)
            assert (told["built"], told["failed"], told["left_out"]) == (len(keys), [], [])
            assert keys.keys() <= keys_of(place)
        assert cluster.begun() == {f"xcache-{key}": 1 for key in keys}
    # The entries are those that programs ask for.
    assert [ran(place) for place in places] == [(len(keys), 0)] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_one_host_ends_and_the_other_gets_its_entries(hosts, number):
    *places, keys = hosts
    with dask_cluster(places[0]) as cluster, both_waiting(cluster, hosts) as commands:
        cluster.add_worker()
        assert until(cluster.begun, LONG)
        commands[0].send_signal(number)
        told = told_by(commands[1])
        assert (told["built"], told["failed"], told["left_out"]) == (len(keys), [], [])
        assert keys.keys() <= keys_of(places[1])
        assert "Traceback" not in commands[0].communicate(timeout=LONG)[1]
        assert cluster.begun() == {f"xcache-{key}": 1 for key in keys}


@pytest.mark.thorough
def test_a_scheduler_that_ends_is_said(hosts):
    *places, keys = hosts
    with dask_cluster(places[0]) as cluster, both_waiting(cluster, hosts) as commands:
        cluster.scheduler.kill()
        for command in commands:
            told = told_by(command, 1)
            assert told["built"] == 0
            failed = [entry["key"] for each in told["failed"] for entry in each["entries"]]
            assert sorted(failed) == sorted(keys)
            assert {each["reason"] for each in told["failed"]} <= GONE


@pytest.mark.thorough
def test_a_cluster_of_several_machines(place, namespaces):
    ran(place)
    keys = make_old(place)
    here, there = map(inside, namespaces)
    with dask_cluster(place, under=here, host=HERE) as cluster:
        cluster.add_worker(*there, host=THERE)
        with rewarm(place, cluster, under=here) as command:
            told = told_by(command)
    assert (told["built"], told["failed"], told["left_out"]) == (len(keys), [], [])
    assert ran(place) == (len(keys), 0)


def task(name: str) -> Task:
    """Return a task with a program that no jaxlib reads: its answer comes from a worker process all the same."""
    return Task(name, "jit_f", WorkersPlace("cpu", 1, 1, (), ()), {}, b"", 1.0, lambda: b"nothing")


@contextlib.contextmanager
def connected(cluster: Cluster) -> Iterator[DaskWorkers]:
    with contextlib.closing(DaskWorkers(cluster.address)) as workers:
        yield workers


def compile_and_check(workers: DaskWorkers, name: str) -> None:
    answer = workers.compile(task(name))
    assert "cannot read it" in unpacked(answer["packed"])["refused"]


@pytest.mark.thorough
def test_what_one_host_has_got_another_gets_later(place, monkeypatch):
    with dask_cluster(place, workers=1) as cluster, connected(cluster) as one, connected(cluster) as other:
        compile_and_check(one, "a")
        compile_and_check(other, "a")
        assert cluster.begun() == {"xcache-a": 1}
        # Not all of it: what is kept has a bound.
        monkeypatch.setattr(module, "_MOST_KEPT_BYTES", 0)
        compile_and_check(one, "b")
        with cluster.asking() as ask:
            # The other one has its "a" still.
            assert until(lambda: ask(wanted) == {1: 1})
        compile_and_check(other, "b")
        assert cluster.begun() == {"xcache-a": 1, "xcache-b": 2}


def test_tasks_use_one_process_one_after_the_other(place):
    with dask_cluster(place) as cluster:
        worker = cluster.add_worker()
        with connected(cluster) as workers:
            compile_and_check(workers, "0")
            (process,) = workers_of(worker.pid)
            for number in range(1, 5):
                compile_and_check(workers, f"{number}")
            assert workers_of(worker.pid) == [process]
            # One that was killed meanwhile costs no task.
            os.kill(process, signal.SIGKILL)
            assert until(lambda: is_gone(process))
            compile_and_check(workers, "next")
            (process,) = workers_of(worker.pid)
    # It ends with the cluster.
    assert until(lambda: is_gone(process))


def answering(answer: object) -> Callable[..., object]:
    """Return a function that a worker of the cluster gets as it is, and that answers so, or raises it."""

    def answer_so(*_: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return answer_so


def test_a_cluster_that_answers_something_else_costs_the_program_alone(place, monkeypatch):
    answers: dict[str, tuple[object, str]] = {
        "none": (None, "cannot be read"),
        "a list": (["packed"], "cannot be read"),
        "packed wrongly": ({"packed": 7}, "cannot be read"),
        # A wait for an answer raises this, too.
        "timed out": (TimeoutError("a file system does not answer"), "a file system does not answer"),
    }
    with dask_cluster(place, workers=1) as cluster, connected(cluster) as workers:
        for name, (answer, said) in answers.items():
            monkeypatch.setattr(module, "compile_there", answering(answer))
            with pytest.raises(WorkerError, match=said):
                workers.compile(task(name))


@pytest.mark.thorough
def test_a_scheduler_that_hangs_is_not_waited_for(place):
    with dask_cluster(place) as cluster, connected(cluster) as workers:
        os.kill(cluster.scheduler.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match="on the cluster"):
                workers.compile(task("a"))
        finally:
            os.kill(cluster.scheduler.pid, signal.SIGCONT)


@pytest.mark.thorough
def test_a_process_does_not_outlive_a_worker_of_the_cluster_that_is_killed(place):
    with dask_cluster(place) as cluster:
        worker = cluster.add_worker()
        with connected(cluster) as workers:
            compile_and_check(workers, "a")
            (process,) = workers_of(worker.pid)
            worker.kill()
            assert until(lambda: is_gone(process))


@pytest.mark.thorough
def test_processes_that_nobody_uses_end(monkeypatch):
    kept = module._Kept()

    def use() -> int:
        with kept.in_use() as workers:
            workers.ask(task("a").place, task("a").message(), 100.0)
            (found,) = workers_of(os.getpid())
            return found

    process = use()
    assert use() == process
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.01)
    assert use() == process
    assert until(lambda: is_gone(process))
    monkeypatch.setattr(module, "_IDLE_SECONDS", 60.0)
    assert use() != process
    assert kept._timer is not None
    kept._timer.cancel()
    kept._timer.join(10.0)
    kept._end()
    assert not workers_of(os.getpid())


@pytest.mark.thorough
def test_a_process_that_is_killed_at_work_costs_one_task():
    workers = LocalWorkers(this_python())
    with contextlib.closing(workers):
        with pytest.raises(WorkerError, match="did not end within 0 s"):
            workers.ask(task("a").place, task("a").message(), 0.0)
        assert "packed" in workers.ask(task("b").place, task("b").message(), 100.0)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, also if nobody has asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
