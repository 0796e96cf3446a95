"""The guard raises or warns when something is compiled that must not be."""

from __future__ import annotations

import threading

import pytest

from xcache.clock import monotonic
from xcache.errors import CompileInGuardError
from xcache.guard import Guard


def check(guard: Guard, on_miss: str = "allow", since: float | None = None) -> None:
    guard.check("jit_step (called at serve.py:3)", "new", on_miss, since)


def test_a_compile_within_it_is_an_error_that_names_the_program_and_the_cause():
    guard = Guard()
    check(guard)
    with guard.forbidding(), pytest.raises(CompileInGuardError, match=r"jit_step \(called at serve.py:3\).*new"):
        check(guard)
    check(guard)


def test_it_holds_on_every_thread_and_until_the_last_has_left():
    guard = Guard()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            check(guard)
        except CompileInGuardError as error:
            raised.append(error)

    with guard.forbidding():
        with guard.forbidding():
            pass
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert len(raised) == 1


def test_a_generator_that_is_not_finished_forbids_until_it_is_closed():
    guard = Guard()

    def serve():
        with guard.forbidding():
            yield

    serving = serve()
    next(serving)
    with pytest.raises(CompileInGuardError):
        check(guard)
    serving.close()
    check(guard)


def test_a_forked_child_keeps_the_guard_of_its_own_thread_only():
    guard = Guard()
    entered, done = threading.Event(), threading.Event()

    def work() -> None:
        with guard.forbidding():
            entered.set()
            done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    guard.begin_in_child()
    check(guard)
    with guard.forbidding():
        guard.begin_in_child()
        with pytest.raises(CompileInGuardError):
            check(guard)
    done.set()
    thread.join(30)
    check(guard)


@pytest.mark.parametrize("on_miss", ["allow", "warn", "fail"])
def test_the_setting_holds_once_the_program_is_warmed_up(on_miss, caplog):
    guard = Guard()
    check(guard, on_miss)
    assert not caplog.records
    guard.warm()
    if on_miss == "fail":
        with pytest.raises(CompileInGuardError, match="after the program was warmed up"):
            check(guard, on_miss)
    else:
        check(guard, on_miss)
    assert len(caplog.records) == (on_miss == "warn")


def test_the_setting_holds_after_a_time(caplog):
    check(Guard(), "fail", monotonic() + 1000)
    with pytest.raises(CompileInGuardError, match="while XCACHE_ON_MISS=fail holds: "):
        check(Guard(), "fail", monotonic())
    assert not caplog.records
    check(Guard(), "warn", monotonic())
    assert "is compiled while XCACHE_ON_MISS=warn holds: " in caplog.text


def test_it_says_once_what_was_compiled_while_the_setting_did_not_hold():
    guard, later = Guard(), monotonic() + 1000
    assert guard.unheld("fail", None) == ""
    check(guard, "fail")
    assert guard.unheld("fail", None) == (
        "XCACHE_ON_MISS=fail did not hold, because xcache.warmed_up() was not called and no XCACHE_ON_MISS_AFTER is"
        " set: 1 program was compiled; with XCACHE_ON_MISS_AFTER=0 it holds from the first compile on"
    )
    assert guard.unheld("fail", None) == ""
    for _ in range(2):
        check(guard, "warn", later)
    said = guard.unheld("warn", later)
    assert "XCACHE_ON_MISS=warn did not hold" in said
    assert "the time of XCACHE_ON_MISS_AFTER has not come: 2 programs were compiled" in said


def test_it_says_nothing_of_a_setting_that_allows_or_held_in_the_end_nor_of_the_parents_programs():
    guard = Guard()
    check(guard)
    assert guard.unheld("allow", None) == ""
    check(guard, "fail")
    guard.begin_in_child()
    assert guard.unheld("fail", None) == ""
    check(guard, "fail")
    assert guard.unheld("fail", monotonic()) == ""
    check(guard, "fail")
    guard.warm()
    assert guard.unheld("fail", None) == ""
