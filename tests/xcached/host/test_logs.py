"""The log: clients cannot write lines of their own into it, nor fill it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from support.conversation import Conversation, key_of
from support.places import PATIENCE, digest, until

from xcache.wire import protocol
from xcached.host import logs
from xcached.host.logs import OneLine, Sparing

FORGED = "fine\n2026-01-01 00:00:00,000 1 INFO left\r\x1b[2J\x85\u2028end"


@pytest.fixture
def lines():
    """A logger with the daemon's filter and format, and the lines that it wrote."""
    written: list[str] = []

    class Handler(logging.Handler):
        """Keeps lines."""

        def emit(self, record):
            written.append(self.format(record))

    logger, handler = logging.Logger("test"), Handler()
    handler.setFormatter(OneLine("%(levelname)s %(message)s"))
    logger.addFilter(Sparing())
    logger.addHandler(handler)
    logger.written = written
    return logger


def test_a_message_is_one_line_of_plain_characters(lines):
    lines.warning("it said %s", FORGED)
    (line,) = lines.written
    assert line.startswith("WARNING it said fine\\n2026")
    assert line.isprintable()


def test_no_line_of_a_traceback_can_be_taken_for_one_of_the_log(lines):
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines.exception("it failed")
    first, *rest = lines.written[0].splitlines()
    assert first == "ERROR it failed"
    assert all(line.startswith("    ") for line in rest)


def test_repeated_messages_are_left_out_and_counted(lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    for number in range(1000):
        lines.warning("process %d was disconnected", number, extra={"uid": 1})
        lines.debug("all of it")
    lines.warning("process %d was disconnected", 5, extra={"uid": 2})
    lines.warning("something else")
    assert len(lines.written) == 32 + 1000
    now[0] = 61.0
    lines.warning("process %d was disconnected, 100%%", 7, extra={"uid": 1})
    lines.warning("process %d was disconnected", 7, extra={"uid": 1})
    assert lines.written[-1] == "WARNING process 7 was disconnected (970 more like this were left out)"


def test_a_program_that_calls_itself_something_writes_no_line(place):
    place.start_daemon()
    log = place.dir / "daemon.log"
    for _ in range(2):
        talk = Conversation(place)
        talk.ask(protocol.Hello(protocol.VERSION, FORGED, 1, FORGED))
        talk.put(key_of("a"), b"a")
        talk.get(key_of("a"))
        talk.ask(protocol.Complain(key_of("a"), digest(b"a"), FORGED, True))
        talk.say(protocol.Loading(key_of("a"), digest(b"a"), False))
        talk.ask(protocol.Announce(FORGED, FORGED, FORGED, FORGED, []))
        talk.raw(b"\x00\x00\x00\x10nonsense\n\n\n\n\n\n\n\n")
        talk.was_hung_up_on()
        talk.close()
    assert until(lambda: "disconnected" in log.read_text())
    for line in log.read_text().splitlines():
        assert line[:2] == "20" or line.startswith("    "), line
        assert line.isprintable()
        assert " INFO left" not in line[20:50], line


@pytest.mark.parametrize("is_read", [False, True])
def test_a_pipe_in_the_place_of_the_log_ends_the_start_with_a_reason(place, is_read):
    place.dir.mkdir(mode=0o700)
    path = place.dir / "daemon.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    try:
        command = [sys.executable, "-m", "xcached"]
        ran = subprocess.run(command, env=place.env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        if reader is not None:
            os.close(reader)
    assert (ran.returncode, ran.stderr) == (1, f"xcached: {path} is not a file\n")
