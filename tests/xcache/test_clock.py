"""The time at which a program began: what it has loaded may be as old as that."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from xcache.clock import process_began


def test_a_program_began_before_it_asks():
    assert time.time() - 3600 < process_began() < time.time()


@pytest.mark.parametrize("first", ["from xcache.clock import process_began", "import logging", ""])
def test_a_forked_child_is_as_old_as_its_parent(place, first):
    program = f"""
{first}
import os, time
loaded = time.time()
time.sleep(0.2)
if not os.fork():
    from xcache.clock import process_began
    print(process_began() < loaded, flush=True)
    os._exit(0)
os.wait()
"""
    ran = subprocess.run([sys.executable, "-c", program], env=place.env, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("True\n", "")
