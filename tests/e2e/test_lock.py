"""A run writes which programs it wanted, however it gets them and however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.marks import further
from support.places import Place
from support.program_files import program_text

from xcache import lock_file
from xcache.lock_file import Program

pytestmark = pytest.mark.once

ONE = """
import sys
def only(n):
    import jax, numpy as np
    def f(x): return x * n
    f.__name__ = f"times_{n}"
    jax.jit(f)(np.ones(3, np.float32)).block_until_ready()
"""

# Waits for as many executables as the environment says to be loaded ahead, however busy the machine is.
AHEAD = """
import os, time
import jax
from xcache.prefetch import prefetcher
prefetcher._ON_TRUST_SECONDS = 1000.0
prefetcher.processors.Processors.are_taken = lambda _: False
deadline = time.monotonic() + 60
while len(jax.devices()[0].client.live_executables()) < int(os.environ["AHEAD"]) and time.monotonic() < deadline:
    time.sleep(0.01)
"""


@pytest.fixture
def lock(place) -> Path:
    return place.root / "run.lock"


def run(place: Place, source: str, *arguments: str, code: int = 0, said: str = "", **environment: str) -> str:
    """Run a program whose lock is ``run.lock``; return its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", ONE + textwrap.dedent(source), *arguments],
        env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu", "XCACHE_LOCK": "run.lock"} | environment,
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    return done.stderr


def programs(lock: Path) -> dict[str, Program]:
    return lock_file.parse(lock.read_text())


def names(lock: Path) -> list[str]:
    return sorted(program.module_name for program in programs(lock).values())


def test_every_way_to_an_executable_is_in_it_and_the_same_run_gives_the_same_bytes(place, lock):
    program = place.root / "program.py"
    program.write_text(AHEAD + program_text("train_a_little"))

    def train(ahead: int = 0, **environment: str) -> bytes:
        env = place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu", "XCACHE_LOCK": str(lock), "AHEAD": str(ahead)}
        done = subprocess.run(
            [sys.executable, program], env=env | environment, capture_output=True, timeout=150, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout

    train()
    first = lock.read_bytes()
    stored = dict(place.query("SELECT key, module_name FROM entries"))
    assert {key: each.module_name for key, each in programs(lock).items()} == stored
    ((toolchain, jaxlib),) = place.query("SELECT DISTINCT toolchain_component, jaxlib_version FROM entries")
    assert {each.made for each in programs(lock).values()} == {lock_file.Made("cpu", "cpu", jaxlib, toolchain)}
    # Loaded ahead, without lowering; then one after the other; then lowered; then without a daemon that could be asked.
    assert b'"prefetched": 0' not in train(ahead=len(stored))
    assert lock.read_bytes() == first
    for setting in ({"XCACHE_PREFETCH": "0"}, {"XCACHE_LOWERING": "off"}, {"XCACHE": "readonly"}):
        lock.unlink()
        train(**setting)
        assert lock.read_bytes() == first, setting
    lock.unlink()
    train(XCACHE="refresh")
    assert programs(lock).keys() == stored.keys()


def test_calls_that_are_not_traced_are_in_it(place, lock):
    pytest.importorskip("jax", minversion="0.8")
    source = """
    import numpy as np, xcache
    @xcache.jit(version="1")
    def f(x): return x * 2 + 1
    f(np.ones(3, np.float32)).block_until_ready()
    print(xcache.stats().calls.get("skipped", 0))
    """
    run(place, source, said="0\n")
    first = lock.read_bytes()
    assert names(lock) == ["jit_f"]
    run(place, source, said="1\n")
    assert lock.read_bytes() == first


@pytest.mark.thorough
def test_another_run_replaces_what_an_earlier_one_wanted(place, lock):
    run(place, "only(1); only(2)")
    run(place, "only(2); only(3)")
    assert names(lock) == ["jit_times_2", "jit_times_3"]
    # A process that wants nothing leaves it alone, as does one without the setting.
    before = lock.stat()
    run(place, "import jax; jax.devices()")
    run(place, "only(4)", XCACHE_LOCK="")
    assert (lock.stat().st_mtime_ns, lock.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_of_one_command_are_one_run(place, lock):
    run(place, "only(1)")
    source = """
    import subprocess
    program = sys.argv[1]
    for n in (2, 3):
        subprocess.run([sys.executable, "-c", f"{program}\\nonly({n})"], check=True)
    """
    run(place, source, ONE)
    assert names(lock) == ["jit_times_2", "jit_times_3"]
    # Forked ones end without what is registered for the end of a process. The parent has no threads of jax's yet.
    source = """
    import multiprocessing
    if __name__ == "__main__":
        begun = [multiprocessing.get_context("fork").Process(target=only, args=(n,)) for n in (4, 5, 6, 7)]
        for process in begun[:2]: process.start()
        for process in begun[:2]: process.join()
        for process in begun[2:]: process.start(); process.join()
        assert not any(process.exitcode for process in begun)
        only(8)
    """
    for _ in range(2):
        # They compile the first time, and the second time they do not.
        run(place, source)
        assert names(lock) == [f"jit_times_{n}" for n in (4, 5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(3)", 3),
        *further(("raise ValueError", 1)),
        ("signal.signal(15, lambda *_: sys.exit(4)); os.kill(os.getpid(), 15); time.sleep(60)", 4),
        *further(("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT)),
    ],
    ids=["exit", "exception", "SIGTERM", "Ctrl-C"],
)
def test_it_is_written_however_the_program_ends(place, lock, end, code):
    run(place, f"import os, signal, time; only(1); {end}", code=code)
    assert names(lock) == ["jit_times_1"]


@pytest.mark.thorough
def test_switching_off_is_an_end_too(place, lock):
    source = """
    import xcache
    with xcache.enable(lock=sys.argv[1]): only(1)
    print(open(sys.argv[1]).read().count("jit_times"))
    only(2)
    with xcache.enable(lock=sys.argv[1]): only(3)
    """
    run(place, source, str(lock), said="1\n", XCACHE_LOCK="", XCACHE="0")
    assert names(lock) == ["jit_times_1", "jit_times_3"]


@pytest.mark.thorough
def test_what_can_never_be_stored_is_not_in_it(place, lock):
    # A serialization that fails before the program runs it fails for ever.
    sort = "import jax, numpy as np; jax.jit(lambda x: jax.numpy.sort(x))(np.ones(300, np.float32))"
    source = """
    only(1)
    from xcache import cache
    cache.serialize_first = lambda request, executable: RuntimeError("UNIMPLEMENTED: not here")
    """
    source = textwrap.dedent(source) + sort
    run(place, source)
    assert place.query("SELECT reason FROM not_cacheable") == [("not serializable",)]
    assert names(lock) == ["jit_times_1"]
    run(place, f"only(1); {sort}")
    assert names(lock) == ["jit_times_1"]


def test_without_a_daemon_it_is_written_all_the_same(place, lock):
    run(place, "only(1)", XCACHE_AUTOSTART="0")
    assert names(lock) == ["jit_times_1"]
    assert not place.answers()


@pytest.mark.thorough
def test_what_cannot_be_written_is_said_once_and_changes_nothing(place):
    (place.root / "requirements.lock").write_text("numpy==2\n")
    for path, reason in {
        place.root / "no" / "run.lock": "No such file or directory",
        place.root: "Is a directory",
        place.root
        / "requirements.lock": "there is a file that is no lock file of this xcache's, and it stays as it is",
    }.items():
        said = run(place, "only(1); only(2)", XCACHE_LOCK=str(path))
        assert said == f"xcache: {path} could not be written: {reason} (lock file); the program is not affected\n"
    assert (place.root / "requirements.lock").read_text() == "numpy==2\n"


@pytest.mark.thorough
def test_a_killed_process_writes_nothing(place, lock):
    with subprocess.Popen(
        [sys.executable, "-c", ONE + "only(1); print(flush=True); import time; time.sleep(60)"],
        env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu", "XCACHE_LOCK": str(lock)},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
    assert not lock.exists()
