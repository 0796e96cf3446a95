"""Lock files: their text, and what several processes make of one file."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from support.places import REPOSITORY, digest, until

from xcache import clock, lock_file, wanted
from xcache.errors import LockFileError
from xcache.lock_file import Made, Program

CPU = Made("cpu", "cpu", "0.10.2", digest(b"toolchain"))
GPU = Made("cuda", "NVIDIA H100 80GB HBM3", "0.10.2", digest(b"another"))
ONE, TWO, THREE = (digest(name) for name in (b"one", b"two", b"three"))
# Longer than any file here is old.
AGES = 1000.0


def made(name: str = "jit_f", seconds: float = 1.0, by: Made = CPU) -> Program:
    return lock_file.tidied(Program(name, seconds, by))


def test_a_text_is_read_as_it_was_written():
    programs = {ONE: made("jit_f", 1.25), TWO: made("jit_a b", 1234.0, GPU), THREE: made("", 0.0)}
    text = lock_file.render(programs)
    assert lock_file.parse(text) == programs
    assert text == lock_file.render(dict(reversed(programs.items())))
    assert f"{ONE}     1.2 s  jit_f\n" in text
    assert f"{TWO}    1200 s  jit_a b\n" in text
    assert f"{THREE}    0.01 s\n" in text
    assert "platform   cuda\ndevice     NVIDIA H100 80GB HBM3\njaxlib     0.10.2\n" in text
    # Names, so that one reads a change of a program in one place.
    assert lock_file.render({ONE: made("jit_b"), TWO: made("jit_a")}).index("jit_a") < lock_file.render(
        {ONE: made("jit_b"), TWO: made("jit_a")}
    ).index("jit_b")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e30, 123456.789])
@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 5000, "  padded ", "# no remark", "\udc80"])
def test_whatever_a_program_is_called_it_has_one_line(name, seconds):
    programs = {ONE: made(name, seconds)}
    text = lock_file.render(programs).encode("utf-8", "replace").decode()
    assert len(text.splitlines()) == 8 and len(text) < 1000
    (found,) = lock_file.parse(text).values()
    assert 0.01 <= found.seconds <= 1e9
    assert found == programs[ONE]._replace(module_name=found.module_name)


def test_a_person_may_edit_it():
    text = lock_file.render({ONE: made("jit_f"), TWO: made("jit_g")})
    assert list(lock_file.parse(text.replace("jit_f", "jit_f\n# kept for now\n\n").replace("\n", "\r\n"))) == [ONE, TWO]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no lock file"),
        ("numpy==2\n", "no lock file"),
        ("xcache lock 2\n", "its format is another one (xcache lock 2)"),
        (f"xcache lock 1\n{ONE}  1 s  jit_f\n", "line 2 is not understood"),
        ("<text>\n<<<<<<< ours\n", "line 9 is not understood: <<<<<<< ours"),
        ("<text>\nplatform cpu\n" + f"{TWO}  1 s  f\n", "line 10 is not understood"),
        ("<text>" + f"{TWO}  1.2.3 s  f\n", "line 9 has no time"),
        ("<text>" + f"{TWO[:-1]}  1 s  f\n", "line 9 is not understood"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    text = text.replace("<text>\n", "<text>").replace("<text>", lock_file.render({ONE: made()}))
    with pytest.raises(LockFileError, match=re.escape(said)):
        lock_file.parse(text)


def test_small_differences_of_compile_times_change_no_line():
    old = {ONE: made(seconds=1.0), TWO: made(seconds=1.0), THREE: made(seconds=1.0)}
    new = {ONE: made(seconds=1.9), TWO: made(seconds=0.4)}
    assert lock_file.merged(old, new, is_same_run=False) == {ONE: made(seconds=1.0), TWO: made(seconds=0.4)}
    assert lock_file.merged(old, new, is_same_run=True)[THREE] == old[THREE]


def test_a_run_takes_over_what_was_written_since_it_began(tmp_path):
    path = tmp_path / "run.lock"
    wanted.update(path, {ONE: made("jit_f")}, AGES)
    wanted.update(path, {TWO: made("jit_g")}, AGES)
    assert lock_file.parse(path.read_text()).keys() == {ONE, TWO}
    os.utime(path, (time.time() - 100, time.time() - 100))
    wanted.update(path, {THREE: made("jit_h")}, 50.0)
    assert lock_file.parse(path.read_text()).keys() == {THREE}
    # Nothing else is left there, and others may read it as the umask says.
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o640)
    wanted.update(path, {ONE: made("jit_f")}, AGES)
    assert path.stat().st_mode & 0o777 == 0o640


def test_processes_that_end_at_once_lose_no_lines(tmp_path):
    path = tmp_path / "run.lock"
    keys = [digest(b"%d" % number) for number in range(24)]
    start = threading.Barrier(len(keys))

    def end(key: str) -> None:
        start.wait(30)
        wanted.update(path, {key: made()}, AGES)

    threads = [threading.Thread(target=end, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert lock_file.parse(path.read_text()).keys() == set(keys)


@pytest.mark.parametrize("content", [b"numpy==2\n", b"xcache lock 9\nnewer", b"\xff\x00"])
def test_a_file_that_is_something_else_stays(tmp_path, content):
    path = tmp_path / "uv.lock"
    path.write_bytes(content)
    with pytest.raises(LockFileError, match="stays as it is"):
        wanted.update(path, {ONE: made()}, AGES)
    assert path.read_bytes() == content


def test_a_damaged_lock_file_is_made_anew(tmp_path):
    path = tmp_path / "run.lock"
    for content in ("", lock_file.render({ONE: made()}) + "<<<<<<< ours\n"):
        path.write_text(content)
        wanted.update(path, {TWO: made()}, AGES)
        assert lock_file.parse(path.read_text()).keys() == {TWO}


def test_what_is_no_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "no" / "folder"):
        with pytest.raises((OSError, LockFileError)):
            wanted.update(path, {ONE: made()}, AGES)
    wanted.update(tmp_path / "real", {ONE: made()}, AGES)
    (tmp_path / "link").symlink_to("real")
    wanted.update(tmp_path / "link", {TWO: made()}, AGES)
    assert (tmp_path / "link").is_symlink()
    assert lock_file.parse((tmp_path / "real").read_text()).keys() == {ONE, TWO}


def test_a_file_that_hangs_holds_up_nobody_for_long(tmp_path):
    path, troubles = tmp_path / "run.lock", []
    wanted.update(path, {ONE: made()}, AGES)
    process = wanted.Wanted(path, lambda error, effect: troubles.append(str(error)), 0.0)
    process._programs, process._is_written = {TWO: made()}, False
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process.write(0.05)
        assert troubles == [f"{path} could not be written: that takes longer than 0.1 s"]
    # The thread that was left behind goes on.
    assert until(lambda: TWO in lock_file.parse(path.read_text()))
    assert until(lambda: not any(thread.name == "xcache-lock" for thread in threading.enumerate()))


def test_where_no_thread_can_be_started_it_is_written_all_the_same(tmp_path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    process = wanted.Wanted(tmp_path / "run.lock", lambda error, effect: pytest.fail(str(error)), 0.0)
    process._programs, process._is_written = {TWO: made()}, False
    monkeypatch.setattr(threading.Thread, "start", refuse)
    process.write(1.0)
    assert lock_file.parse((tmp_path / "run.lock").read_text()).keys() == {TWO}


PARENT = "import subprocess, sys, time; time.sleep(0.3); subprocess.run(sys.argv[1:], check=True)"
CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from xcache import clock; print(clock.command_began('OF_TEST'))"


def test_a_command_begins_with_the_outermost_process_that_has_the_variable():
    before = clock.since_boot()
    child = [sys.executable, "-c", CHILD, str(REPOSITORY)]

    def began(*command: str, **variables: str) -> float:
        env = {name: value for name, value in os.environ.items() if name != "OF_TEST"} | variables
        return float(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)

    # Clock ticks are a hundredth of a second.
    alone, waited = began(*child) - before, 0.3 - 0.02
    assert -0.02 <= alone < 30
    start = clock.since_boot()
    assert began(sys.executable, "-c", PARENT, *child, OF_TEST="x") - start < waited
    start = clock.since_boot()
    changed = ["env", "OF_TEST=other", *child]
    assert began(sys.executable, "-c", PARENT, *changed, OF_TEST="x") - start >= waited
