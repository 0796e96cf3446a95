"""The daemon's own key and the keys that it trusts follow the files and the settings."""

from __future__ import annotations

import pytest
from support.signing import NOON, OURS, SECOND, listing

from xcache.config import config
from xcache.errors import SigningKeyError
from xcached.tiers import identity
from xcached.tiers.identity import Identity


class Settings:
    """Settings that change as those of a daemon do."""

    def __init__(self, **environment: str) -> None:
        self.change(**environment)

    def change(self, **environment: str) -> None:
        self.now = config.load(environment)


@pytest.fixture
def home(tmp_path):
    (tmp_path / "xcache").mkdir()
    return {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}


def test_a_new_key_and_a_revocation_count_at_once(home, tmp_path):
    mine = Identity(Settings(**home))
    assert mine.signer() is None
    assert mine.trusted().public(OURS.public.id, NOON) is None
    path = tmp_path / "xcache" / "signing-key"
    for key in (OURS, SECOND):
        path.write_text(key.line())
        path.chmod(0o600)
        assert mine.signer().public == key.public
    listing(tmp_path / "xcache", OURS.public)
    assert mine.trusted().public(OURS.public.id, NOON)
    listing(tmp_path / "xcache", f"{OURS.public} revoked=2026-11-27")
    assert mine.trusted().public(OURS.public.id, NOON) is None
    path.chmod(0o644)
    with pytest.raises(SigningKeyError, match="others may open it"):
        mine.signer()


def test_a_named_file_that_is_missing_is_an_error_and_an_empty_name_is_none(home, tmp_path):
    settings = Settings(**home, XCACHE_SIGNING_KEY=str(tmp_path / "none"))
    mine = Identity(settings)
    with pytest.raises(SigningKeyError, match="No such file"):
        mine.signer()
    settings.change(**home, XCACHE_SIGNING_KEY="")
    assert mine.signer() is None
    other = tmp_path / "other"
    other.mkdir()
    listing(other, OURS.public)
    settings.change(**home, XCACHE_TRUSTED_KEYS=str(other / "trusted-keys"))
    assert mine.trusted().public(OURS.public.id, NOON)


def test_a_command_runs_once_and_again_some_time_after_it_failed(home, tmp_path, monkeypatch):
    (tmp_path / "key").write_text("nothing")
    program = f"sh -c 'echo x >> {tmp_path}/count; cat {tmp_path}/key'"
    settings = Settings(**home, XCACHE_SIGNING_KEY=f"command:{program}")
    mine = Identity(settings)
    for _ in range(3):
        with pytest.raises(SigningKeyError, match="no private key"):
            mine.signer()
    (tmp_path / "key").write_text(OURS.line())
    monkeypatch.setattr(identity, "_RETRY_SECONDS", -1.0)
    for _ in range(3):
        assert mine.signer().public == OURS.public
    assert (tmp_path / "count").read_text() == "x\n" * 2
