"""Directories and peers: nobody else's, and none that somebody else could have changed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xcache.errors import ConfigError, StoreError, UntrustedError
from xcache.wire import ownership
from xcache.wire.ownership import check_directory, check_peer, peer_of, prepare_directory, trusted_uids, uid_of_account

STRANGER = 54321
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to make something another user's")


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """Set the umask for one test."""
    before = os.umask(0o077)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o700, 0o777])
def test_a_directory_is_made_with_parents_that_only_their_owner_can_write(tmp_path, umask, mask):
    umask(mask)
    prepare_directory(tmp_path / "parent" / "store")
    made = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("parent", "parent/store")]
    assert made == [0o755 & ~mask | 0o700, 0o700]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555, 0o1777, 0o1730])
def test_a_directory_that_others_cannot_take_files_from_is_trusted(tmp_path, mode):
    tmp_path.chmod(mode)
    check_directory(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o720, 0o702])
def test_a_directory_that_others_can_write_is_not(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(UntrustedError, match="can be written by other users"):
        check_directory(tmp_path)


@needs_root
def test_a_directory_of_another_user_is_not(tmp_path):
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(UntrustedError, match=f"another user .uid {STRANGER}"):
        check_directory(tmp_path)


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UntrustedError, match="not a directory"):
        check_directory(path)
    with pytest.raises(FileNotFoundError):
        check_directory(tmp_path / "none")


def test_a_link_is_followed_where_it_is_ones_own(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    check_directory(link)
    target.chmod(0o777)
    with pytest.raises(UntrustedError):
        check_directory(link)


@needs_root
def test_a_link_that_a_stranger_planted_is_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UntrustedError, match="a link that belongs to another user"):
        check_directory(link)


def test_a_directory_is_made_for_its_user_alone(tmp_path):
    made = tmp_path / "a" / "b"
    before = os.umask(0)
    try:
        prepare_directory(made)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    prepare_directory(made)


def test_why_a_directory_cannot_be_had_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file/below cannot be made: Not a directory"):
        prepare_directory(tmp_path / "file" / "below")
    with pytest.raises(StoreError, match="/proc/xcache cannot be made"):
        prepare_directory(type(tmp_path)("/proc/xcache"))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(StoreError, match="can be written by other users"):
        prepare_directory(open_to_all)


def test_a_name_that_no_file_can_have_is_an_error_like_any_other(tmp_path):
    with pytest.raises(StoreError):
        prepare_directory(tmp_path / "a\0b")


def test_a_store_is_not_put_where_strangers_can_leave_files(tmp_path):
    """The sticky bit keeps others from taking files away, not from planting a store.db that is then believed."""
    shared = tmp_path / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(StoreError):
        prepare_directory(shared)


def test_the_peer_of_a_socket_is_the_process_at_its_other_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_of(ours).uid == os.getuid()
        assert check_peer(ours).pid == os.getpid()


CONNECT = """
import os, socket, sys
os.setuid({uid})
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect({path!r})
    sys.stdin.read()
"""


@needs_root
def test_another_user_at_the_other_end_is_refused(place):
    place.root.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.socket))
        place.socket.chmod(0o777)
        listener.listen()
        child = subprocess.Popen(
            [sys.executable, "-c", CONNECT.format(uid=STRANGER, path=str(place.socket))], stdin=subprocess.PIPE
        )
        accepted, _ = listener.accept()
        with accepted, pytest.raises(UntrustedError, match=f"another user .uid {STRANGER}"):
            check_peer(accepted)
        child.communicate(timeout=30)
    assert child.returncode == 0


@pytest.fixture
def overflow(monkeypatch):
    """Have the kernel report another number for users without one."""

    def report(*uids: int) -> None:
        monkeypatch.setattr(ownership, "overflow_uids", lambda: frozenset(uids))

    return report


def test_the_number_of_strangers_is_what_the_kernel_says():
    assert ownership.overflow_uids() == {int(Path("/proc/sys/kernel/overflowuid").read_text())}


def test_the_number_of_strangers_is_trusted_under_no_name(overflow):
    assert trusted_uids(1234) == {os.getuid(), 0, 1234}
    overflow(65534, 1234)
    with pytest.raises(ConfigError, match="'1234' cannot be trusted"):
        uid_of_account("1234")
    with pytest.raises(ConfigError, match="'nobody' cannot be trusted"):
        uid_of_account("nobody")


def test_a_user_with_the_overflow_uid_trusts_not_even_itself(tmp_path, overflow):
    overflow(os.getuid())
    with pytest.raises(UntrustedError, match=f"runs as uid {os.getuid()}, which the kernel also reports"):
        check_directory(tmp_path)
    with pytest.raises(StoreError, match="other users could not be told from this one"):
        prepare_directory(tmp_path)
