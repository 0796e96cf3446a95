"""The users that may connect to a daemon of all users."""

from __future__ import annotations

import os

import pytest

from xcache.config import config
from xcache.errors import ConfigError
from xcached.requests import trust
from xcached.requests.trust import Trust


def test_uids_that_one_user_hands_out_are_no_users(tmp_path, monkeypatch):
    """Each would have a fair share of its own: one user with a namespace could be tens of thousands."""
    table = tmp_path / "subuid"
    table.write_text("root:900000:10\nalice:100000:65536\nnonsense\nbob:x:y\n1001:300000:5\n")
    monkeypatch.setattr(trust, "_SUBORDINATE", table)
    made = Trust(config.load({"XCACHE_DAEMON_USER": str(os.getuid())}))
    assert made.shared
    admitted = {
        uid for uid in (0, 1001, 99_999, 100_000, 165_535, 165_536, 300_004, 300_005, 900_001) if made.admits(uid)
    }
    assert admitted == {0, 1001, 99_999, 165_536, 300_005, 900_001}


@pytest.mark.parametrize("exists", [True, False])
def test_without_such_uids_every_user_is_admitted(tmp_path, monkeypatch, exists):
    if exists:
        (tmp_path / "subuid").touch()
    monkeypatch.setattr(trust, "_SUBORDINATE", tmp_path / "subuid")
    assert Trust(config.load({"XCACHE_DAEMON_USER": str(os.getuid())})).admits(100_000)


@pytest.mark.parametrize(
    ("name", "problem"), [("no-such-one", "account 'no-such-one'"), ("@no-such", "group 'no-such'")]
)
def test_a_writer_that_there_is_not_is_named_with_the_setting(name, problem):
    settings = config.load({"XCACHE_DAEMON_USER": str(os.getuid()), "XCACHE_TRUSTED_WRITERS": f"0 {name}"})
    with pytest.raises(ConfigError) as refused:
        Trust(settings)
    told = f"XCACHE_TRUSTED_WRITERS='0 {name}' (environment) cannot be used: there is no {problem}"
    assert str(refused.value) == told
