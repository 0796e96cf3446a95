"""The list of keys whose signatures count: a line for each, ``NAME xcache-ed25519:... [expires=DATE] [revoked=DATE]``.

Everything doubtful trusts nobody. A list that others could have written is not used at all; a line that is malformed
takes the trust from the keys that it names; a revocation wins over every other line of the same key.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Container, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from xcache.errors import SigningKeyError, UntrustedError
from xcache.wire.ownership import at_once, check_directory, trusted_uids
from xcache.wire.signatures import NAME_SAID, PRIVATE, PUBLIC, PublicKey, parse_public

# The most that is read of a file, which may be no list of keys.
MOST_BYTES = 1024**2
# Two changes within a tick of the file system's clock look alike, so a file that has just changed is read again.
_SETTLED_NS = 2 * 10**9
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# All of a key but its end, of which there are several spellings.
_ALMOST = len(PUBLIC) + 42
_KEY = re.compile(re.escape(PUBLIC) + r"[A-Za-z0-9+/]{42}")

_State = tuple[tuple[int, ...], ...]


class TrustedKey(NamedTuple):
    """A line of the list. A key is trusted to the end of the day when it expires, in UTC."""

    public: PublicKey
    expires: date | None = None
    # When it was revoked. It counts at once, whatever the date.
    revoked: date | None = None

    def __str__(self) -> str:
        words = [f"{name}={day}" for name, day in (("expires", self.expires), ("revoked", self.revoked)) if day]
        return " ".join([str(self.public), *words])

    def state(self, now: float) -> str:
        """Return ``trusted``, ``expired`` or ``revoked``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires < today(now) else "trusted"


class Line(NamedTuple):
    """A line of the file: the text, and the key that it names or what is wrong with it; neither for a comment."""

    text: str
    key: TrustedKey | None = None
    problem: str = ""


class TrustedKeys:
    """The list as it was when it was read. ``fresh`` returns it as it is now."""

    def __init__(self, path: Path, trusted: Container[int], lines: list[Line], problem: str, state: _State) -> None:
        self.path = path
        # Why nothing is trusted; empty if the list is used.
        self.problem = problem
        self.lines = lines
        self.problems = [f"{path}: line {n}: {line.problem}" for n, line in enumerate(lines, 1) if line.problem]
        self.keys = _merged(line.key for line in lines if line.key)
        self._trusted = trusted
        self._state = state
        self._doubtful = {found for line in lines if line.problem for found in _KEY.findall(line.text)}
        self._by_id: dict[str, list[TrustedKey]] = {}
        for key in self.keys:
            self._by_id.setdefault(key.public.id, []).append(key)

    @classmethod
    def load(cls, path: Path, trusted: Container[int] | None = None) -> TrustedKeys:
        """Read the list. It must belong to one of ``trusted`` (this user and root, unless given)."""
        trusted = trusted_uids() if trusted is None else trusted
        state = _settled(_state(path))
        try:
            content = _content(path, trusted)
        except FileNotFoundError:
            return cls(path, trusted, [], f"{path} does not exist, so that no key is trusted", state)
        except (OSError, SigningKeyError, UntrustedError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return cls(path, trusted, [], f"{path} is not used, so that no key is trusted: {reason}", state)
        return cls(path, trusted, parse(content), "", state)

    def fresh(self) -> TrustedKeys:
        """Return this list, or a new one if the file has changed: a revocation counts at the next look."""
        is_same = self._state and _state(self.path) == self._state
        return self if is_same else TrustedKeys.load(self.path, self._trusted)

    def public(self, key_id: str, now: float) -> PublicKey | None:
        """Return the key of this id if it is trusted now."""
        return None if self.why_not(key_id, now) else self._by_id[key_id][0].public

    def why_nobody(self, now: float) -> str:
        """Return why no key is trusted; empty if one is."""
        if not all(self.why_not(key_id, now) for key_id in self._by_id):
            return ""
        return self.problem or f"no key in {self.path} is trusted"

    def knows(self, key_id: str) -> bool:
        """Return whether a line names a key of this id, trusted or not."""
        return key_id in self._by_id

    def why_not(self, key_id: str, now: float) -> str:
        """Return why the key of this id is not trusted; empty if it is."""
        found = self._by_id.get(key_id, [])
        if not found:
            return self.problem or f"the key {key_id} is not in {self.path}"
        key = found[0]
        told = f"the key {key_id} ({key.public.name})"
        if len(found) > 1:
            return f"{len(found)} keys in {self.path} have the id {key_id}"
        if key.public.text[:_ALMOST] in self._doubtful:
            return f"{told} is also in a line of {self.path} that is malformed"
        state = key.state(now)
        if state == "revoked":
            return f"{told} was revoked on {key.revoked}"
        return f"{told} expired on {key.expires}" if state == "expired" else ""


def parse(content: bytes) -> list[Line]:
    """Return the lines of a list."""
    texts = content.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    return [parse_line(text.removesuffix("\r")) for text in texts] if content else []


def encoded(texts: list[str]) -> bytes:
    """Return the list that has these lines."""
    return "".join(f"{text}\n" for text in texts).encode("utf-8", "surrogateescape")


def parse_line(text: str) -> Line:
    """Return a line of a list: a key, a comment, or what is wrong with it."""
    if not text.strip() or text.lstrip().startswith("#"):
        return Line(text)
    if PRIVATE in text:
        return Line(text, problem="this is a private key, and others may have seen it: make a new one")
    words = text.split()
    public = parse_public(*words[:2]) if len(words) > 1 else None
    if public is None:
        return Line(text, problem=f"it does not begin with NAME {PUBLIC}... (a name has {NAME_SAID})")
    days: dict[str, date] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        day = parse_date(value)
        if name not in ("expires", "revoked") or name in days or day is None:
            return Line(text, problem=f"{word[:40]!r} is not understood; use expires=YYYY-MM-DD or revoked=YYYY-MM-DD")
        days[name] = day
    return Line(text, TrustedKey(public, **days))


def parse_date(text: str) -> date | None:
    """Return the day of ``YYYY-MM-DD``; None if it is none."""
    try:
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except ValueError:
        return None


def today(now: float) -> date:
    """Return the day of a moment, in UTC."""
    return datetime.fromtimestamp(now, UTC).date()


def _merged(keys: Iterator[TrustedKey]) -> list[TrustedKey]:
    """Return each key once: revoked if any of its lines says so, and expired when the first of them does."""
    found: dict[bytes, TrustedKey] = {}
    for key in keys:
        before = found.setdefault(key.public.raw, key)
        days = (min(filter(None, pair), default=None) for pair in zip(before[1:], key[1:], strict=True))
        found[key.public.raw] = TrustedKey(before.public, *days)
    return list(found.values())


def _content(path: Path, trusted: Container[int]) -> bytes:
    for folder in _folders(path):
        check_directory(folder, trusted)
    with open(path, "rb", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise SigningKeyError("it is not a file")
        if found.st_uid not in trusted:
            raise SigningKeyError(f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & 0o022:
            raise SigningKeyError(f"others may write it (its mode is {stat.S_IMODE(found.st_mode):04o}): chmod 644")
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise SigningKeyError(f"it has more than {MOST_BYTES} bytes")
    return content


def _folders(path: Path) -> set[Path]:
    """Return the folder of the file, and the one that it is in if it is a link."""
    return {path.parent, Path(os.path.realpath(path)).parent}


def _state(path: Path) -> _State:
    """Return what changes when the file or the rights to it do."""
    try:
        found = path.stat()
        folders = [folder.stat() for folder in sorted(_folders(path))]
    except OSError:
        # It is looked for each time.
        return ()
    # Times can be set; the time of that is ctime.
    file = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode, found.st_uid
    return (file, *((each.st_dev, each.st_ino, each.st_mode, each.st_uid) for each in folders))


def _settled(state: _State) -> _State:
    """Return the state if the file will look different after the next change."""
    return state if state and time.time_ns() - max(state[0][3:5]) > _SETTLED_NS else ()
