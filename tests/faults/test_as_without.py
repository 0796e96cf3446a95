"""Exit codes, signals, tracebacks, threads, processes and descriptors of a program are what they are without xcache."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from support.alongside import ended, makes_no_difference, running, write
from support.marks import thorough

pytestmark = pytest.mark.slow

EXITS = """
print(work(1))
import atexit
atexit.register(print, "at exit")
sys.exit(3)
"""

LEAVES_AT_ONCE = """
print(work(1), flush=True)
os._exit(7)
"""

RAISES = """
def step(k):
    print(work(k))
    if k == 3:
        raise ValueError("the third")
for k in range(9):
    step(k)
"""

RAISES_WHILE_TRACED = """
print(work(1))
@jax.jit
def f(v):
    raise KeyError("in here")
f(x)
"""

COMPILER_RAISES = """
print(work(1))
jax.jit(lambda v: v + 1, compiler_options={"xla_no_such_option": True})(x)
"""

ABORTS = """
print(work(1), flush=True)
os.kill(os.getpid(), signal.SIGABRT)
"""

IS_TERMINATED = """
print(work(1), flush=True)
threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGTERM)).start()
for k in range(2, 100000):
    work(k)
"""

# jax itself drops what a handler raises within these: by an except without a class, and in what the collector calls.
RAISES_WHERE_IT_IS_HEARD = """
import gc
gc.disable()
DROPS = {"get_out_shardings_from_executable", "_get_layouts_from_executable", "_xla_gc_callback"}
def ends_at(signal_number, end):
    def handler(number, frame):
        above = frame
        while above is not None:
            if above.f_code.co_name in DROPS:
                return threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            above = above.f_back
        end(number, frame)
    signal.signal(signal_number, handler)
"""

CATCHES_SIGTERM = (
    RAISES_WHERE_IT_IS_HEARD
    + """
def leave(number, frame):
    print("leaving")
    sys.exit(9)
ends_at(signal.SIGTERM, leave)
print(work(1), flush=True)
timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGTERM))
timer.start()
try:
    for k in range(2, 100000):
        work(k)
finally:
    timer.join()
"""
)

HEEDS_NO_INTERRUPT = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
print([work(k) for k in range(12)])
"""

ALARMED_ALL_THE_TIME = """
alarms = 0
def count(number, frame):
    global alarms
    alarms += 1
signal.signal(signal.SIGALRM, count)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
print([work(k) for k in range(12)], alarms > 0)
signal.setitimer(signal.ITIMER_REAL, 0)
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(list(pool.map(work, range(16))))
"""

# One that compiles at that moment may end in C++'s terminate(), by Python's own doing, with or without xcache.
DAEMONIC_THREADS = """
def for_ever():
    print(work(5), flush=True)
    compiled.set()
    while True:
        time.sleep(0.001)
compiled = threading.Event()
threading.Thread(target=for_ever, daemon=True).start()
compiled.wait()
print(work(1))
"""

COMPILES_AT_EXIT = """
import atexit
atexit.register(lambda: print(work(3)))
print(work(1))
atexit.register(lambda: print(work(2)))
"""

COMPILES_IN_A_FINALIZER = """
class Late:
    def __del__(self):
        print(work(4))
late = Late()
print(work(1))
late.itself = late
"""

FORKS = """
import warnings
warnings.simplefilter("ignore")
# A child does not have its parent's threads, so jax crashes or hangs as the child ends, without xcache too. This is
# registered before the cache is made, so it comes after what xcache does at the exit.
import atexit
atexit.register(lambda: os.getpid() == parent or os._exit(7))
parent = os.getpid()
print(work(1), flush=True)
for code in (0, 5):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
pid = os.fork()
if pid == 0:
    sys.exit(6)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(work(2))
"""

HAS_NO_CHILD_IT_DID_NOT_MAKE = """
gone = []
def reap(number, frame):
    try:
        while (pid := os.waitpid(-1, os.WNOHANG)[0]):
            gone.append(pid)
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)
print(work(1))
mine = os.posix_spawn("/bin/true", ["true"], os.environ)
deadline = time.monotonic() + 20
while mine not in gone and time.monotonic() < deadline:
    work(2)
    time.sleep(0.01)
print(gone == [mine])
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
try:
    print(os.wait())
except ChildProcessError as error:
    print(error)
"""

IGNORES_CHILDREN = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print([work(k) for k in range(5)])
"""

FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
print([work(k) for k in range(12)])
"""

NO_DIRECTORY = """
import tempfile
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
print([work(k) for k in range(5)])
"""

HAS_ITS_OWN_DESCRIPTORS = """
import subprocess
print(work(1), flush=True)
# The child inherits all descriptors that are not closed on exec, on purpose or by mistake.
subprocess.run(["/bin/ls", "-l", "/proc/self/fd"], close_fds=False, stdout=open("listed", "w"))
print([line.split()[-3] for line in open("listed") if "->" in line and "/proc/" not in line])
"""

RUNS_A_LOOP = """
import asyncio
async def main():
    loop = asyncio.get_running_loop()
    done = await asyncio.gather(*(loop.run_in_executor(None, work, k) for k in range(12)))
    process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 4")
    try:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 0.2), 0.01)
    except TimeoutError:
        print("timed out")
    return done, await process.wait(), work(77)
print(asyncio.run(main()))
"""

LOGS = """
import logging
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
logging.getLogger("mine").warning("%s", work(1))
"""

PROGRAMS = {
    "exits": (EXITS, 3),
    "leaves at once": (LEAVES_AT_ONCE, 7),
    "raises": (RAISES, 1),
    "raises while traced": (RAISES_WHILE_TRACED, 1),
    "the compiler raises": (COMPILER_RAISES, 1),
    "aborts": (ABORTS, -signal.SIGABRT),
    "is terminated": (IS_TERMINATED, -signal.SIGTERM),
    "catches SIGTERM": (CATCHES_SIGTERM, 9),
    "heeds no interrupt": (HEEDS_NO_INTERRUPT, 0),
    "is alarmed all the time": (ALARMED_ALL_THE_TIME, 0),
    "threads": (THREADS, 0),
    "daemonic threads": (DAEMONIC_THREADS, 0),
    "compiles at exit": (COMPILES_AT_EXIT, 0),
    "compiles in a finalizer": (COMPILES_IN_A_FINALIZER, 0),
    "forks": (FORKS, 0),
    "has no child it did not make": (HAS_NO_CHILD_IT_DID_NOT_MAKE, 0),
    "ignores children": (IGNORES_CHILDREN, 0),
    "few descriptors": (FEW_DESCRIPTORS, 0),
    "no directory": (NO_DIRECTORY, 0),
    "has its own descriptors": (HAS_ITS_OWN_DESCRIPTORS, 0),
    "runs a loop": (RUNS_A_LOOP, 0),
    "logs": (LOGS, 0),
}


# One of each kind of end, and what programs do most.
USUAL = ("raises", "threads", "forks")


@pytest.mark.parametrize("name", thorough(PROGRAMS, usual=USUAL))
def test_a_program_that(place, name):
    source, code = PROGRAMS[name]
    assert makes_no_difference(place, source).code == code


# The first compile is let through: what is interrupted there is in test_campaign_interrupts. And only what xcache is
# in: jax alone can be left in the middle of tracing by an interrupt, with every later call failing.
INTERRUPTED = """
import random
random.seed({seed})
def interrupt(number, frame):
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("xcache."):
            raise KeyboardInterrupt
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0.0001)
signal.signal(signal.SIGALRM, interrupt)
results = {{0: work(0)}}
for k in range(1, 60):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.03))
        results[k] = work(k)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
signal.signal(signal.SIGALRM, signal.SIG_IGN)
print(len(results) < 60, [results[k] if k in results else work(k) for k in range(60)])
"""


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2))
def test_interrupts_at_any_time_reach_the_program_and_it_goes_on(place, seed):
    program = write(place, INTERRUPTED.format(seed=seed))
    expected = f"True {[28.0 * k + 8 for k in range(60)]}\n"
    for _ in ("cold", "warm"):
        # Python may report on stderr an interrupt that it can only ignore, as in a finalizer.
        with running([sys.executable, program], place, XCACHE="1") as process:
            how = ended(process)
        assert (how.code, how.stdout) == (0, expected), how.stderr


# An interactive shell's jobs heed it, the children of a test runner in the background might not.
IS_INTERRUPTED = (
    RAISES_WHERE_IT_IS_HEARD
    + "ends_at(signal.SIGINT, signal.default_int_handler)\n"
    + IS_TERMINATED.replace("SIGTERM", "SIGINT")
)


@pytest.mark.thorough
def test_an_interrupt_that_nobody_catches(place):
    for environment in ({}, {"XCACHE": "1"}, {"XCACHE": "1"}):
        with running([sys.executable, write(place, IS_INTERRUPTED)], place, **environment) as program:
            how = ended(program)
        assert (how.code, how.stdout) == (-signal.SIGINT, "36.0\n")
        assert how.stderr.splitlines()[-1] == "KeyboardInterrupt"


ASKS = """
import xcache
signal.signal(signal.SIGINT, signal.default_int_handler)
work(1)
os.kill(int(os.environ["DAEMON"]), signal.SIGSTOP)
print("asks", flush=True)
try:
    work(2)
except KeyboardInterrupt:
    print("interrupted", xcache.stats().lost_seconds < 30, flush=True)
os.kill(int(os.environ["DAEMON"]), signal.SIGCONT)
print(work(3), flush=True)
"""


def test_an_interrupt_ends_the_wait_for_a_stopped_daemon(place):
    daemon = place.start_daemon()
    environment = {"XCACHE": "1", "XCACHE_TIMEOUT": "60s", "DAEMON": str(daemon.pid)}
    with running([sys.executable, write(place, ASKS)], place, **environment) as program:
        assert program.stdout.readline() == "asks\n"
        # Somewhere in the wait; earlier would be well too.
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted True\n"
        how = ended(program)
    assert (how.code, how.stdout, how.stderr) == (0, "92.0\n", "")
