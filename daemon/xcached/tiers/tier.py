"""The one interface of all engines: objects by name."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from xcache.errors import XcacheError


class TierError(XcacheError):
    """A tier did not do what it was asked to; ``kind`` is one of ``KINDS``, for counts and for what to do about it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


# The kinds of trouble with a tier. A tier that takes too long is cut off by its caller.
UNREACHABLE, UNTRUSTED, DENIED, MISSING, FULL, READ_ONLY, TOO_LARGE, FAILED = KINDS = (
    "unreachable",  # nobody answers there
    "untrusted",  # the certificate of the server is not accepted
    "denied",  # the credentials are wrong, or do not allow this
    "missing",  # there is no such bucket, container or folder
    "full",  # no room is left, or too much was asked for at once
    "read-only",  # objects can be read, and not written
    "too large",  # the object is larger than the caller or the engine takes
    "failed",  # anything else
)


def connection_failed(error: BaseException) -> TierError:
    """Return the error for a connection that was not made or has ended, with the system's words where there are any."""
    words, cause = "", error
    for _ in range(_MOST_CAUSES):
        if isinstance(cause, OSError) and cause.strerror:
            words = f": {cause.strerror}"
            break
        following = cause.__cause__ or cause.__context__
        if following is None:
            break
        cause = following
    return TierError(UNREACHABLE, f"the connection failed{words}")


# An exception has fewer causes.
_MOST_CAUSES = 10
_PART = r"(?!\.{1,2}(?:/|$))[a-z0-9.-]{1,200}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_MOST_CHARACTERS = 800


def is_name(text: str) -> bool:
    """Return whether an object can have this name: of a-z, 0-9, '-', '.' and '/', without a part '', '.' or '..'."""
    return len(text) <= _MOST_CHARACTERS and _NAME.fullmatch(text) is not None


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    size: int
    # Seconds since 1970 by the engine's clock; None where it does not say.
    modified_at: float | None


class Tier(Protocol):
    """An engine. Names are those for which ``is_name`` is true; the engine adds the prefix that its address has.

    No object's name is the beginning of another's up to a '/', because a folder cannot have both.

    The methods run on one event loop and may run at the same time. They raise TierError; none of them waits longer than
    the time-out that the tier was made with, and a caller may cancel each. An object that was being written then may
    be there, as a whole, or not.
    """

    # Whether ``create`` is atomic, and whether objects can be listed.
    can_create: bool
    can_list: bool

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one; readers see one or the other, never a part."""

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written. One of many who try it at once succeeds.

        Only where ``can_create``.
        """

    async def remove(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Yield the objects whose names begin so. Only where ``can_list``."""

    async def close(self) -> None:
        """Close the connections."""
