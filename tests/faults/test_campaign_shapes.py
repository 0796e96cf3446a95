"""Every shape of program, run in every way, cold and warm and in trouble: it is what it is without xcache."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.alongside import Ended, ended, running, write
from support.campaigns import Campaign
from support.delaying import OF_PROGRAMS, delaying
from support.places import Place, new_place, until
from support.shapes import (
    PROGRAMS,
    SLOW,
    STATES,
    STOPPED,
    WAYS,
    comparable,
    fit,
    impossible,
    interpreter,
    source,
    surroundings,
)

pytestmark = pytest.mark.slow

USUAL = 4
# Long enough for a program that is just starting its daemon on a busy machine; the states of trouble set their own.
TIMEOUT = 20.0
TROUBLED = {STOPPED: 0.5, SLOW: 1.0}
LATE = 0.3
# In the long form a program may take so much longer than without xcache: seconds, and a share of what it takes without.
# Two runs of one program on a busy machine differ, so it counts only if it is so twice.
MORE_SECONDS, MORE_SHARE = 5.0, 0.5
# Several processes of one program lose the timeout each.
LOSERS = 4


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_programs_are_what_they_are_without(campaign: Campaign):
    impossible_here = {name: why for name in WAYS if (why := impossible(name))}
    everything = [
        shape for shape in itertools.product(PROGRAMS, WAYS, STATES) if fit(*shape) and shape[1] not in impossible_here
    ]
    random.Random(campaign.seed).shuffle(everything)
    chosen = everything[: campaign.rounds(USUAL)]
    with ThreadPoolExecutor(2) as both:
        for found in both.map(lambda shape: differences(*shape, judge_times=campaign.is_long), chosen):
            campaign.fault()
            for difference in found:
                campaign.problem("other problems", difference)
    campaign.note(f"shapes: {len(chosen):,} of {len(everything):,}, {len(PROGRAMS)} programs in {len(WAYS)} ways")
    for name, why in impossible_here.items():
        campaign.note(f"shapes: skipped {name}: {why}")
    campaign.judge()
    assert campaign.counts["faults tried"] == len(chosen)


def differences(program: str, way_name: str, state: str, *, judge_times: bool) -> list[str]:
    """Say how a program differs with xcache; a difference in time only if a second try has one, too."""
    found, late = tried(program, way_name, state, judge_times)
    if late and not found:
        found, late = tried(program, way_name, state, judge_times)
    return [f"a program that {program}, {way_name}, {state}: {each}" for each in [*found, *late]]


def tried(program: str, way_name: str, state: str, judge_times: bool) -> tuple[list[str], list[str]]:
    """Run a program in one way and state, and without xcache; say how they differ, and how their times do."""
    way = WAYS[way_name]
    found, late = [], []
    with new_place(way.base) as place, contextlib.ExitStack() as stack:
        path = write(place, source(program, way))
        under, environment = stack.enter_context(surroundings(place, way))
        command = [*under, *interpreter(way), str(path)]
        manager = stack.enter_context(listening(place.root / "n"))

        def run(mode: str, timeout: float = TIMEOUT, **more: str) -> tuple[Ended, float]:
            variables = {"XCACHE_TIMEOUT": f"{timeout:g}s"} | environment | more
            start = time.monotonic()
            with running(command, place, XCACHE=mode, **variables) as process:
                return ended(process), time.monotonic() - start

        without, seconds_without = run("0")
        assert not re.search("SyntaxError|ModuleNotFoundError", without.stderr), without
        allowed = 1 if way.says else 0
        timeout, more_variables = TIMEOUT, {}
        if state == "after a killed run":
            with running(command, place, XCACHE="1", **environment) as process:
                until(lambda: (place.dir / "store.db").exists() or process.poll() is not None)
                process.kill()
        elif state != "cold" and (way.stored or state == "warm"):
            run("1")
            if state in TROUBLED and place.answers():
                allowed, timeout = 2, TROUBLED[state]
                if state == STOPPED:
                    os.kill(place.daemon_pid(), signal.SIGSTOP)
                else:
                    stack.enter_context(delaying(place.root / "late", place.socket, OF_PROGRAMS, LATE))
                    more_variables = {"XCACHE_SOCKET": str(place.root / "late")}
        try:
            with_it, seconds = run("1", timeout, **more_variables)
        finally:
            for daemon in place.daemons():
                os.kill(daemon, signal.SIGCONT)
        if (without.code, comparable(without.stdout, way)) != (with_it.code, comparable(with_it.stdout, way)):
            found.append(f"{without.code} {without.stdout}, with xcache: {with_it.code} {with_it.stdout}")
        more = lines_of_its_own(without.stderr, with_it.stderr)
        if "xdist" in program:
            # execnet interrupts workers that are slow to end, wherever they are, and Python may print that.
            more = [line for line in more if "xcache" in line]
        # Each process of a program says what it has to say.
        several = "workers" in program or "xdist" in program or "forks" in program
        unexpected = [line for line in more if allowed == 1 and way.says not in line]
        if unexpected or (len(more) > allowed and not (several and allowed)):
            found.append(f"stderr: {more}")
        with contextlib.suppress(BlockingIOError):
            found.append(f"the service manager heard {manager.recv(1000)!r}")
        if way.stored and state == "warm" and not (place.dir / "store.db").exists():
            found.append("nothing was stored")
        bar = MORE_SECONDS + (1 + MORE_SHARE) * seconds_without + LOSERS * TROUBLED.get(state, 0.0)
        if judge_times and seconds > bar:
            late.append(f"it took {seconds:.1f} s, and {seconds_without:.1f} s without")
        account = path.with_name(f"{path.name}.lost")
        lost = float(account.read_text("ascii")) if account.exists() else 0.0
        if lost > timeout + 1.0:
            late.append(f"it lost {lost:.1f} s by its own account, with a timeout of {timeout:g} s")
    return found, late


def lines_of_its_own(without: str, with_it: str) -> list[str]:
    """Lines of stderr that come with xcache, or are missing then."""
    before, after = without.splitlines(), with_it.splitlines()
    for line in list(before):
        if line in after:
            after.remove(line)
            before.remove(line)
    return after + [f"missing: {line}" for line in before]


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A service manager's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.setblocking(False)
        yield manager


APP = """
import sys
import jax, jaxlib
import numpy as np
print(sys.frozen, sys.argv[1:], float(jax.jit(lambda v: (v * 3 + 1).sum())(np.arange(8.0, dtype=np.float32))))
"""
BUILD = (
    *("--noconfirm", "--log-level", "WARN", "--copy-metadata", "jax-xcache", "--collect-submodules", "xcache"),
    *("--hidden-import", "xcache.plugin", "--exclude-module", "pkg_resources", "--exclude-module", "setuptools"),
)


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_program_that_pyinstaller_made(place: Place, campaign: Campaign):
    """Really built: without an xcached on the PATH it runs once and has no cache; with one, it has its daemon."""
    if not campaign.rounds(0):
        pytest.skip("PyInstaller is fetched and run by scripts/campaign only")
    tools, app = place.root / "tools", place.root / "app.py"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "pyinstaller"]
    subprocess.run(pip, check=True, capture_output=True, timeout=900)
    app.write_text(APP)
    subprocess.run(
        [sys.executable, "-m", "PyInstaller", *BUILD, str(app)],
        cwd=place.root,
        env=place.env | {"PYTHONPATH": f"{tools}:{place.env['PYTHONPATH']}"},
        check=True,
        capture_output=True,
        timeout=1800,
    )
    del place.env["PYTHONPATH"]
    command = [str(place.root / "dist" / "app" / "app"), "argument"]
    expected = "True ['argument'] 92.0\n"
    for path, daemon in (("/none", False), (str(Path(sys.executable).parent), True)):
        campaign.fault()
        with running(command, place, XCACHE="1", PATH=path, XCACHE_TIMEOUT=f"{TIMEOUT:g}s") as process:
            how = ended(process)
        if (how.code, how.stdout, place.answers()) != (0, expected, daemon):
            campaign.problem("other problems", f"PATH={path}: {how}, a daemon: {place.answers()}")
        if how.stderr.count("\n") != (not daemon):
            campaign.problem("other problems", f"PATH={path}: {how.stderr}")
    campaign.judge()
