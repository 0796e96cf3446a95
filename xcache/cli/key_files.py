"""Read and change the files of keys for ``xcache key``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from xcache.cli import Failure
from xcache.config.config import Config
from xcache.errors import XcacheError
from xcache.wire import signing_key
from xcache.wire.ownership import trusted_uids
from xcache.wire.signatures import PrivateKey, PublicKey
from xcache.wire.trusted_keys import Line, TrustedKey, TrustedKeys, encoded

_PRIVATE, _PUBLIC = 0o600, 0o644


class Keys:
    """The list of trusted keys and the signing key that the settings name."""

    def __init__(self, settings: Config) -> None:
        self.settings = settings
        self.path = settings.trusted_keys
        # The keys of the machine's daemon are looked at by root.
        self._owners = trusted_uids(settings.daemon_uid())
        self.trusted = TrustedKeys.load(self.path, self._owners)

    def signer(self) -> PublicKey | None:
        """Return the public part of the key that signs here, or None if there is none."""
        if not self.settings.has_signing_key:
            return None
        return signing_key.load(self.settings.signing_key, self._owners).public

    def signer_if_usable(self) -> PublicKey | None:
        """Return it, or None if it cannot be used either."""
        try:
            return self.signer()
        except XcacheError:
            return None

    def trusted_or_own(self) -> TrustedKeys:
        """Return the list of trusted keys, with the one that signs here unless a line of it is about that."""
        signer = self.signer_if_usable()
        if signer is None or self.trusted.knows(signer.id):
            return self.trusted
        own = Line(str(signer), TrustedKey(signer))
        return TrustedKeys(self.path, self._owners, [*self.trusted.lines, own], self.trusted.problem, ())

    def usable(self) -> list[TrustedKey]:
        """Return each key of the list, trusted or not; raise Failure if the list is not used."""
        for problem in self._refused():
            raise Failure(problem)
        return self.trusted.keys

    def problems(self) -> list[str]:
        """Return what is wrong with the list and the signing key."""
        found = [*self._refused(), *self.trusted.problems]
        try:
            self.signer()
        except XcacheError as error:
            found.append(str(error))
        return found

    def trust(self, wanted: Sequence[TrustedKey], now: float) -> list[TrustedKey]:
        """Trust these keys; return those that were not trusted in the same way before."""
        with self._changing() as lines:
            known = {key.public.raw: key for key in self.trusted.keys}
            added = {one.public.raw: one for one in wanted if known.get(one.public.raw, one).revoked is None}
            for one in wanted:
                if one.public.raw not in added:
                    revoked = known[one.public.raw].revoked
                    raise Failure(f"{one.public.id} was revoked on {revoked} ({self.path}), and stays so")
            # A key that is trusted for another time gets a new line, at the end.
            added = {raw: one for raw, one in added.items() if raw not in known or known[raw].expires != one.expires}
            kept = [line.text for line in self.trusted.lines if not (line.key and line.key.public.raw in added)]
            lines += [*kept, *map(str, added.values())]
        for one in wanted:
            if why_not := self.trusted.why_not(one.public.id, now):
                raise Failure(why_not)
        return list(added.values())

    def revoke(self, public: PublicKey, day: date) -> None:
        """Mark a key in all of its lines as revoked on this day."""
        with self._changing() as lines:
            for line in self.trusted.lines:
                is_meant = line.key is not None and line.key.public.raw == public.raw and line.key.revoked is None
                lines.append(str(line.key._replace(revoked=day)) if line.key and is_meant else line.text)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[str]]:
        """Read the list, yield an empty one for its new lines, and write those; one command at a time."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _only_one(self.path.parent):
            self.trusted = TrustedKeys.load(self.path, self._owners)
            self.usable()
            lines: list[str] = []
            yield lines
            if lines != [line.text for line in self.trusted.lines]:
                _replace(self.path, encoded(lines))
                self.trusted = TrustedKeys.load(self.path, self._owners)
        self.usable()

    def _refused(self) -> list[str]:
        """Return why the list is not used, if there is one."""
        return [self.trusted.problem] if self.trusted.problem and os.path.lexists(self.path) else []


def write_private_key(path: Path, key: PrivateKey, owner: int | None, *, replace: bool) -> None:
    """Write a private key that only its owner can read; raise FileExistsError for one that is not to be replaced."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = _beside(path)
    try:
        _write(part, key.line().encode(), _PRIVATE, owner if os.geteuid() == 0 else None)
        if replace:
            part.replace(path)
        else:
            os.link(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a file anew, with the mode and owner that it has."""
    target = Path(os.path.realpath(path))
    found = target.stat() if target.exists() else None
    part = _beside(target)
    try:
        owner = found.st_uid if found and os.geteuid() == 0 else None
        _write(part, content, stat.S_IMODE(found.st_mode) if found else _PUBLIC, owner)
        part.replace(target)
        _sync(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write(path: Path, content: bytes, mode: int, owner: int | None) -> None:
    # It is nobody else's at any moment, and no link that somebody has put there is followed.
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, _PRIVATE)) as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        if owner is not None:
            os.fchown(file.fileno(), owner, -1)
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Wait for another command that changes a file in this folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
