"""Every exception that xcache raises.

    XcacheError
    ├── ConfigError             a setting has a value that cannot be used
    ├── UnavailableError        no daemon answered, so the caller compiles
    │   ├── ConnectionLostError     the connection was refused, dropped, or silent past the timeout
    │   │   ├── NobodyThereError        nothing listens on the socket
    │   │   └── HungUpError             the daemon ended the connection
    │   ├── NotAskedError           the client did not ask: the daemon failed before, or has cost the program enough
    │   ├── TurnedAwayError         the daemon does not accept connections of this program
    │   ├── ProtocolError           the peer broke the protocol
    │   └── UntrustedError          the socket or directory may belong to another user
    ├── RefusedError            the daemon answered and refused (with a kind and a reason)
    ├── DamagedError            an entry's bytes differ from those that were stored
    │   ├── DamagedAliasError       an alias differs from what was written
    │   └── UnloadableError         the bytes are intact, but jaxlib does not load them
    ├── StoreError              the store cannot be opened or written
    │   ├── NoLocksError            its file system does not lock files
    │   ├── NewerStoreError         a newer xcache wrote it
    │   └── ClosedStoreError        only its daemon and root may read it
    ├── LockFileError           a lock file, which says what a run wanted, cannot be written or understood
    ├── SigningKeyError         a private key, or the list of trusted keys, cannot be used
    ├── SignatureError          no trusted key signed this
    ├── CompileInGuardError     a program was compiled where the user forbade it
    ├── WrongVersionError       a function of xcache.jit is not what the record of its version says
    ├── WorkerError             a process that was to compile ended, or did not answer in time
    │   └── NoWorkerError           it did not start
    ├── ClusterError            a Dask cluster cannot be used
    ├── UncacheableError        this program cannot be cached (with the reason)
    └── UnsupportedError        xcache does not work with this jax, jaxlib or operating system

The hook lets none of them out but WrongVersionError and CompileInGuardError, which have to be asked for: a program with
xcache on sees jax's own exceptions and no others.
"""

from __future__ import annotations


class XcacheError(Exception):
    """The base of everything below."""


class ConfigError(XcacheError):
    """A setting has a value that cannot be used."""

    setting = ""
    """The setting that has it, if it is one."""


class UnavailableError(XcacheError):
    """No daemon answered."""

    kind = "daemon unavailable"


class ConnectionLostError(UnavailableError):
    """The connection was refused, dropped, or silent past the timeout."""

    kind = "connection lost"


class NoAnswerError(ConnectionLostError):
    """The daemon did not answer in time."""

    kind = "no answer"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the daemon did not answer within {round(seconds, 2):g} s")


class NobodyThereError(ConnectionLostError):
    """Nothing listens on the socket."""

    kind = "no daemon"


class HungUpError(ConnectionLostError):
    """The daemon ended the connection: it stopped, was killed, or rejected a message."""


class NotAskedError(UnavailableError):
    """The client did not ask: the daemon failed before, or too many threads ask already."""

    def __init__(self, reason: str, *, nobody_there: bool = False) -> None:
        super().__init__(reason)
        # Whether the failure before was that nothing listens.
        self.nobody_there = nobody_there


class TimeSpentError(NotAskedError):
    """The client did not ask: the program has lost nearly all the time that it may lose to its daemon."""


class TurnedAwayError(UnavailableError):
    """The daemon does not accept connections of this program: it has too many, or does not serve this user."""

    kind = "turned away"


class ProtocolError(UnavailableError):
    """The peer broke the protocol."""

    kind = "protocol error"


class UntrustedError(UnavailableError):
    """The socket or directory may belong to another user."""

    kind = "untrusted socket"


class SharedUidError(UntrustedError):
    """This process runs as a uid that strangers may share, such as nobody's."""


class RefusedError(XcacheError):
    """The daemon answered and refused."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class DamagedError(XcacheError):
    """An entry's bytes differ from those that were stored; ``digest`` is the expected one."""

    kind = "damaged entry"
    whole = False
    """Whether the bytes match the digest, so that they are not damaged."""

    def __init__(self, reason: str, digest: str = "") -> None:
        super().__init__(reason)
        self.digest = digest


class DamagedAliasError(DamagedError):
    """An alias differs from what was written."""

    kind = "damaged alias"


class UnloadableError(DamagedError):
    """An entry's bytes are intact, but jaxlib does not load them."""

    kind = "load failed"
    whole = True


class StoreError(XcacheError):
    """The store cannot be opened or written."""

    kind = "store error"


class NoLocksError(StoreError):
    """The store's file system does not lock files, so nothing would keep a second daemon out."""

    def __init__(self, directory: object, reason: str | None) -> None:
        super().__init__(
            f"{directory} is on a file system that does not lock files ({reason}), as some network file systems do not;"
            " put the store on a local one (XCACHE_DIR)"
        )


class NewerStoreError(StoreError):
    """A newer xcache wrote the store."""


class ClosedStoreError(StoreError):
    """Only the store's daemon and root may read it."""


class LockFileError(XcacheError):
    """A lock file, which says what a run wanted, cannot be written or understood."""

    kind = "lock file"


class SigningKeyError(XcacheError):
    """A private key, or the list of trusted keys, cannot be used."""


class SignatureError(XcacheError):
    """No trusted key signed this."""


class UnknownKeyError(SignatureError):
    """A key signed this that is not known here; others may trust it."""


class WrongVersionError(XcacheError):
    """A function gives another program than the record of its version; XCACHE_JIT=check raises it."""


class CompileInGuardError(XcacheError):
    """A program was to be compiled within ``no_compiles()``, or while ``XCACHE_ON_MISS=fail`` held."""


class WorkerError(XcacheError):
    """A process that was to compile ended, or did not answer in time (with the reason)."""


class NoWorkerError(WorkerError):
    """A process that was to compile did not start (with the reason)."""


class ClusterError(XcacheError):
    """A Dask cluster cannot be used (with the reason)."""


class UncacheableError(XcacheError):
    """This program cannot be cached; the message is a short reason, and statistics count by it."""


class UnsupportedError(XcacheError):
    """The cache does not work with this jax, jaxlib or operating system."""


def is_no_room(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, here or on the device."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
