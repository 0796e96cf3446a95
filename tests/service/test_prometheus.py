"""A real Prometheus scrapes a real daemon: every expression of the dashboard and the alerts finds data there."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.places import REPOSITORY, Place, free_port, new_place, until
from support.program_files import program_text

yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra test")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.once,
    pytest.mark.skipif(
        not shutil.which("prometheus") or not shutil.which("promtool"),
        reason="there is no prometheus: apt-get install prometheus",
    ),
]

ALERTS = REPOSITORY / "deploy" / "alerts.yaml"
RULE_TESTS = Path(__file__).parent / "alerts_test.yaml"
PROGRAM = program_text("compile_one_way")
PROXY = Path("/lib/systemd/systemd-socket-proxyd")
SECONDS = 40.0


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **arguments: str) -> Any:
        query = f"{self._address}{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(query, timeout=10) as answer:  # noqa: S310 - our own Prometheus
            return json.loads(answer.read())["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=10) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def values(self, expression: str) -> list[float]:
        """Return the value of each series of an expression."""
        return [float(each["value"][1]) for each in self.ask("/api/v1/query", query=expression)["result"]]

    def alerts(self) -> set[str]:
        """Return the names of the alerts that are pending or firing."""
        return {each["labels"]["alertname"] for each in self.ask("/api/v1/alerts")["alerts"]}

    def has_data(self, expression: str) -> bool:
        """Return whether an expression has series, and all of them numbers."""
        found = self.values(expression)
        return bool(found) and all(map(math.isfinite, found))


@contextlib.contextmanager
def scraping(folder: Path, *ports: int) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes these ports, with the rules of deploy/."""
    settings = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "xcache", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    check("config", str(folder / "prometheus.yaml"))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(port)
        assert until(lambda: prometheus.is_ready() or process.poll() is not None)
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


def check(kind: str, *files: str, said: bytes = b"") -> None:
    """Have promtool check something."""
    done = subprocess.run(["promtool", "check", kind, *files], input=said, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b""), (done.stdout, done.stderr)


def run(place: Place, **environment: str) -> None:
    done = place.run(PROGRAM, **{"XCACHE": "1", "PYTHONHASHSEED": "0"} | environment)
    assert done.returncode == 0, done.stderr


def make_traffic(place: Place) -> None:
    """Run real programs, so that there are hits, misses, a damaged entry, and what cannot be cached."""
    run(place)
    run(place)
    run(place, JAX_ENABLE_COMPILATION_CACHE="0")
    place.execute("UPDATE blobs SET content = zeroblob(length(content)) WHERE content IS NOT NULL")
    run(place, XCACHE_PREFETCH="0", XCACHE_LOWERING="off")
    run(place)


def expressions_of_dashboard() -> list[str]:
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [each.replace("$instance", ".*").replace("$__rate_interval", "1m") for each in found]


def expressions_of_alerts() -> dict[str, str]:
    """Return the expressions of the alerts, so that each gives a series whether the alert is on or not."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: re.sub(r"(==|[<>]=?)(?= )", r"\1 bool", rule["expr"]) for rule in group["rules"]}


@pytest.mark.thorough
def test_every_expression_finds_data_and_an_alert_is_raised(place, tmp_path):
    port = free_port()
    place.start_daemon(XCACHE_METRICS=f"127.0.0.1:{port}")
    with scraping(tmp_path, port) as prometheus:
        assert until(lambda: prometheus.values("up") == [1.0], SECONDS)
        make_traffic(place)
        wanted = [*expressions_of_dashboard(), *expressions_of_alerts().values()]
        assert len(wanted) > 30
        without_data = set(wanted)

        def all_have_data() -> bool:
            without_data.difference_update(filter(prometheus.has_data, [*without_data]))
            return not without_data

        assert until(all_have_data, SECONDS), without_data
        assert until(lambda: "XcacheEntriesSetAside" in prometheus.alerts(), SECONDS)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            check("metrics", said=answer.read())


@pytest.mark.skipif(not PROXY.exists() or not shutil.which("systemd-socket-activate"), reason="there is no systemd")
def test_a_socket_is_scraped_through_systemds_proxy(tmp_path):
    """Prometheus itself knows only TCP."""
    port = free_port()
    with new_place() as place:
        path = place.root / "metrics.sock"
        place.start_daemon(XCACHE_METRICS=str(path))
        command = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", str(PROXY), str(path)]
        proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with scraping(tmp_path, port) as prometheus:
                assert until(lambda: prometheus.has_data("xcache_store_entries"), SECONDS)
        finally:
            proxy.terminate()
            proxy.wait(20)


def test_the_rules_are_sound():
    check("rules", str(ALERTS))


def test_each_alert_is_raised_when_it_should_be_and_not_before():
    done = subprocess.run(
        ["promtool", "test", "rules", str(RULE_TESTS)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    tested = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert tested == set(expressions_of_alerts())
