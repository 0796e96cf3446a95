"""A place of its own for each test; campaigns of faults, with their options and counts."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from support.campaigns import CAMPAIGN_COUNTS, OTHER_COUNTS, Campaign
from support.command_line import Shell
from support.conversation import Conversation, talking
from support.leaks import held, left_since
from support.places import Place, new_place
from support.progress import Progress

settings.register_profile("xcache", derandomize=True, deadline=None, database=None)
settings.load_profile("xcache")

# The longest time of a campaign in its long form.
LONG_SECONDS = 10 * 3600.0

_TALLIES = pytest.StashKey[dict[str, "Counter[str]"]]()
_NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the paths of temporary folders short, for sockets, whatever TMPDIR says; tell how far the tests are.

    A shell has what it starts in the background ignore Ctrl-C, and so would the commands that the tests interrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the campaigns of faults, which have few rounds by default."""
    group = parser.getgroup("campaigns of faults")
    group.addoption("--rounds", type=int, help="run only campaigns, with so many rounds each instead of their few")
    group.addoption("--soak", type=float, help="run only campaigns; the steady load lasts so many seconds")
    group.addoption("--crowd", type=int, help="run only campaigns; so many programs ask at once")
    group.addoption("--seed", type=int, default=0, help="the seed of the campaigns' random choices")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run only the campaigns if an option sets their rounds or their size."""
    if any(config.getoption(name) is not None for name in ("--rounds", "--soak", "--crowd")):
        others = [item for item in items if "campaign" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
        for item in items:
            # pytest takes the first marker; the campaign's own is for its short form.
            item.add_marker(pytest.mark.timeout(LONG_SECONDS), append=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts of the campaigns."""
    if tallies := config.stash.get(_TALLIES, {}):
        terminalreporter.section("campaigns of faults")
        everything = sum(tallies.values(), Counter())
        for name, counts in [*tallies.items(), ("all", everything)]:
            kinds = [*CAMPAIGN_COUNTS, *(kind for kind in OTHER_COUNTS if counts[kind])]
            counted = ", ".join(f"{counts[kind]:,} {kind}" for kind in kinds)
            terminalreporter.line(f"{name}: {counted}, {counts['seconds']:,.0f} s")
        for note in config.stash.get(_NOTES, []):
            terminalreporter.line(note)


@pytest.fixture(autouse=True, scope="session")
def _temporary_folder() -> Iterator[None]:
    """Give these tests and their programs a folder for temporary files of their own, so that leaks can be told."""
    # The path is short, for sockets; other users use it too.
    folder = tempfile.mkdtemp(prefix="x", dir="/tmp")
    Path(folder).chmod(0o1777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaves a descriptor, a thread or a child of this process, or a temporary file."""
    before = held()
    yield
    if left := left_since(before):
        pytest.fail("the test left behind: " + "; ".join(left))


@pytest.fixture
def place() -> Iterator[Place]:
    """Somewhere to keep a store; its daemon and its files are gone afterwards."""
    with new_place() as made:
        yield made


@pytest.fixture
def shell(place: Place) -> Shell:
    """Runs commands there."""
    return Shell(place)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to be a remote store."""
    made = tmp_path / "tier"
    made.mkdir()
    return made


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives the number of a TCP port that nobody uses at the moment."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """A series of faults; pytest prints its counts at the end of the run."""
    option = request.config.getoption
    made = Campaign(option("--rounds"), option("--seed"), soak=option("--soak"), crowd=option("--crowd"))
    start = time.monotonic()
    yield made
    made.counts["seconds"] = time.monotonic() - start
    request.config.stash.setdefault(_TALLIES, {})[request.node.nodeid.rpartition("/")[2]] = made.counts
    request.config.stash.setdefault(_NOTES, []).extend(made.notes)


@pytest.fixture
def talk(place: Place) -> Iterator[Conversation]:
    """Somebody who talks to the daemon of ``place``."""
    place.start_daemon()
    with talking(place) as conversation:
        yield conversation
