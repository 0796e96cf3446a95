"""Object stores: S3 and what speaks like it, Google Cloud Storage, Azure's blobs."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from xcache.errors import ConfigError
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
)

_STORES = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

_KINDS = (
    dict.fromkeys((401, 403), DENIED)
    | dict.fromkeys((404, 410), MISSING)
    | dict.fromkeys((405, 501), READ_ONLY)
    | dict.fromkeys((429, 503, 507), FULL)
    | dict.fromkeys((502, 504), UNREACHABLE)
    | {413: TOO_LARGE}
)
_KINDS_OF_CODES = {
    "AccessDenied": DENIED,
    "EntityTooLarge": TOO_LARGE,
    "RequestBodyTooLarge": TOO_LARGE,
    "NoSuchBucket": MISSING,
    "ContainerNotFound": MISSING,
    "SlowDown": FULL,
    "ServerBusy": FULL,
    "QuotaExceeded": FULL,
    "XMinioStorageFull": FULL,
}
# After a listing that failed, obstore keeps a connection until this is over, even of a store that is gone.
_IDLE_SECONDS = 30.0
# A server that announced fewer bytes may go on for ever.
_PIECE_BYTES = 1024**2
# Nothing else of what an error says is passed on: it has addresses in it, and these may have signatures.
_STATUS = re.compile(r"status code: (\d{3})\b")
_NO_SUCH_RANGE = 416
_CODE = re.compile(r"<Code>(\w{1,60})</Code>|\(code: (\w{1,60})\)")
# The servers that are asked for credentials when nothing else gives any.
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_CERTIFICATE = re.compile(r"\bInvalidCertificate\(\s*(\w{1,60}?)(?:Context)?\b")
_WHY_REFUSED = {
    "Expired": "it has expired",
    "NotValidForName": "it is for another host",
    "UnknownIssuer": "no trusted authority has issued it",
}
_CONNECTION = re.compile(r"HTTP error|HttpError|error sending request|connection|timed? ?out", re.IGNORECASE)


async def _read(found: Any, most: int) -> bytes:
    """Return the content of an answer; the rest of one with more than ``most`` bytes is left."""
    pieces, size = [], 0
    async for piece in found.stream(min_chunk_size=_PIECE_BYTES):
        pieces.append(bytes(piece))
        size += len(piece)
        if size > most:
            break
    return b"".join(pieces)


class ObjectStore:
    """A bucket or a container, below a prefix."""

    can_create = True
    can_list = True

    def __init__(self, scheme: str, bucket: str, prefix: str, credentials: Mapping[str, str], timeout: float) -> None:
        seconds = datetime.timedelta(seconds=timeout)
        short = {"init_backoff": seconds / 40, "max_backoff": seconds / 8, "base": 2}
        store: Any = _STORES[scheme]
        certificates.check_file()
        try:
            self._store = store(
                bucket,
                prefix=prefix or None,
                # These hide what the environment says, so AWS_ALLOW_HTTP is not read. Only an address that the user
                # gives begins with http.
                client_options={
                    "timeout": seconds,
                    "connect_timeout": seconds,
                    "pool_idle_timeout": datetime.timedelta(seconds=_IDLE_SECONDS),
                    "allow_http": True,
                },
                retry_config={"max_retries": 2, "retry_timeout": seconds, "backoff": short},
                **credentials,
            )
        except (exceptions.BaseError, OSError, ValueError) as error:
            # Its text may have a credential in it.
            name = "AZURE_STORAGE_ACCOUNT_NAME is not set" if "Account must be" in str(error) else type(error).__name__
            raise ConfigError(f"the credentials of {scheme}:// cannot be used: {name}") from None
        # An object may be missing because the bucket is.
        self._doubtful = True

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        try:
            with _translated():
                found = await obstore.get_async(self._store, name)
                size = int(found.meta["size"])
                if size > most:
                    # Its connection ends with it, and the exception would keep it.
                    del found
                    raise TierError(TOO_LARGE, f"an object has {size} bytes; at most {most} were asked for")
                content = await _read(found, size)
                if len(content) > size:
                    raise TierError(FAILED, f"an object has more than the {size} bytes that the server announced")
        except FileNotFoundError:
            await self._require_bucket()
            return None
        self._doubtful = False
        return content

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        try:
            with _translated():
                content = await self._range(name, most)
        except FileNotFoundError:
            await self._require_bucket()
            return None
        self._doubtful = False
        return content

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object."""
        try:
            with _translated():
                await obstore.head_async(self._store, name)
        except FileNotFoundError:
            await self._require_bucket()
            return False
        self._doubtful = False
        return True

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one."""
        await self._put(name, content, "overwrite")

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; return whether it was written."""
        try:
            await self._put(name, content, "create")
        except exceptions.AlreadyExistsError:
            return False
        return True

    async def remove(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""
        try:
            with _translated():
                await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            await self._require_bucket()

    async def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Yield the objects whose names begin so."""
        # obstore takes whole parts of names only.
        with _translated():
            batches = obstore.list(self._store, prefix.rpartition("/")[0] or None)
        while True:
            with _translated_missing(), _translated():
                batch = await anext(batches, None)
            if batch is None:
                return
            for each in batch:
                if each["path"].startswith(prefix):
                    yield Listed(each["path"], each["size"], each["last_modified"].timestamp())

    async def close(self) -> None:
        """Let go of the connections, which end by themselves."""
        self._store = None

    async def _range(self, name: str, most: int) -> bytes:
        try:
            return (await _read(await obstore.get_async(self._store, name, options={"range": (0, most)}), most))[:most]
        except exceptions.BaseError as error:
            # An empty object has no range.
            if (status := _STATUS.search(str(error))) and int(status[1]) == _NO_SUCH_RANGE:
                return b""
            raise

    async def _put(self, name: str, content: bytes, mode: str) -> None:
        with _translated_missing(), _translated():
            # In one request: then it is there as a whole, or not, and a condition holds for it.
            await obstore.put_async(self._store, name, content, mode=mode, use_multipart=False)
        self._doubtful = False

    async def _require_bucket(self) -> None:
        """Raise if the bucket is missing: asking for an object does not tell that from a missing object."""
        if not self._doubtful:
            return
        try:
            with _translated_missing(), _translated():
                await anext(obstore.list(self._store, chunk_size=1), None)
        except TierError as error:
            if error.kind == MISSING:
                raise
            # Not everybody may list. The next operation says whatever else is wrong.
            self._doubtful = error.kind != DENIED
        else:
            self._doubtful = False


@contextlib.contextmanager
def _translated_missing() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise TierError(MISSING, "there is no such bucket or container") from None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Let only TierError, FileNotFoundError and AlreadyExistsError out."""
    try:
        yield
    except (FileNotFoundError, exceptions.AlreadyExistsError):
        raise
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise _tier_error(error) from None


def _tier_error(error: Exception) -> TierError:
    text = str(error)
    if any(server in text for server in _METADATA_SERVERS):
        return TierError(DENIED, "no credentials were found")
    if found := _CERTIFICATE.search(text):
        return certificates.refused(_WHY_REFUSED.get(found[1], found[1]))
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = str(found[1] or found[2]) if (found := _CODE.search(text)) else ""
    if code in _KINDS_OF_CODES:
        kind = _KINDS_OF_CODES[code]
    elif isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        kind = DENIED
    elif status:
        kind = _KINDS.get(status, FAILED)
    elif _CONNECTION.search(text):
        return TierError(UNREACHABLE, "the connection failed, or there was no answer")
    else:
        kind = FAILED
    said = [f"status {status}"] * bool(status) + [code] * bool(code)
    return TierError(kind, f"the store refused ({', '.join(said) or type(error).__name__})")
