"""The daemon serves its numbers to Prometheus, where the setting says so, and lives without."""

from __future__ import annotations

import contextlib
import http.client
import socket
import stat
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from support.conversation import key_of, talking
from support.places import free_port, get_message, new_place, until

from xcache.wire import commands, protocol


def samples(text: str, parse=plain) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in parse(text)
        for sample in family.samples
    }


def scraped(address: str, accept: str = "text/plain", timeout: float = 10.0) -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        return answer.read().decode()


def fresh(address: str) -> str:
    """Return a page that was made for this request: one is kept for a second."""
    time.sleep(1.05)
    return scraped(address)


def answer_of(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


@pytest.fixture
def address(place):
    made = f"127.0.0.1:{free_port()}"
    place.start_daemon(XCACHE_METRICS=made)
    return made


def test_the_numbers_of_the_store_and_of_requests_are_served(place, address):
    with talking(place) as talk:
        talk.put(key_of("a"), b"payload")
        assert isinstance(talk.ask(get_message(key_of("a"))), protocol.Found)
        counts = {"requests": 3, "hits": 1, "misses": 2, "causes:new": 2, "uncacheable:python callback": 1}
        assert talk.ask(protocol.Report(counts)) == protocol.Done()
        assert talk.ask(commands.Sync()) == protocol.Done()
        found = samples(scraped(address))
    assert found["xcache_requests_total"] == 3
    assert found["xcache_misses_total[('cause', 'new')]"] == 2
    assert found["xcache_misses_total[('cause', 'unknown')]"] == 0
    assert found["xcache_uncacheable_total[('reason', 'python callback')]"] == 1
    assert found["xcache_store_entries"] == 1
    assert found["xcache_store_bytes"] > 0
    assert found["xcache_connections"] >= 1
    assert found["xcache_request_seconds_count[('request', 'Get')]"] == 1
    assert found["xcache_request_seconds_count[('request', 'Put')]"] == 1


def test_openmetrics_is_served_to_those_who_ask_for_it(address):
    text = scraped(address, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert "xcache_hits_total" in samples(text, openmetrics)


def test_they_are_served_on_a_socket(place):
    path = place.root / "metrics.sock"
    place.start_daemon(XCACHE_METRICS=str(path))
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/metrics")
    assert "xcache_store_entries" in samples(connection.getresponse().read().decode())
    connection.close()
    place.stop()
    assert not path.exists()


def test_the_daemon_serves_without_metrics_where_the_address_is_taken(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place.start_daemon(XCACHE_METRICS=f"127.0.0.1:{taken.getsockname()[1]}")
        with talking(place) as talk:
            assert talk.ask(commands.Sync()) == protocol.Done()
    until(lambda: "metrics cannot be served" in (place.dir / "daemon.log").read_text())


def test_a_counter_that_a_program_takes_back_does_not_get_less(place, address):
    """Prometheus would take the daemon for a new one, and count all again."""
    with talking(place) as talk:
        for counts in ({"misses": 5, "causes:new": 5}, {"misses": -1, "causes:new": -1}):
            assert talk.ask(protocol.Report(counts)) == protocol.Done()
            assert talk.ask(commands.Sync()) == protocol.Done()
            found = samples(fresh(address))
            assert (
                found["xcache_misses_total[('cause', 'new')]"],
                found["xcache_misses_total[('cause', 'unknown')]"],
            ) == (5, 0)
        assert talk.ask(commands.ZeroStatistics()) == protocol.Done()
    assert samples(fresh(address))["xcache_misses_total[('cause', 'new')]"] == 0


def test_no_label_names_what_a_program_chose(place, address):
    reasons = ["changed source file: /home/alice/secret.py", "changed source file: /home/bob/x.py", "/home/alice/x.py"]
    with talking(place) as talk:
        counts = {f"{group}:{reason}": 1.0 for group in ("calls", "lowerings", "uncacheable") for reason in reasons}
        many = {f"errors:{'x' * (number + 1)}": 1.0 for number in range(150)}
        assert talk.ask(protocol.Report(counts)) == protocol.Done()
        assert talk.ask(protocol.Report(many)) == protocol.Done()
        assert talk.ask(protocol.Report({"errors:\x1b[31m": 1.0})) == protocol.Done()
        assert talk.ask(commands.Sync()) == protocol.Done()
    page = fresh(address)
    found = samples(page)
    for metric, label in (("calls", "outcome"), ("lowerings", "outcome"), ("uncacheable", "reason")):
        assert found[f"xcache_{metric}_total[('{label}', 'changed source file')]"] == 2.0
        assert found[f"xcache_{metric}_total[('{label}', 'other')]"] == 1.0
    assert "alice" not in page
    assert "\x1b" not in page
    assert page.count("xcache_errors_total{") < 110


def test_causes_and_kinds_of_errors_are_there_from_the_start(address):
    found = samples(scraped(address))
    assert found["xcache_misses_total[('cause', 'evicted')]"] == 0
    assert found["xcache_errors_total[('kind', 'no answer')]"] == 0


REQUESTS = [
    (b"GET /metrics?name=x HTTP/1.1\r\nHost: a\r\n\r\n", b"200 OK"),
    (b"GET / HTTP/1.0\r\n\r\n", b"200 OK"),
    (b"GET /../store.db HTTP/1.0\r\n\r\n", b"404 Not Found"),
    (b"POST /metrics HTTP/1.0\r\n\r\n", b"405 Method Not Allowed"),
    (b"\xff\xfe\r\n\r\n", b"405 Method Not Allowed"),
    (b"\r\n\r\n", b"405 Method Not Allowed"),
    (b"GET " + b"x" * 20_000 + b"\r\n\r\n", b""),
    (b"", b""),
]


def test_requests_of_any_kind_are_answered_or_hung_up_on(address):
    host, _, port = address.rpartition(":")
    for asked, status in REQUESTS:
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            # The daemon does not read a request that is too long to its end.
            with contextlib.suppress(ConnectionError):
                connection.sendall(asked)
                connection.shutdown(socket.SHUT_WR)
            first = answer_of(connection).partition(b"\r\n")[0]
        assert first.removeprefix(b"HTTP/1.0 ") == status, asked[:40]


def test_scrapers_that_say_nothing_do_not_keep_others_out_for_long(place, address):
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as silent:
        for _ in range(12):
            silent.enter_context(socket.create_connection((host, int(port)), timeout=20))
        assert "xcache_store_entries" in scraped(address, timeout=30)
        with talking(place) as talk:
            assert talk.ask(commands.Sync()) == protocol.Done()
    threads = [each.read_text() for each in Path("/proc", str(place.daemon_pid()), "task").glob("*/comm")]
    assert len(threads) < 20


def test_a_file_at_the_path_is_left_alone(place):
    path = place.root / "precious"
    path.write_text("data")
    place.start_daemon(XCACHE_METRICS=str(path))
    assert "which is no socket" in (place.dir / "daemon.log").read_text()
    assert path.read_text() == "data"


def test_a_socket_that_was_left_behind_is_replaced_and_one_that_is_served_is_not(place):
    path = place.root / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    place.start_daemon(XCACHE_METRICS=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with new_place() as other:
        other.start_daemon(XCACHE_METRICS=str(path))
        assert "another process serves there" in (other.dir / "daemon.log").read_text()
    with socket.socket(socket.AF_UNIX) as probe:
        assert probe.connect_ex(str(path)) == 0


def test_an_address_that_cannot_be_used_is_one_line_of_the_log(place):
    place.start_daemon(XCACHE_METRICS="no.such.host.invalid:9464")
    (line,) = [line for line in (place.dir / "daemon.log").read_text().splitlines() if "metrics" in line]
    assert "metrics cannot be served on no.such.host.invalid:9464: " in line
