"""Check that only this user, or root, controls a directory or a peer. Both ends of the socket use it."""

import functools
import os
import socket
import stat
import struct
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from xcache.errors import ConfigError, SharedUidError, StoreError, UntrustedError
from xcache.wire.bounded import text_of

_USUAL_OVERFLOW_UID = 65534
# A key that signs what comes from other machines is a writer in the store, with a uid above all uids of users.
_FIRST_SIGNER_UID = 2**62


class Peer(NamedTuple):
    """The process at the other end of a connection, as the kernel reports it."""

    pid: int
    uid: int


def signer_uid(key_id: str) -> int:
    """Return the uid that stands for a signing key in the store; ``key_id`` begins with 15 hexadecimal digits."""
    return _FIRST_SIGNER_UID | int(key_id[:15], 16)


def is_signer(uid: int) -> bool:
    """Return whether a uid stands for a signing key."""
    return uid >= _FIRST_SIGNER_UID


@functools.cache
def overflow_uids() -> frozenset[int]:
    """Return the overflow uids, which the kernel reports for users without a uid here, as across user namespaces."""
    found = set()
    # SO_PEERCRED, stat() and getuid() report the first; some file systems report the second.
    for path in ("/proc/sys/kernel/overflowuid", "/proc/sys/fs/overflowuid"):
        try:
            found.add(int(text_of(path)))
        except (OSError, ValueError):
            found.add(_USUAL_OVERFLOW_UID)
    return frozenset(found)


def at_once(path: str, flags: int) -> int:
    """Open a file for ``open`` without waiting: somebody may have put a pipe there, which nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def own_uid() -> int:
    """Return the uid of this process; raise SharedUidError for an overflow uid, which strangers may share."""
    uid = os.getuid()
    if uid in overflow_uids():
        raise SharedUidError(
            f"this process runs as uid {uid}, which the kernel also reports for every user without a uid here, so"
            " other users could not be told from this one"
        )
    return uid


def uid_of_account(account: str) -> int:
    """Return the uid of an account; raise ConfigError if it does not exist or has an overflow uid."""
    try:
        import pwd

        uid = int(account) if account.isdigit() else pwd.getpwnam(account).pw_uid
    except (ImportError, KeyError):
        raise ConfigError(f"there is no account {account!r}") from None
    if uid in overflow_uids():
        raise ConfigError(
            f"account {account!r} cannot be trusted: the kernel also reports its uid {uid} for every user without a"
            " uid here"
        )
    return uid


def trusted_uids(daemon: int | None = None) -> set[int]:
    """Return the uids whose sockets and directories are trusted: this user's, root's and the machine's daemon's."""
    return {own_uid(), 0} | (set() if daemon is None else {daemon})


def check_directory(directory: Path, trusted: Container[int] | None = None) -> None:
    """Raise UntrustedError for a directory in which another user could have planted a socket or a store."""
    trusted = trusted_uids() if trusted is None else trusted
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        # A link may be followed if nobody else could have planted it.
        if found.st_uid not in trusted:
            raise UntrustedError(f"{directory} is a link that belongs to another user (uid {found.st_uid})")
        found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise UntrustedError(f"{directory} is not a directory")
    if found.st_uid not in trusted:
        raise UntrustedError(f"{directory} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise UntrustedError(f"{directory} can be written by other users")


def check_store_directory(directory: Path) -> None:
    """Raise UntrustedError for a directory in which another user could plant files of a store."""
    check_directory(directory)
    if directory.stat().st_mode & 0o022:
        # The sticky bit keeps others from removing files, but not from planting some.
        raise UntrustedError(f"{directory} can be written by other users")


def prepare_directory(directory: Path) -> None:
    """Make a directory that only this user can write; raise StoreError if it cannot be made or used."""
    prepare_meeting_place(directory)
    try:
        check_store_directory(directory)
    except UntrustedError as error:
        raise StoreError(str(error)) from None


def prepare_meeting_place(directory: Path, *, for_everybody: bool = False) -> None:
    """Make a directory for a socket. Other users may write it if it is sticky, because the peer is checked, too."""
    try:
        if not directory.exists():
            for folder in reversed([directory, *directory.parents]):
                if not folder.exists():
                    folder.mkdir(mode=0o700 if folder == directory else 0o755, exist_ok=True)
                    # The umask may take others' rights, but not the owner's, nor any to the machine's socket.
                    folder.chmod(0o755 if for_everybody else stat.S_IMODE(folder.stat().st_mode) | 0o700)
        check_directory(directory)
    except UntrustedError as error:
        raise StoreError(str(error)) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{directory} cannot be made: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(f"{directory} cannot be written")


def peer_of(connected: socket.socket) -> Peer:
    """Return the process at the other end of a Unix socket."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        return Peer(pid, uid)
    # macOS: struct xucred from LOCAL_PEERCRED (option 1 at level 0), whose second integer is the uid.
    credentials = connected.getsockopt(0, 1, 76)
    return Peer(0, struct.unpack_from("=II", credentials)[1])


def check_peer(connected: socket.socket, trusted: Container[int] | None = None) -> Peer:
    """Return the peer; raise UntrustedError unless its uid is ``trusted`` (by default this user's or root's)."""
    peer = peer_of(connected)
    if peer.uid not in (trusted_uids() if trusted is None else trusted):
        raise UntrustedError(f"the other end belongs to another user (uid {peer.uid})")
    return peer
