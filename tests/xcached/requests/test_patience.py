"""Waits for remote stores that bring nothing have a bound for each process, and compiles raise it."""

from __future__ import annotations

import shutil
import sys

import pytest
from support.conversation import key_of, talking
from support.engines import listens, running
from support.leasing import outcome
from support.places import REPOSITORY, free_port, get_message
from support.sharing import host, remote_of

from xcache.wire import protocol
from xcached.caller import Process
from xcached.requests.patience import Patience


def test_waits_in_vain_add_up_and_one_that_brings_something_makes_up_for_them():
    patience, process = Patience(lambda: 2.0), Process(1)
    for _ in range(4):
        assert patience.is_left(process)
        patience.note(process, 1.1, in_vain=True)
    assert not patience.is_left(process)
    process.compiled = 10.0
    assert patience.is_left(process)
    patience.note(process, 1.0, in_vain=False)
    process.compiled = 0.0
    assert patience.is_left(process)


@pytest.mark.skipif(not shutil.which("redis-server"), reason="there is no Redis: apt-get install redis-server")
def test_a_slow_store_is_asked_by_a_program_only_for_a_while(tmp_path):
    port, slow = free_port(), free_port()
    server = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--set-proc-title", "no"]
    relay = [sys.executable, str(REPOSITORY / "scripts" / "measure_relay.py"), str(slow), str(port), "0.3"]
    with (
        running(server, tmp_path, lambda: listens(port)),
        running(relay, tmp_path, lambda: listens(slow)),
        host(f"redis://127.0.0.1:{slow}", XCACHE_REMOTE_TIMEOUT="1s") as here,
        talking(here) as talk,
    ):
        for number in range(20):
            answer = outcome(talk, talk.say(get_message(key_of(f"{number}"), 0.0)))
            assert isinstance(answer, protocol.Missing)
        # Each takes 0.3 s at least, and all may take twice the bound and one more.
        assert 1 <= remote_of(here)["gets"] <= 8
