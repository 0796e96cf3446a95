"""Caches that speak HTTP as Bazel's do (bazel-remote, BuildBuddy, nginx with WebDAV): /ac/ and /cas/."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx

from xcached.tiers import action_results, certificates
from xcached.tiers.action_results import Reference
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
from xcached.tiers.workers import Workers

# Larger objects are apart from their message, under /cas/.
MOST_BYTES_INSIDE = 512 * 1024
_CONNECTIONS = 16
_THREADS = 2
_KINDS = (
    dict.fromkeys((401, 403, 407), DENIED)
    | dict.fromkeys((404, 409, 410), MISSING)
    | dict.fromkeys((405, 501), READ_ONLY)
    | dict.fromkeys((429, 503, 507), FULL)
    | dict.fromkeys((502, 504), UNREACHABLE)
    | {413: TOO_LARGE}
)


class HttpCache:
    """A cache of Bazel's kind. The server decides how long a removed object stays under /cas/."""

    can_create = False
    can_list = False

    def __init__(
        self, address: str, credentials: tuple[str, str] | None, headers: Mapping[str, str], timeout: float
    ) -> None:
        self._address = address.rstrip("/")
        self._workers = Workers(_THREADS)
        self._client = httpx.AsyncClient(
            auth=credentials,
            # Compressed content would have no known length.
            headers={"Accept-Encoding": "identity", **headers},
            timeout=timeout,
            verify=certificates.context(),
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            follow_redirects=False,
        )

    async def get(self, name: str, most: int) -> bytes | None:
        """Return an object of at most ``most`` bytes; None if there is none."""
        found = await self._message(name)
        if found is None:
            return None
        size = found.size if isinstance(found, Reference) else len(found)
        if size > most:
            raise TierError(TOO_LARGE, f"an object has {size} bytes; at most {most} were asked for")
        if not isinstance(found, Reference):
            return found
        content = await self._download(self._cas(found), found.size)
        if content is None:
            return None
        if len(content) != found.size or await self._sha256_of(content) != found.sha256:
            raise TierError(FAILED, "an object under /cas/ is not what its name says")
        return content

    async def begin(self, name: str, most: int) -> bytes | None:
        """Return the first ``most`` bytes of an object, or all it has; None if there is none."""
        found = await self._message(name)
        if not isinstance(found, Reference):
            return None if found is None else found[:most]
        return await self._download(self._cas(found), min(found.size, most), whole=False)

    async def contains(self, name: str) -> bool:
        """Return whether there is such an object, and its content."""
        answer = await self._request("HEAD", self._ac(name), missing=True)
        if answer is None:
            return False
        length = answer.headers.get("content-length", "")
        if length.isdigit() and int(length) > action_results.MOST_BYTES_OF_REFERENCE:
            return True
        found = await self._message(name)
        if isinstance(found, Reference):
            return await self._request("HEAD", self._cas(found), missing=True) is not None
        return found is not None

    async def put(self, name: str, content: bytes) -> None:
        """Write an object, in place of an older one."""
        if 0 < len(content) <= MOST_BYTES_INSIDE:
            message = action_results.with_content(content)
        else:
            reference = Reference(await self._sha256_of(content), len(content))
            await self._request("PUT", self._cas(reference), content)
            message = action_results.with_reference(reference)
        await self._request("PUT", self._ac(name), message)

    async def create(self, name: str, content: bytes) -> bool:
        """Raise TierError: HTTP caches have no such request."""
        raise TierError(FAILED, "an HTTP cache cannot create objects atomically")

    async def remove(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""
        await self._request("DELETE", self._ac(name), missing=True)

    def listed(self, prefix: str) -> AsyncIterator[Listed]:
        """Raise TierError: HTTP caches have no such request."""
        raise TierError(FAILED, "an HTTP cache cannot list objects")

    async def close(self) -> None:
        """Close the connections."""
        self._workers.close()
        with _translated():
            await self._client.aclose()

    async def _sha256_of(self, content: bytes) -> str:
        # The digest of a large object takes long enough to hold up others.
        return await self._workers.do(lambda: _sha256(content))

    def _ac(self, name: str) -> str:
        return f"{self._address}/ac/{_sha256(name.encode())}"

    def _cas(self, reference: Reference) -> str:
        return f"{self._address}/cas/{reference.sha256}"

    async def _message(self, name: str) -> bytes | Reference | None:
        message = await self._download(self._ac(name), MOST_BYTES_INSIDE + action_results.MOST_BYTES_BESIDE)
        try:
            return None if message is None else action_results.read(message)
        except ValueError as error:
            raise TierError(FAILED, f"what is under /ac/ is not an object of xcache: {error}") from None

    async def _download(self, url: str, most: int, *, whole: bool = True) -> bytes | None:
        with _translated():
            async with self._client.stream("GET", url, extensions=_extensions()) as answer:
                if answer.status_code in (404, 410):
                    return None
                _check(answer)
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise TierError(FAILED, "the server sends compressed content unasked")
                content = bytearray()
                async for part in answer.aiter_raw():
                    content += part
                    if len(content) > most:
                        if not whole:
                            # The connection ends with that, so that the rest does not come.
                            return bytes(content[:most])
                        raise TierError(FAILED, f"the server sends more than {most} bytes")
                return bytes(content)

    async def _request(
        self, method: str, url: str, content: bytes | None = None, *, missing: bool = False
    ) -> httpx.Response | None:
        """Return the answer without its content; None if there is no such object, where that may be (``missing``)."""
        with _translated():
            stream = self._client.stream(method, url, content=content, extensions=_extensions())
            async with stream as answer:
                if missing and answer.status_code in (404, 410):
                    return None
                _check(answer)
                return answer


def _extensions() -> dict[str, Any]:
    """Return what closes a connection whose caller gives up before TLS is agreed on: httpcore forgets it."""
    stream: Any = None

    async def trace(event: str, info: Mapping[str, Any]) -> None:
        nonlocal stream
        if event == "connection.connect_tcp.complete":
            stream = info["return_value"]
        elif event == "connection.start_tls.failed" and stream is not None:
            await stream.aclose()

    return {"trace": trace}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check(answer: httpx.Response) -> None:
    if not answer.is_success:
        kind = _KINDS.get(answer.status_code, FAILED)
        raise TierError(kind, f"the server answers {answer.status_code} to {answer.request.method}")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException:
        raise TierError(UNREACHABLE, "no answer") from None
    except httpx.NetworkError as error:
        raise certificates.refusal(error) or connection_failed(error) from None
    except httpx.RemoteProtocolError:
        raise TierError(UNREACHABLE, "the server ended the connection, or does not speak HTTP") from None
    # Its text may have the address in it.
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise TierError(FAILED, f"the request failed ({type(error).__name__})") from None
