"""The status is facts."""

from __future__ import annotations

from support.conversation import key_of
from support.places import until

from xcache.wire import protocol

LARGE = b"l" * (protocol.INLINE_LIMIT + 1)


def test_status_is_facts(place, talk):
    talk.put(key_of("a"), LARGE)
    facts = talk.status()
    assert facts["pid"] == talk.pid == place.daemon_pid()
    assert (facts["entries"], facts["bytes"]) == (1, len(LARGE) + len(b"program"))
    assert until(lambda: talk.status()["connections"] == 1)
    assert facts["max_size"] == 20 * 1024**3
    assert facts["uptime_seconds"] >= 0
    assert facts["peak_memory"] > 1_000_000
