"""Says once a minute how far the tests are: a whole run takes many, and dots do not say of how many."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest

_EVERY_SECONDS = 60.0


class Progress:
    """A plugin of the process that hands the tests out to others."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._said_at = time.monotonic()
        self._all = self._done = self._failed = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Collection[str]) -> None:
        """Note how many there are; each process collects them all."""
        self._all = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count, and speak if it is time."""
        self._failed += report.failed
        self._done += report.when == "teardown"
        now = time.monotonic()
        if now - self._said_at < _EVERY_SECONDS:
            return
        self._said_at = now
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        minutes = round((now - self._began) / 60)
        failed = f", {self._failed} failed" if self._failed else ""
        terminal.write_line("")
        terminal.write_line(f"after {minutes} min: {self._done} of {self._all} tests{failed}")
