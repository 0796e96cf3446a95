"""Which certificates of servers are accepted, and what is wrong with one that is not."""

from __future__ import annotations

import os
import ssl

from xcache.errors import ConfigError
from xcached.tiers.tier import FAILED, UNTRUSTED, TierError

_FILE, _FOLDER = "SSL_CERT_FILE", "SSL_CERT_DIR"
# An exception has fewer causes.
_MOST_CAUSES = 10


def context() -> ssl.SSLContext:
    """Return what checks servers by the authorities of SSL_CERT_FILE and SSL_CERT_DIR, or else of the system.

    Raises ConfigError if SSL_CERT_FILE is of no use.
    """
    check_file()
    made = ssl.create_default_context()
    if not os.environ.get(_FILE) and not os.environ.get(_FOLDER) and not made.cert_store_stats()["x509_ca"]:
        # A small image may have no authorities; httpx brings some.
        import certifi

        made.load_verify_locations(certifi.where())
    return made


def check_file() -> None:
    """Raise ConfigError if SSL_CERT_FILE is set, and no certificate can be read there."""
    if file := os.environ.get(_FILE):
        try:
            # Libraries say nothing about such a file, and trust nobody then.
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except OSError as error:
            why = "it has no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"{_FILE} names {file}, which cannot be used: {why}") from None


def refusal(error: BaseException) -> TierError | None:
    """Return what TLS has against a server whose connection failed with this error; None if it is something else."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return refused(cause.verify_message)
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            reason = str(cause.reason or "")
            if "CERTIFICATE" in reason:
                return TierError(FAILED, "the server wants a certificate of its clients, and xcache has none")
            return TierError(FAILED, f"the server does not speak TLS, or none that is accepted here ({reason})")
        cause = cause and (cause.__cause__ or cause.__context__)
    return None


def refused(why: str) -> TierError:
    """Return the error for a certificate that is not accepted."""
    return TierError(UNTRUSTED, f"the certificate of the server is not accepted: {why.rstrip('.')}")
