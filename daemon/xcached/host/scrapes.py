"""Answers scrapers over HTTP, on a thread of its own; none can hold up the others for long, or keep the thread busy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from xcache.errors import ConfigError

logger = logging.getLogger("xcached")

# Scrapers that are served at once, how long each may take in all, and the bytes of its request.
_MOST_AT_ONCE, _SECONDS, _MOST_BYTES = 8, 5.0, 16 * 1024
# Between two connections, so that a flood of them leaves the interpreter to the thread that serves programs.
_PAUSE_SECONDS = 0.01
# After an accept() that failed, for want of descriptors perhaps.
_LONG_PAUSE_SECONDS = 1.0
_PAGES = ("/", "/metrics")
# Advice by the error's number.
_ADVICE = {
    errno.EADDRINUSE: "; each daemon of a machine needs a port of its own",
    errno.EAFNOSUPPORT: "; under systemd the unit has to allow it (docs/how-to/metrics.md)",
}


class Scrapes:
    """The server of one page."""

    def __init__(self, address: str, page: Callable[[str], tuple[bytes, str]]) -> None:
        """Listen at ``host:port``, or at the path of a socket; raise ConfigError if that is impossible.

        ``page`` gets what the scraper accepts, and returns the page and its type; the server's thread calls it.
        """
        self._page = page
        self._socket, self._path = _listening(address)
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="xcached-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        # The loop may be closed, if its thread has met an error.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(_SECONDS)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            pass
        except Exception:
            # A defect in here must not end the service of programs, and nobody watches this thread.
            logger.exception("metrics are not served any more")
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        slots = asyncio.Semaphore(_MOST_AT_ONCE)
        async with asyncio.TaskGroup() as answers:
            while True:
                # Without a free slot, connections wait in the kernel, which bounds their number.
                await slots.acquire()
                try:
                    connected, _ = await self._loop.sock_accept(self._socket)
                except OSError as error:
                    slots.release()
                    logger.warning("a scraper of metrics could not be accepted: %s", error)
                    await asyncio.sleep(_LONG_PAUSE_SECONDS)
                    continue
                answers.create_task(self._answer(connected)).add_done_callback(lambda _: slots.release())
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _answer(self, connected: socket.socket) -> None:
        # A timeout is an OSError.
        with connected, contextlib.suppress(OSError):
            async with asyncio.timeout(_SECONDS):
                head = b""
                while b"\r\n\r\n" not in head:
                    data = await self._loop.sock_recv(connected, _MOST_BYTES)
                    head += data
                    if not data or len(head) > _MOST_BYTES:
                        return
                await self._loop.sock_sendall(connected, self._reply(head.decode("latin-1")))

    def _reply(self, head: str) -> bytes:
        line, *fields = head.split("\r\n")
        method, _, rest = line.partition(" ")
        if method != "GET":
            return _response("405 Method Not Allowed", b"only GET is understood\n")
        if rest.partition(" ")[0].partition("?")[0] not in _PAGES:
            return _response("404 Not Found", b"the metrics are at /metrics\n")
        named = (field.partition(":") for field in fields)
        accepted = next((value.strip() for name, _, value in named if name.lower() == "accept"), "")
        try:
            return _response("200 OK", *self._page(accepted))
        except Exception:
            # The next scrape may succeed.
            logger.exception("metrics could not be made")
            return _response("500 Internal Server Error", b"the daemon's log says why\n")


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1") + body


def _listening(address: str) -> tuple[socket.socket, Path | None]:
    """Return a listening socket that does not block, and its path if it has one."""
    try:
        if address.startswith("/"):
            path = Path(address)
            made = _listening_at(path)
        else:
            path = None
            host, _, port = address.rpartition(":")
            family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            made = socket.create_server(where[:2], family=family, backlog=_MOST_AT_ONCE)
    except OSError as error:
        # Python's own text repeats the address, and that of a failed look-up has a negative number.
        said = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "")
        raise ConfigError(f"metrics cannot be served on {address}: {said}{advice}") from None
    made.setblocking(False)
    return made, path


def _listening_at(path: Path) -> socket.socket:
    """Listen at a path, which only this account and root may then connect to."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(0, "there is a file of this name, which is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise FileExistsError(0, "another process serves there")
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(_MOST_AT_ONCE)
    except BaseException:
        made.close()
        raise
    return made
