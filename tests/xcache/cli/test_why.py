"""``xcache why`` on rows of the ledger that no program needs to make."""

from __future__ import annotations

import pytest
from support.command_line import Shell

from xcache.wire.ledger import UNUSED


@pytest.fixture
def shell(place):
    return Shell(place)


def test_what_was_loaded_ahead_in_vain_does_not_hide_the_run_that_compiled_it(shell):
    stored, missed = shell.put("jit_f"), "d" * 64
    shell.record_run(stored, run="a" * 16, shapes="f32[8]")
    shell.record_run(stored, run="b" * 16, module_name="", shapes="", cause="", outcome=UNUSED)
    shell.record_run(missed, run="b" * 16, position=1, shapes="f32[16]", cause="other program", nearest=stored)
    (miss,) = shell.json("why", "--run", "bbbb")["misses"]
    assert "f32[16] here, f32[8] in the stored program" in miss["differences"][0]["text"]
