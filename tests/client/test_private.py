"""Directories and peers: nobody else's, and none that somebody else could have changed."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from xcache.errors import StoreError, UntrustedError
from xcache.private import check_directory, check_peer, peer_of, prepare_directory

STRANGER = 54321
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to make something another user's")


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


def test_who_is_at_the_other_end():
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
