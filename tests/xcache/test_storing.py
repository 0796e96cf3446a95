"""The store queue: every job is done, or counted as dropped; every wait is bounded."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from support.places import until

from xcache import storing
from xcache.storing import StoreQueue


class Recorder:
    """Notes its jobs, and blocks where a test says so."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.reports = 0
        self.late = False
        self.pauses: list[float] = []
        self.threads: set[int] = set()
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def work(self, job: object) -> None:
        self.started.set()
        self.threads.add(threading.get_ident())
        assert self.gate.wait(30)
        self.done.append(job)

    def report(self) -> None:
        self.reports += 1

    def queue(self) -> StoreQueue[object]:
        return StoreQueue(self.work, self.report, lambda: self.late, self.pause)

    def pause(self) -> float:
        return self.pauses[0] if self.pauses else 0.0


@pytest.fixture
def recorder():
    made = Recorder()
    yield made
    made.gate.set()


def storing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "xcache-store"]


@pytest.fixture(autouse=True)
def no_thread_stays(recorder):
    yield
    recorder.gate.set()
    assert until(lambda: not storing_threads())


def test_jobs_wait_for_the_end_of_a_pause(recorder):
    recorder.pauses = [0.01]
    queue = recorder.queue()
    kept = [queue.add(number, 0.0) for number in range(storing._MAX_KEPT_JOBS + 1)]
    assert kept == [True] * storing._MAX_KEPT_JOBS + [False]
    assert not recorder.started.wait(0.1)
    recorder.pauses.clear()
    assert queue.finish(20) == 0
    assert len(recorder.done) == storing._MAX_KEPT_JOBS


def test_an_exit_does_not_wait_for_the_end_of_a_pause(recorder):
    recorder.pauses = [storing._LONGEST_PAUSE_SECONDS]
    queue = recorder.queue()
    assert queue.add("job", 0.0)
    assert queue.finish(20) == 0
    assert recorder.done == ["job"]


def test_no_job_is_kept_through_a_long_pause(recorder):
    recorder.pauses = [1000.0]
    queue = recorder.queue()
    assert queue.add("job", 0.0)
    assert until(lambda: recorder.done == ["job"])
    assert queue.finish(20) == 0


def test_everything_is_done_in_order_on_one_thread(recorder):
    queue = recorder.queue()
    for job in range(100):
        assert queue.add(job, weight=1.0)
    assert queue.finish(30.0) == 0
    assert recorder.done == list(range(100))
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads
    assert recorder.reports == 1


def test_the_thread_ends_when_idle_and_starts_again(recorder, monkeypatch):
    monkeypatch.setattr(storing, "_LINGER_SECONDS", 0.01)
    queue = recorder.queue()
    for job in range(3):
        queue.add(job, weight=1.0)
        assert until(lambda: not storing_threads())
        assert recorder.done == list(range(job + 1))
        assert recorder.reports == job + 1


def test_finishing_twice_and_going_on_afterwards(recorder):
    queue = recorder.queue()
    assert queue.finish(30.0) == queue.finish(30.0) == 0
    queue.add("a", weight=1.0)
    assert queue.finish(30.0) == 0
    assert recorder.done == ["a"]


def test_jobs_not_done_in_time_are_dropped_and_counted(recorder):
    recorder.gate.clear()
    queue = recorder.queue()
    for job in range(5):
        queue.add(job, weight=1.0)
    assert recorder.started.wait(30)
    # One is being worked on, four wait.
    assert queue.finish(0.01) == 5
    recorder.gate.set()
    assert until(lambda: not storing_threads())
    assert recorder.done == [0]
    queue.add("after", weight=1.0)
    assert queue.finish(30.0) == 0
    assert recorder.done == [0, "after"]


def test_a_job_that_took_long_to_compile_is_worth_a_longer_wait(recorder):
    recorder.gate.clear()
    queue = recorder.queue()
    queue.add("cheap", weight=0.01)
    assert recorder.started.wait(30)
    assert queue.finish(0.01) == 1
    queue.add("dear", weight=300.0)
    threading.Timer(0.3, recorder.gate.set).start()
    assert queue.finish(0.01) == 0
    assert recorder.done == ["cheap", "dear"]


def test_the_wait_for_a_late_daemon_is_bounded_whatever_would_be_lost(recorder):
    recorder.gate.clear()
    queue = recorder.queue()
    # A tenth of it would be longer than the test may last.
    queue.add("dear", weight=1e6)
    assert recorder.started.wait(30)
    recorder.late = True
    assert queue.finish(0.01) == 1


def test_a_full_queue_refuses_jobs(recorder, monkeypatch):
    monkeypatch.setattr(storing, "_MAX_JOBS", 3)
    recorder.gate.clear()
    queue = recorder.queue()
    assert queue.add(0, weight=1.0)
    assert recorder.started.wait(30)
    assert [queue.add(job, weight=1.0) for job in (1, 2, 3, 4)] == [True, True, True, False]
    recorder.gate.set()
    assert queue.finish(30.0) == 0
    assert recorder.done == [0, 1, 2, 3]


def test_a_job_refused_for_lack_of_a_thread_is_not_counted_as_dropped(recorder, monkeypatch):
    """The caller of add() has counted it already."""
    queue = recorder.queue()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not queue.add("refused", weight=1.0)
        assert queue.finish(30.0) == 0
    assert queue.add("taken", weight=1.0)
    assert queue.finish(30.0) == 0
    assert recorder.done == ["taken"]


def test_a_finished_job_is_not_kept_alive(recorder):
    """It holds an executable, which may hold gigabytes."""

    class Job:
        pass

    job = Job()
    alive = weakref.ref(job)
    queue = StoreQueue(lambda job: None, recorder.report, bool, float)
    queue.add(job, weight=1.0)
    del job
    assert until(lambda: gc.collect() is None or alive() is None)
    assert storing_threads()
    assert queue.finish(30.0) == 0


def test_a_report_is_sent_once_without_a_job(recorder, monkeypatch):
    monkeypatch.setattr(storing, "_LINGER_SECONDS", 0.05)
    queue = recorder.queue()
    for _ in range(10):
        queue.report_soon()
    assert until(lambda: not storing_threads())
    assert recorder.reports == 1


def test_a_count_made_during_a_report_is_reported_soon_after(recorder, monkeypatch):
    monkeypatch.setattr(storing, "_LINGER_SECONDS", 0.01)

    def report() -> None:
        recorder.report()
        if recorder.reports == 1:
            queue.report_soon()

    queue = StoreQueue(recorder.work, report, bool, float)
    queue.report_soon()
    assert until(lambda: not storing_threads())
    assert recorder.reports == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("raising", ["work", "report"])
def test_an_unexpected_exception_loses_one_job_only(recorder, monkeypatch, raising):
    """Later jobs are done, and finish() does not hang."""
    monkeypatch.setattr(storing, "_LINGER_SECONDS", 0.01)

    def fail_once(call):
        def failing(*arguments):
            if not recorder.started.is_set():
                recorder.started.set()
                raise ValueError("unforeseen")
            return call(*arguments)

        return failing

    calls = {"work": recorder.work, "report": recorder.report}
    calls[raising] = fail_once(calls[raising])
    queue = StoreQueue(**calls, is_late=bool, pause=float)
    if raising == "work":
        queue.add("lost", weight=1.0)
    else:
        queue.report_soon()
    assert recorder.started.wait(30)
    assert until(lambda: not storing_threads())
    queue.add("next", weight=1.0)
    assert queue.finish(1.0) == 0
    assert recorder.done == ["next"]


def test_many_threads_add_at_once(recorder):
    queue = recorder.queue()

    def add(start: int) -> None:
        for job in range(start, start + 100):
            queue.add(job, weight=0.1)

    threads = [threading.Thread(target=add, args=(start,)) for start in range(0, 800, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.finish(30.0) == 0
    assert sorted(recorder.done) == list(range(800))


def test_at_exit_a_program_waits_for_what_it_queued(place):
    said = place.run(
        "import atexit, time\n"
        "from xcache.storing import StoreQueue\n"
        "queue = StoreQueue(lambda job: (time.sleep(0.01), print(job)), lambda: print('told'), bool, float)\n"
        "atexit.register(lambda: print('dropped', queue.finish(30.0)))\n"
        "for job in range(5): queue.add(job, 1.0)\n"
    )
    assert (said.stdout.split("\n"), said.stderr) == (["0", "1", "2", "3", "4", "told", "dropped 0", ""], "")


def test_a_forked_child_without_its_thread_still_ends(place):
    """Only the parent has the thread; the child makes a new queue, and the old one must not hang it."""
    said = place.run(
        "import os, time\n"
        "from xcache.storing import StoreQueue\n"
        "queue = StoreQueue(lambda job: time.sleep(0.2), lambda: None, bool, float)\n"
        "queue.add(1, 0.1)\n"
        "if (child := os.fork()) == 0:\n"
        "    fresh = StoreQueue(lambda job: print(job), lambda: None, bool, float)\n"
        "    fresh.add('in the child', 1.0)\n"
        "    print(fresh.finish(30.0), flush=True)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert (said.stdout, said.returncode) == ("in the child\n0\n0\n", os.EX_OK), said.stderr
