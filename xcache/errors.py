"""Every exception xcache raises by itself.

    XcacheError
    ├── ConfigError             a setting has a value that cannot be used
    ├── UnavailableError        no answer from a daemon: the caller compiles
    │   ├── ConnectionLostError     refused, dropped or silent past the timeout
    │   │   ├── NobodyThereError        nothing listens on the socket
    │   │   └── HungUpError             the daemon ended the connection
    │   ├── NotAskedError           there was trouble, and it is not known to be over
    │   ├── TurnedAwayError         the daemon takes no connection of this program
    │   ├── ProtocolError           the peer said something that is not in the protocol
    │   └── UntrustedError          the socket or directory could belong to someone else
    ├── RefusedError            the daemon answered, and said no (with a kind and a reason)
    ├── DamagedError            an entry's bytes are not what was stored
    │   └── UnloadableError         they are, and jaxlib does not take them
    ├── StoreError              the store cannot be opened or written
    │   ├── NewerStoreError         it was written by a newer xcache
    │   └── ClosedStoreError        only its daemon and root may look into it
    ├── UncacheableError        this program cannot be cached (with the reason)
    └── UnsupportedError        this jax, jaxlib or operating system is not one xcache can work with

None of them leaves the hook: a program with xcache on sees jax's own exceptions and no others.
"""

from __future__ import annotations


class XcacheError(Exception):
    """The base of everything below."""


class ConfigError(XcacheError):
    """A setting has a value that cannot be used."""


class UnavailableError(XcacheError):
    """No answer from a daemon."""

    kind = "daemon unavailable"


class ConnectionLostError(UnavailableError):
    """The connection was refused, dropped or silent past the timeout."""

    kind = "connection lost"


class NobodyThereError(ConnectionLostError):
    """Nothing listens on the socket."""


class HungUpError(ConnectionLostError):
    """The daemon ended the connection: it left, was killed, or did not like what it heard."""


class NotAskedError(UnavailableError):
    """There was trouble, and it is not known to be over."""


class TurnedAwayError(UnavailableError):
    """The daemon takes no connection of this program: there are too many, or it is not for this user."""

    kind = "turned away"


class ProtocolError(UnavailableError):
    """The peer said something that is not in the protocol."""

    kind = "protocol error"


class UntrustedError(UnavailableError):
    """The socket or directory could belong to someone else."""

    kind = "untrusted socket"


class RefusedError(XcacheError):
    """The daemon answered, and said no."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class DamagedError(XcacheError):
    """An entry's bytes are not what was stored; ``digest`` is that of what should be there."""

    kind = "damaged entry"

    def __init__(self, reason: str, digest: str = "") -> None:
        super().__init__(reason)
        self.digest = digest


class UnloadableError(DamagedError):
    """An entry's bytes are what was stored, and jaxlib does not take them."""

    kind = "load failed"


class StoreError(XcacheError):
    """The store cannot be opened or written."""

    kind = "store error"


class NewerStoreError(StoreError):
    """The store was written by a newer xcache."""


class ClosedStoreError(StoreError):
    """Only the store's daemon and root may look into it."""


class UncacheableError(XcacheError):
    """This program cannot be cached; the message is the reason, a short phrase that statistics count by."""


class UnsupportedError(XcacheError):
    """This jax, jaxlib or operating system is not one xcache can work with."""
