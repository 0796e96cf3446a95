"""Redis and Valkey: an object is a string under the prefix of the tier's address."""

from __future__ import annotations

import contextlib
import contextvars
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from redis import _parsers, exceptions
from redis import asyncio as redis
from redis.asyncio import retry
from redis.backoff import NoBackoff

from xcached.tiers import certificates
from xcached.tiers.tier import (
    DENIED,
    FAILED,
    FULL,
    MISSING,
    READ_ONLY,
    TOO_LARGE,
    UNREACHABLE,
    Listed,
    TierError,
    connection_failed,
)

# The parser in C takes an array's length at its word, and memory for as many elements. This one is as fast here.
_PARSER: Any = getattr(_parsers, "_AsyncRESP2Parser", redis.connection.DefaultParser)
# Bytes that one answer may have beside the object that was asked for: the names and sizes of one page of a scan.
_MOST_BESIDE = 1024**2
# Memory that a line of an answer takes beside its bytes.
_BYTES_OF_LINE = 64
# Bytes of the object that the current task asks for.
_asked_for = contextvars.ContextVar("asked for", default=0)
# Redis takes so many bytes in one value, unless its proto-max-bulk-len says otherwise.
_MOST_BYTES = 512 * 1024**2
_CONNECTIONS = 16
_LISTED_AT_ONCE = 500

# The first that fits; what they say is not passed on, because it may repeat what was sent.
_KINDS: tuple[tuple[tuple[type[Exception], ...], str, str], ...] = (
    (
        (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError),
        DENIED,
        "the server does not accept the user and password, or does not allow this",
    ),
    ((exceptions.AuthenticationWrongNumberOfArgsError,), DENIED, "the server does not know users"),
    ((exceptions.OutOfMemoryError,), FULL, "the server has used its maxmemory"),
    ((exceptions.ReadOnlyError,), READ_ONLY, "the server is a read-only replica"),
    ((exceptions.MaxConnectionsError,), FULL, "too many connections"),
    ((exceptions.BusyLoadingError,), UNREACHABLE, "the server is loading its data"),
    ((exceptions.MasterDownError,), UNREACHABLE, "the replica has lost its master"),
    ((exceptions.MovedError, exceptions.AskError), FAILED, "the server is part of a cluster, which is not supported"),
    ((exceptions.TimeoutError,), UNREACHABLE, "no answer"),
)


class Place(NamedTuple):
    """The place of a Redis, and the options in the tier's address."""

    host: str
    port: int
    socket: str
    tls: bool
    user: str | None
    password: str | None
    database: int
    prefix: str
    ttl: float | None


class RedisStore:
    """A Redis."""

    can_create = True
    can_list = True

    def __init__(self, place: Place, timeout: float) -> None:
        self._prefix = place.prefix
        self._ttl = None if place.ttl is None else max(1, round(place.ttl * 1000))
        options: dict[str, Any] = {
            "db": place.database,
            "username": place.user,
            "password": place.password,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "protocol": 2,
            "parser_class": _BoundedParser,
            # A second try could take its own first one for another's object.
            "retry": retry.Retry(NoBackoff(), 0),
        }
        if place.socket:
            options |= {"connection_class": redis.UnixDomainSocketConnection, "path": place.socket}
        else:
            options |= {"connection_class": redis.Connection, "host": place.host, "port": place.port}
        if place.tls:
            options |= {"connection_class": _TlsConnection, "context": certificates.context()}
        pool = redis.BlockingConnectionPool(max_connections=_CONNECTIONS, timeout=timeout, **options)
        self._client = redis.Redis.from_pool(pool)

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        # A byte more than allowed shows that there are more.
        content = await self.begin(name, most + 1)
        if content is not None and len(content) > most:
            raise TierError(TOO_LARGE, f"an object has more than the {most} bytes that were asked for")
        return content

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        key = self._prefix + name
        with _translated(), _asking_for(most):
            # Not in a transaction, which a Redis refuses that has used its memory.
            pipeline = self._client.pipeline(transaction=False).getrange(key, 0, most - 1).exists(key)
            content, exists = await pipeline.execute()
            if not content and exists:
                # It is empty, or has come in between.
                content = await self._client.get(key)
        if not content and (not exists or content is None):
            return None
        if not isinstance(content, bytes):
            raise TierError(FAILED, "the server does not answer as Redis does")
        return content[:most]

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        with _translated():
            return bool(await self._client.exists(self._prefix + name))

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one."""
        await self._set(name, content, only_new=False)

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        return await self._set(name, content, only_new=True)

    async def remove(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""
        with _translated():
            await self._client.delete(self._prefix + name)

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Yield the objects whose names begin so. Redis does not say when they were written."""
        pattern = re.sub(r"([\\*?\[\]])", r"\\\1", self._prefix + prefix) + "*"
        cursor, seen = 0, set[str]()
        while True:
            with _translated():
                cursor, keys = await self._client.scan(cursor, pattern, _LISTED_AT_ONCE)
                # A scan gives some keys twice.
                keys = [key for key in keys if key.decode(errors="replace") not in seen]
                pipeline = self._client.pipeline(transaction=False)
                for key in keys:
                    pipeline.strlen(key)
                sizes = await pipeline.execute(raise_on_error=False) if keys else []
            for key, size in zip(keys, sizes, strict=True):
                seen.add(key.decode(errors="replace"))
                if isinstance(size, int):
                    yield Listed(key.decode(errors="replace").removeprefix(self._prefix), size, None)
            if not cursor:
                return

    async def close(self) -> None:
        """Close the connections."""
        with _translated():
            await self._client.aclose()

    async def _set(self, name: str, content: bytes, *, only_new: bool) -> bool:
        if len(content) > _MOST_BYTES:
            raise TierError(TOO_LARGE, f"Redis takes at most {_MOST_BYTES} bytes in one value")
        with _translated():
            return bool(await self._client.set(self._prefix + name, content, px=self._ttl, nx=only_new))


class _BoundedParser(_PARSER):  # type: ignore[misc]  # mypy runs without redis
    """A parser that refuses an answer which is, or says that it is, larger than what was asked for."""

    _left = 0

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read one answer."""
        self._left = _asked_for.get() + _MOST_BESIDE
        return await super().read_response(*arguments, **options)

    async def _read(self, length: int) -> bytes:
        self._take(length)
        found: bytes = await super()._read(length)
        return found

    async def _readline(self) -> bytes:
        found: bytes = await super()._readline()
        self._take(len(found) + _BYTES_OF_LINE)
        return found

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0 or size < 0:
            raise exceptions.InvalidResponse("more than was asked for")


@contextlib.contextmanager
def _asking_for(most: int) -> Iterator[None]:
    before = _asked_for.set(most)
    try:
        yield
    finally:
        _asked_for.reset(before)


class _TlsConnection(redis.SSLConnection):  # type: ignore[misc]  # mypy runs without redis
    """A connection with a given context: redis-py makes one for each, and old versions of it compare no host names."""

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = context

    async def disconnect(self, nowait: bool = False, **options: Any) -> None:
        """Close it; after a failure at once, because the farewell of TLS would go on after that."""
        writer = self._writer
        await super().disconnect(nowait=nowait, **options)
        if nowait and writer is not None:
            writer.transport.abort()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    # redis-py trips in many ways over the answers of what is not a Redis.
    except Exception as error:  # noqa: BLE001 - all of them are translated
        raise _tier_error(error) from None


def _tier_error(error: Exception) -> TierError:
    for classes, kind, message in _KINDS:
        if isinstance(error, classes):
            return TierError(kind, message)
    text = str(error)
    if "invalid database" in text.lower() or "DB index" in text:
        return TierError(MISSING, "the server has no database of this number")
    if text.startswith("MISCONF"):
        return TierError(READ_ONLY, "the server cannot save its data to its disk and refuses writes")
    if "max number of clients" in text:
        return TierError(FULL, "the server has as many clients as it takes")
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return certificates.refusal(error) or connection_failed(error)
    if not isinstance(error, exceptions.RedisError) or isinstance(error, exceptions.InvalidResponse):
        return TierError(FAILED, "the server does not answer as Redis does")
    word = re.match(r"[A-Z]{3,20}\b", text)
    return TierError(FAILED, f"the server refused ({word.group() if word else type(error).__name__})")
