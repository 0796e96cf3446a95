"""A place of its own for each test, and campaigns of faults with their options and what they counted."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from campaigns import CAMPAIGN_COUNTS, OTHER_COUNTS, Campaign
from hypothesis import settings
from places import Place, new_place

settings.register_profile("xcache", derandomize=True, deadline=None, database=None)
settings.load_profile("xcache")

_TALLIES = pytest.StashKey[dict[str, "Counter[str]"]]()
_NOTES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for campaigns of faults, which have few rounds by default."""
    group = parser.getgroup("campaigns of faults")
    group.addoption("--rounds", type=int, help="run only campaigns, with so many rounds each instead of their few")
    group.addoption("--soak", type=float, help="run only campaigns; the steady load lasts so many seconds")
    group.addoption("--crowd", type=int, help="run only campaigns; so many programs ask at once")
    group.addoption("--seed", type=int, default=0, help="what the campaigns' random choices follow from")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who says how many rounds there are to be, or how much of them, is interested in the campaigns alone."""
    if any(config.getoption(name) is not None for name in ("--rounds", "--soak", "--crowd")):
        others = [item for item in items if "campaign" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the campaigns counted."""
    if tallies := config.stash.get(_TALLIES, {}):
        terminalreporter.section("campaigns of faults")
        everything = sum(tallies.values(), Counter())
        for name, counts in [*tallies.items(), ("all", everything)]:
            kinds = [*CAMPAIGN_COUNTS, *(kind for kind in OTHER_COUNTS if counts[kind])]
            counted = ", ".join(f"{counts[kind]:,} {kind}" for kind in kinds)
            terminalreporter.line(f"{name}: {counted}, {counts['seconds']:,.0f} s")
        for note in config.stash.get(_NOTES, []):
            terminalreporter.line(note)


@pytest.fixture
def place() -> Iterator[Place]:
    """Somewhere to keep a store; its daemon and its files are gone afterwards."""
    with new_place() as made:
        yield made


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
    """A series of faults; its counts are said at the end of the run."""
    option = request.config.getoption
    made = Campaign(option("--rounds"), option("--seed"), soak=option("--soak"), crowd=option("--crowd"))
    start = time.monotonic()
    yield made
    made.counts["seconds"] = time.monotonic() - start
    request.config.stash.setdefault(_TALLIES, {})[request.node.nodeid.rpartition("/")[2]] = made.counts
    request.config.stash.setdefault(_NOTES, []).extend(made.notes)
