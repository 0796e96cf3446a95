"""Fails on the code as it was reviewed: an error in one round of telling ends the telling for everybody, for good."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from conftest import get_message, until
from conversation import key_of

from xcache import protocol
from xcached.caller import Caller
from xcached.leases import Leases, _is_stopped


def test_31_a_connection_found_dead_while_it_is_told_does_not_end_the_telling():
    """It waits for one compile and holds another whose holder is stopped; the real class, without its socket."""
    later = []
    leases = Leases(
        trusts=lambda reader, writer: True,
        look_up=lambda caller, wanted: None,
        expected=lambda caller, wanted: None,
        call_later=lambda seconds, call: later.append(call),
    )
    stopped = subprocess.Popen(["sleep", "60"])
    os.kill(stopped.pid, signal.SIGSTOP)
    assert until(lambda: _is_stopped(stopped.pid))
    try:
        first, both, last = Caller(os.getpid(), 0), Caller(stopped.pid, 0), Caller(os.getpid(), 0)
        x, y = get_message(key_of("x"), 60.0), get_message(key_of("y"), 60.0)
        leases.ask(first, x)
        leases.ask(both, y)
        waits = leases.ask(both, x)
        leases.ask(last, y)
        dead = False

        def say(word: protocol.Message) -> None:
            # What Connection._flush does on EPIPE, on a connection that is not read from at the moment.
            if dead:
                leases.leave(both)

        waits.connect(say, lambda reply: None)
        later.pop()()
        time.sleep(1.1)
        dead = True
        assert later, "the telling goes on so far"
        later.pop()()
        # Nobody is left who waits; whoever comes now is told again.
        leases.ask(last, x)
        assert later
    finally:
        stopped.kill()
        stopped.wait()
