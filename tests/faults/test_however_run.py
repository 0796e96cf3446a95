"""However Python is run, a program is what it is without xcache: descriptors, flags, what is said of a crash."""

from __future__ import annotations

import signal
import sys

import pytest
from support.alongside import ended, makes_no_difference, running, write
from support.marks import thorough

pytestmark = pytest.mark.slow


def without_standard_descriptors(path: str) -> list[str]:
    return ["/bin/sh", "-c", f"exec {sys.executable} {path} <&- >&- 2>&-"]


# The first file opened becomes descriptor 0, 1 or 2, and C++ code writes its stderr there.
SAYS_NOTHING = """
import contextlib
results = [work(k) for k in range(30)]
with open("results", "a") as file:
    print(results, file=file)
# Another file may have that number by now.
with contextlib.suppress(OSError):
    os.write(2, b"a line of somebody's log\\n")
jax.clear_caches()
work(1)
"""


def test_a_program_without_standard_descriptors(place):
    command = without_standard_descriptors(str(write(place, SAYS_NOTHING)))
    makes_no_difference(place, SAYS_NOTHING, command=command)
    first, *others = (place.root / "results").read_text().splitlines()
    assert others == [first, first]
    # The daemon it started has the store's lock: there is no second one beside it.
    assert place.answers()
    assert not place.has_left()
    assert place.query("SELECT count(*) FROM entries") == [(30,)]


BREAKS_JSON = """
import json
def refuse(*_, **__):
    raise ValueError("json is broken")
json.dumps = json.loads = refuse
import jax, jax.numpy as jnp
print(float(jax.jit(lambda x: x * 2)(jnp.ones(()))))
"""


def test_a_program_that_breaks_what_the_cache_uses_is_told_in_lines_without_a_traceback(place):
    done = place.run(BREAKS_JSON, XCACHE="1", JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert done.stderr.splitlines() == [
        "xcache: ValueError: json is broken (key failed); compiling without the cache",
        "xcache: json is broken (ValueError); the end of this run is not recorded",
    ]


FLAGS = (("-I",), ("-O",), ("-X", "dev", "-W", "error"), ("-X", "faulthandler", "-u"))


@pytest.mark.parametrize("flags", thorough(FLAGS, usual=()))
def test_a_python_with(place, flags):
    assert makes_no_difference(place, "print([work(k) for k in range(5)])", *flags).code == 0


CRASHES = """
import faulthandler
print(work(1), flush=True)
{crash}
"""
CRASH = {
    "an abort": ("os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
    "no memory there": (
        "import ctypes; ctypes.string_at(0)",
        -signal.SIGSEGV,
        "Fatal Python error: Segmentation fault",
    ),
    # Python looks at other threads' frames unlocked: not while any runs, or it may crash by itself.
    "a hang": ("faulthandler.dump_traceback_later(2.5, exit=True); time.sleep(60)", 1, "Timeout (0:00:02.500000)!"),
}


@pytest.mark.parametrize("crash", thorough(CRASH, usual=["no memory there"]))
def test_faulthandler_tells_of(place, crash):
    statement, code, first_line = CRASH[crash]
    program = write(place, CRASHES.format(crash=statement))
    for environment in ({}, {"XCACHE": "1"}):
        with running([sys.executable, "-X", "faulthandler", program], place, **environment) as process:
            how = ended(process)
        assert (how.code, how.stdout) == (code, "36.0\n")
        assert how.stderr.splitlines()[0] == first_line
        assert f'File "{program}"' in how.stderr
