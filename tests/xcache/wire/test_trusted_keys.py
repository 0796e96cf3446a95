"""The list of trusted keys: whoever is in doubt is not trusted."""

from __future__ import annotations

import os
from datetime import date

import pytest
from support.signing import DAY, NOON, OURS, SECOND, STRANGER, listing

from xcache.wire.signatures import PUBLIC
from xcache.wire.trusted_keys import MOST_BYTES, TrustedKey, TrustedKeys, encoded, parse, parse_line

ID = OURS.public.id


def test_a_key_of_the_list_is_trusted_and_no_other(tmp_path):
    found = listing(tmp_path, "# who may", "", OURS.public)
    assert (found.problem, found.problems) == ("", [])
    assert found.public(ID, NOON) == OURS.public
    assert found.why_not(ID, NOON) == ""
    assert found.public(STRANGER.public.id, NOON) is None
    assert found.why_not(STRANGER.public.id, NOON) == f"the key {STRANGER.public.id} is not in {found.path}"


def test_a_key_is_trusted_to_the_end_of_its_last_day(tmp_path):
    found = listing(tmp_path, f"{OURS.public} expires=2026-11-27")
    assert found.public(ID, NOON + DAY / 2 - 1)
    assert found.public(ID, NOON + DAY / 2) is None
    assert found.why_not(ID, NOON + DAY) == f"the key {ID} (ours) expired on 2026-11-27"
    assert listing(tmp_path, f"{OURS.public} expires=9999-12-31").public(ID, NOON)


def test_a_revocation_counts_whatever_its_date_and_whatever_other_lines_say(tmp_path):
    for day in ("2026-11-27", "2000-01-01", "2999-01-01"):
        for lines in (
            [f"{OURS.public} revoked={day}"],
            [OURS.public, f"{OURS.public} revoked={day}"],
            [f"{OURS.public} revoked={day}", OURS.public],
            [f"renamed {OURS.public.text} revoked={day} expires=2030-01-01", OURS.public],
        ):
            found = listing(tmp_path, *lines, SECOND.public)
            assert found.public(ID, NOON) is None
            assert f"was revoked on {day}" in found.why_not(ID, NOON)
            assert found.public(SECOND.public.id, NOON) == SECOND.public


def test_of_two_lines_the_first_to_expire_counts(tmp_path):
    found = listing(tmp_path, f"{OURS.public} expires=2030-01-01", f"{OURS.public} expires=2026-11-01", OURS.public)
    assert found.keys == [TrustedKey(OURS.public, date(2026, 11, 1))]
    assert found.public(ID, NOON) is None


MALFORMED = [
    PUBLIC,
    OURS.public.text,
    f"ours{OURS.public.text}",
    f"a b {OURS.public.text}",
    f"{OURS.public} # revoked=2026-11-27",
    f"{OURS.public} revoked",
    f"{OURS.public} revoked=yesterday",
    f"{OURS.public} revoked=27.11.2026",
    f"{OURS.public} revoked=20261127",
    f"{OURS.public} revoked=2026-W48",
    f"{OURS.public} revoked=2026-02-30",
    f"{OURS.public} expires=",
    f"{OURS.public} expires=2026-11-27 expires=2027-11-27",
    f"{OURS.public} Expires=2026-11-27",
    f"{OURS.public} trusted=2026-11-27",
    f"{str(OURS.public)[:-1]} revoked=2026-11-27",
    f"- {OURS.public}",
    "ours ssh-ed25519:AAAA",
    "x" * 5000,
    "ours\0 key",
    "ours\u2028key",
    OURS.line().strip(),
]


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_line_is_reported_and_trusts_nobody(tmp_path, line):
    found = listing(tmp_path, SECOND.public, line)
    assert len(found.problems) == 1
    assert f"{found.path}: line 2: " in found.problems[0]
    assert OURS.line().split()[1] not in found.problems[0]
    assert found.public(ID, NOON) is None
    # The others count.
    assert found.public(SECOND.public.id, NOON) == SECOND.public


@pytest.mark.parametrize("line", [line for line in MALFORMED if OURS.public.text[:-1] in line])
def test_a_malformed_line_takes_the_trust_of_another_line_since_it_may_be_a_revocation(tmp_path, line):
    found = listing(tmp_path, OURS.public, line, SECOND.public)
    assert found.public(ID, NOON) is None
    assert "in a line of" in found.why_not(ID, NOON)
    assert found.public(SECOND.public.id, NOON) == SECOND.public


def test_other_bytes_than_text_are_kept_and_trust_nobody(tmp_path):
    content = b"\xff\xfe\n# \xe9\n" + str(OURS.public).encode() + b"\r\n\n"
    lines = parse(content)
    assert [bool(line.problem) for line in lines] == [True, False, False, False]
    assert lines[2].key == TrustedKey(OURS.public)
    assert encoded([line.text for line in lines]) == content.replace(b"\r", b"")
    assert parse(b"") == []


def test_lines_are_written_as_they_are_read():
    for key in (
        TrustedKey(OURS.public),
        TrustedKey(OURS.public, date(2027, 1, 31)),
        TrustedKey(OURS.public, date(2027, 1, 31), date(2026, 11, 27)),
    ):
        assert parse_line(str(key)).key == key


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o622, 0o666])
def test_a_list_that_others_may_write_is_not_used(tmp_path, mode):
    path = listing(tmp_path, OURS.public).path
    path.chmod(mode)
    found = TrustedKeys.load(path)
    assert found.public(ID, NOON) is None
    assert f"no key is trusted: others may write it (its mode is {mode:04o})" in found.why_not(ID, NOON)


def test_a_list_in_a_folder_that_others_may_write_is_not_used(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    path = listing(folder, OURS.public).path
    link = tmp_path / "link"
    link.symlink_to(path)
    assert TrustedKeys.load(link).public(ID, NOON)
    for mode in (0o775, 0o757):
        folder.chmod(mode)
        for each in (path, link):
            assert "can be written by other users" in TrustedKeys.load(each).why_not(ID, NOON)
    folder.chmod(0o755)
    assert TrustedKeys.load(path).public(ID, NOON)


def test_a_list_of_another_user_is_not_used(tmp_path):
    found = TrustedKeys.load(listing(tmp_path, OURS.public).path, trusted=(54321,))
    assert "belongs to another user" in found.why_not(ID, NOON)
    if os.getuid() == 0:
        os.chown(found.path, 54321, -1)
        assert "it belongs to another user (uid 54321)" in TrustedKeys.load(found.path).why_not(ID, NOON)


def test_what_is_no_list_is_not_used(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "large").write_bytes(b"#" * (MOST_BYTES + 1))
    (tmp_path / "large").chmod(0o600)
    for name, reason in {"pipe": "not a file", "large": "more than", "none": "does not exist", ".": ""}.items():
        found = TrustedKeys.load(tmp_path / name)
        assert found.public(ID, NOON) is None
        assert reason in found.why_not(ID, NOON)
        assert found.problem


def test_a_change_counts_at_the_next_look(tmp_path):
    """Also one within the same tick, of the same size, in the same file, and with the times set back."""
    found = listing(tmp_path, OURS.public, "# 1")
    for step in range(50):
        revoked = step % 2 == 0
        text = found.path.read_text().replace("# 1", "# 2")
        before = found.path.stat()
        text = f"{OURS.public if not revoked else SECOND.public}\n# 1\n".ljust(len(text), "#")
        found.path.write_text(text)
        os.utime(found.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = found.fresh()
        assert (found.public(ID, NOON) is None) == revoked


def test_an_old_list_is_read_once_and_again_after_a_change(tmp_path, monkeypatch):
    path = listing(tmp_path, OURS.public).path
    monkeypatch.setattr("xcache.wire.trusted_keys._SETTLED_NS", -1)
    found = TrustedKeys.load(path)
    assert found.fresh() is found
    path.chmod(0o666)
    refused = found.fresh()
    assert "others may write it" in refused.problem
    path.chmod(0o644)
    tmp_path.chmod(0o777)
    assert "can be written by other users" in refused.fresh().problem
    tmp_path.chmod(0o700)
    path.unlink()
    assert "does not exist" in found.fresh().problem
    listing(tmp_path, SECOND.public)
    again = found.fresh().fresh()
    assert (again.public(ID, NOON), again.public(SECOND.public.id, NOON)) == (None, SECOND.public)


def test_two_keys_of_one_id_are_not_told_apart_and_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("xcache.wire.signatures.PublicKey.id", property(lambda self: "0" * 16))
    found = listing(tmp_path, OURS.public, SECOND.public)
    assert found.public("0" * 16, NOON) is None
    assert "2 keys" in found.why_not("0" * 16, NOON)
