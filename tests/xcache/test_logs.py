"""Messages at the program's stderr, whatever the program has made of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

STREAMS = {
    "closed": "sys.stderr.close()",
    "none": "sys.stderr = None",
    "an object that raises": (
        "class Raises:\n"
        "    def write(self, text): raise RuntimeError('no console')\n"
        "    def flush(self): pass\n"
        "sys.stderr = Raises()"
    ),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))
def test_a_stderr_that_takes_nothing_is_no_trouble_of_the_programs(stream):
    program = f"import sys\nfrom xcache import logs\n{stream}\nlogs.complain('a warning')\nprint('went on')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
