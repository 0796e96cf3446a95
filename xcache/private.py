"""Is this directory, or this peer, one that only we (or root) control? Asked at both ends of the socket."""

import os
import socket
import stat
import struct
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from xcache.errors import ConfigError, StoreError, UntrustedError


class Peer(NamedTuple):
    """Who is at the other end of a connection, as the kernel reports it."""

    pid: int
    uid: int


def uid_of_account(account: str) -> int:
    """The number of an account that a setting names."""
    if account.isdigit():
        return int(account)
    try:
        import pwd

        return pwd.getpwnam(account).pw_uid
    except (ImportError, KeyError):
        raise ConfigError(f"there is no account {account!r}") from None


def trusted_uids(daemon_user: str = "") -> set[int]:
    """Whose sockets and directories can be used: one's own, root's, and those of the machine's daemon."""
    return {os.getuid(), 0} | ({uid_of_account(daemon_user)} if daemon_user else set())


def check_directory(directory: Path, trusted: Container[int] | None = None) -> None:
    """Refuse a directory in which somebody else could have planted a socket or a store."""
    trusted = trusted_uids() if trusted is None else trusted
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        # Following is safe where the link itself could not have been planted.
        if found.st_uid not in trusted:
            raise UntrustedError(f"{directory} is a link that belongs to another user (uid {found.st_uid})")
        found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedError(f"{directory} is not a directory")
    if found.st_uid not in trusted:
        raise UntrustedError(f"{directory} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"{directory} can be written by other users")


def prepare_directory(directory: Path) -> None:
    """Make a directory in which only this user can leave anything, or say why it cannot be used."""
    prepare_meeting_place(directory)
    if directory.stat().st_mode & 0o022:
        # The sticky bit keeps others from taking files away, and not from planting some.
        raise StoreError(f"{directory} can be written by other users")


def prepare_meeting_place(directory: Path, *, for_everybody: bool = False) -> None:
    """Make a directory for a socket; whoever is met there is checked besides."""
    try:
        if not directory.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if for_everybody:
                # The process's umask stands in the way of saying so above.
                directory.chmod(0o755)
        check_directory(directory)
    except UntrustedError as error:
        raise StoreError(str(error)) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{directory} cannot be made: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(f"{directory} cannot be written")


def peer_of(connected: socket.socket) -> Peer:
    """The process at the other end of a Unix socket."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        return Peer(pid, uid)
    # macOS: struct xucred from LOCAL_PEERCRED (option 1 at level 0), whose second integer is the uid.
    credentials = connected.getsockopt(0, 1, 76)
    return Peer(0, struct.unpack_from("=II", credentials)[1])


def check_peer(connected: socket.socket, trusted: Container[int] | None = None) -> Peer:
    """Refuse a peer that is neither this user's nor root's, nor of another uid that is ``trusted``."""
    peer = peer_of(connected)
    if peer.uid not in (trusted_uids() if trusted is None else trusted):
        raise UntrustedError(f"the other end belongs to another user (uid {peer.uid})")
    return peer
