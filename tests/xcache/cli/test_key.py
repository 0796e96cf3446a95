"""``xcache key``: making, trusting, rotating and revoking keys."""

from __future__ import annotations

import json
import os
import stat
import threading

import pytest
from support.command_line import Shell
from support.signing import NOON, OURS, SECOND, STRANGER

from xcache.cli.key_files import Keys
from xcache.errors import SigningKeyError
from xcache.wire import signing_key
from xcache.wire.signatures import UNNAMED
from xcache.wire.trusted_keys import TrustedKey, TrustedKeys


@pytest.fixture
def files(place):
    """The private key and the list, where they are by default."""
    folder = place.root / "config" / "xcache"
    return folder / "signing-key", folder / "trusted-keys"


def states(shell: Shell) -> dict[str, str]:
    return {row["id"]: row["state"] for row in shell.json("key", "list")["keys"]}


def test_a_team_makes_trusts_rotates_and_revokes(shell, files):
    assert shell.say("key", "list") == "no key is trusted, and none signs here\n"
    first = shell.json("key", "new", "ci")
    assert first["file"] == str(files[0])
    assert shell.say("key", "show") == f"{first['key']}\n"
    # Its own signatures do not count before it says so.
    assert states(shell) == {first["id"]: "not trusted"}
    said = shell.say("key", "trust", "-", "--expires", "2999-01-31", answer=first["key"])
    assert "is trusted until 2999-01-31" in said
    assert states(shell) == {first["id"]: "trusted"}
    second = shell.json("key", "new", "ci", "--force")
    assert second["replaced"] == first["id"] != second["id"]
    # Both count while they are exchanged.
    shell.say("key", "trust", second["key"])
    assert states(shell) == {first["id"]: "trusted", second["id"]: "trusted"}
    assert f"say {first['id']} or {second['id']}" in shell.say("key", "revoke", "ci", code=1)
    assert "is revoked" in shell.say("key", "revoke", first["id"][:6])
    assert states(shell) == {first["id"]: "revoked", second["id"]: "trusted"}
    assert "and stays so" in shell.say("key", "trust", first["key"], code=1)
    # Of two keys of one name, the one that still counts is meant.
    assert "this machine still signs with it" in shell.say("key", "revoke", "ci")
    assert states(shell) == {first["id"]: "revoked", second["id"]: "revoked"}
    assert shell.json("key", "revoke", first["id"])["already"] is True
    assert "revoked=" in files[1].read_text()


def test_the_private_key_is_a_file_of_its_owner_s_and_printed_nowhere(shell, files, monkeypatch):
    # A careless mask opens nothing.
    before = os.umask(0)
    try:
        said = shell.say("key", "new", "ci")
    finally:
        os.umask(before)
    secret = files[0].read_text().split(":")[1].strip()
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o755
    said += shell.say("key", "show") + shell.say("key", "list", "--json") + shell.say("key", "new", "ci", code=1)
    said += shell.say("key", "trust", files[0].read_text(), code=1) + shell.say("key", "trust", str(files[0]), code=1)
    said += shell.say("key", "trust", files[0].read_text().split()[1], code=1)
    said += shell.say("config")
    assert "this is a private key" in said
    assert secret not in said
    assert not files[1].exists()
    assert [path.name for path in files[0].parent.iterdir()] == ["signing-key"]


def test_a_key_is_replaced_only_on_demand(shell, files):
    first = shell.json("key", "new", "ci")
    content = files[0].read_text()
    assert "--force replaces it" in shell.say("key", "new", "other", code=1)
    assert files[0].read_text() == content
    # One that cannot be used is replaced as well.
    files[0].chmod(0o644)
    assert "others may open it" in shell.say("key", "show", code=1)
    assert "others may open it" in shell.say("key", "list", code=1)
    assert shell.json("key", "new", "other", "--force")["replaced"] == ""
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert shell.json("key", "show")["id"] != first["id"]


def test_a_link_is_replaced_and_not_followed(shell, files, tmp_path):
    files[0].parent.mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("mine")
    files[0].symlink_to(tmp_path / "elsewhere")
    assert "--force" in shell.say("key", "new", "ci", code=1)
    shell.say("key", "new", "ci", "--force")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not files[0].is_symlink()


@pytest.mark.parametrize("name", ["", "a b", "-x", "ü"])
def test_a_name_that_cannot_be(shell, files, name):
    assert "cannot be the name of a key" in shell.say("key", "new", "--", name, code=2)
    assert not files[0].exists()


def test_a_key_from_a_variable_or_a_command_is_shown_and_not_made(shell, files):
    shell.env |= {"XCACHE_SIGNING_KEY": "env:MINE", "MINE": OURS.line()}
    assert shell.say("key", "show") == f"{OURS.public}\n"
    assert "which is not a file" in shell.say("key", "new", "ci", code=1)
    shell.env["MINE"] = OURS.line().split()[1]
    assert shell.json("key", "show")["name"] == UNNAMED
    del shell.env["MINE"]
    assert "the variable MINE: it is not set" in shell.say("key", "show", code=1)
    shell.env["XCACHE_SIGNING_KEY"] = f"command:echo '{OURS.line().strip()}'"
    assert shell.say("key", "show") == f"{OURS.public}\n"
    shell.env["XCACHE_SIGNING_KEY"] = ""
    assert "no key signs here" in shell.say("key", "show", code=1)


def test_a_named_file_that_is_missing_is_a_problem(shell, tmp_path):
    shell.env["XCACHE_SIGNING_KEY"] = str(tmp_path / "none")
    assert "No such file" in shell.say("key", "show", code=1)
    assert shell.json_with_status("key", "list", code=1)["problems"]


def test_lines_of_a_file_and_a_line_in_words(shell, files, tmp_path):
    (tmp_path / "keys").write_text(f"# the team\n{OURS.public}\n\n{SECOND.public} expires=2999-01-31\n")
    added = shell.json("key", "trust", str(tmp_path / "keys"))["trusted"]
    assert [(one["id"], one["expires"]) for one in added] == [
        (OURS.public.id, ""),
        (SECOND.public.id, "2999-01-31"),
    ]
    assert shell.json("key", "trust", *str(STRANGER.public).split())["trusted"]
    assert shell.say("key", "trust", str(STRANGER.public)) == "trusted already: 1\n"
    again = shell.json("key", "trust", str(tmp_path / "keys"))
    assert (again["trusted"], again["already"]) == ([], 2)
    # Another time takes the place of the one before.
    shell.say("key", "trust", str(OURS.public), "--expires", "2998-01-31")
    assert files[1].read_text().count(OURS.public.text) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense xcache-ed25519:AAAA", "no line to trust"),
        (f"{OURS.public} revoked=2026-01-01", "was revoked; nothing is trusted"),
        (f"{OURS.public} expires=2020-01-01", "too late"),
        ("# nothing\n", "there is no line"),
        (f"{SECOND.public}\nnonsense", "no line to trust"),
    ],
)
def test_what_is_not_trusted(shell, files, line, reason):
    assert reason in shell.say("key", "trust", "-", answer=line, code=1)
    assert not files[1].exists()


def test_a_day_that_is_none(shell):
    assert "is not a day" in shell.say("key", "trust", str(OURS.public), "--expires", "soon", code=2)


def test_a_file_that_is_not_there(shell, tmp_path):
    assert "No such file" in shell.say("key", "trust", str(tmp_path / "none"), code=1)


def test_what_is_unknown_cannot_be_revoked(shell, files):
    assert "so that none such is trusted" in shell.say("key", "revoke", "nobody", code=1)
    shell.say("key", "trust", str(OURS.public))
    for unknown in (OURS.public.id[:3], "x", ""):
        assert "no key of the name or id" in shell.say("key", "revoke", "--", unknown, code=1)


def test_other_lines_stay_as_they_are(shell, files):
    files[1].parent.mkdir(parents=True)
    odd = b"# \xe9, by hand\nmalformed line\n" + f"{SECOND.public}  expires=2999-01-31\n".encode()
    files[1].write_bytes(odd)
    files[1].chmod(0o600)
    shell.say("key", "trust", str(OURS.public))
    shell.say("key", "revoke", "ours")
    assert files[1].read_bytes().startswith(odd)
    assert stat.S_IMODE(files[1].stat().st_mode) == 0o600
    listed = shell.json_with_status("key", "list", code=1)
    assert [row["state"] for row in listed["keys"]] == ["trusted", "revoked"]
    assert "line 2" in listed["problems"][0]


def test_a_key_that_a_malformed_line_names_is_not_trusted_by_another(shell, files):
    files[1].parent.mkdir(parents=True)
    files[1].write_text(f"{OURS.public} revoked=soon\n")
    assert "in a line of" in shell.say("key", "trust", str(OURS.public), code=1)
    assert [row["state"] for row in shell.json_with_status("key", "list", code=1)["keys"]] == ["malformed"]


def test_a_list_that_others_may_write_is_not_changed(shell, files):
    shell.say("key", "trust", str(OURS.public))
    content = files[1].read_text()
    files[1].chmod(0o666)
    for command in (["trust", str(SECOND.public)], ["revoke", "ours"], ["list"]):
        assert "others may write it" in shell.say("key", *command, code=1)
    assert files[1].read_text() == content


def test_a_linked_list_stays_a_link(shell, files, tmp_path):
    files[1].parent.mkdir(parents=True)
    (tmp_path / "real").write_text("")
    (tmp_path / "real").chmod(0o644)
    files[1].symlink_to(tmp_path / "real")
    shell.say("key", "trust", str(OURS.public))
    assert files[1].is_symlink()
    assert (tmp_path / "real").read_text() == f"{OURS.public}\n"


def test_no_change_is_lost_among_many_at_once(shell, files):
    keys = [OURS.public._replace(name=f"n{number}", raw=bytes([number]) * 32) for number in range(12)]
    threads = [
        threading.Thread(target=lambda key=key: Keys(shell.config).trust([TrustedKey(key)], NOON)) for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(TrustedKeys.load(files[1]).keys) == len(keys)


def test_the_keys_of_the_machine_s_daemon_belong_to_its_account(shell, tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root to give a file away")
    shell.env |= {"XCACHE_DAEMON_USER": "64321", "XCACHE_SIGNING_KEY": str(tmp_path / "key")}
    shell.env["XCACHE_TRUSTED_KEYS"] = str(tmp_path / "list")
    made = shell.json("key", "new", "machine")
    assert (tmp_path / "key").stat().st_uid == 64321
    assert shell.json("key", "show")["id"] == made["id"]
    shell.say("key", "trust", made["key"])
    assert (tmp_path / "list").stat().st_uid == 0
    # It is nobody else's.
    with pytest.raises(SigningKeyError, match="belongs to another user"):
        signing_key.load(str(tmp_path / "key"))


def test_the_table(shell):
    shell.say("key", "trust", str(OURS.public), "--expires", "2999-01-31")
    shell.say("key", "trust", str(SECOND.public))
    shell.say("key", "revoke", "second")
    shell.env |= {"XCACHE_SIGNING_KEY": "env:MINE", "MINE": OURS.line()}
    lines = shell.say("key", "list").splitlines()
    assert lines[0].split() == ["id", "name", "state", "signs", "here"]
    assert lines[1].split() == [OURS.public.id, "ours", "trusted", "until", "2999-01-31", "yes"]
    assert lines[2].split()[:3] == [SECOND.public.id, "second", "revoked"]
    assert json.loads(shell.say("key", "list", "--json"))["problems"] == []
