"""The daemon serves its numbers to Prometheus, where the setting says so, and lives without."""

from __future__ import annotations

import http.client
import socket
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from support.conversation import key_of, talking
from support.places import free_port, get_message, until

from xcache.wire import commands, protocol


def samples(text: str, parse=plain) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in parse(text)
        for sample in family.samples
    }


def scraped(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        return answer.read().decode()


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
