"""Announces toolchains to the daemon, which serves no entry whose toolchain is not installed."""

from __future__ import annotations

from xcache.client.client import Client
from xcache.request import Request
from xcache.wire import protocol


class Announcer:
    """Announces each toolchain once per process."""

    def __init__(self, client: Client, announced: set[str]) -> None:
        """``announced`` holds the digests of toolchains that this process or its parent has announced."""
        self._client = client
        self._announced = announced

    def announce(self, request: Request, *, in_background: bool = False) -> None:
        """Announce the toolchain of a request; in the background, the daemon is asked even while the breaker is open.

        Raise what the client raises; the toolchain is then announced with the next request.
        """
        digest = request.key.components["toolchain"]
        if digest in self._announced:
            return
        self._announced.add(digest)
        announcement = announcement_of(request)
        if announcement.files:
            try:
                self._client.announce(announcement, in_background=in_background)
            except BaseException:
                self._announced.discard(digest)
                raise


def announcement_of(request: Request) -> protocol.Announce:
    """Return the announcement of a request's toolchain; without files there is nothing to announce."""
    # Leave out paths that a message cannot hold: those that are not printable text.
    files = [file._asdict() for file in request.toolchain_files() if file.path.isprintable()]
    text = request.details().get("toolchain", "")
    return protocol.Announce(request.key.components["toolchain"], request.platform, request.jaxlib_version, text, files)
