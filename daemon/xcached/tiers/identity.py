"""The key with which this daemon signs, and the keys that it trusts, as the settings name them now."""

from __future__ import annotations

import threading
import time

from xcache.errors import ConfigError, SigningKeyError
from xcache.wire import signing_key
from xcache.wire.signatures import PrivateKey
from xcache.wire.trusted_keys import TrustedKeys
from xcached.host.reload import LiveSettings

# A command that fails is tried again after this long, not for each entry.
_RETRY_SECONDS = 60.0


class Identity:
    """Files are read again at each use, so that new keys and revocations count at once; a command runs once.

    A command may take ten seconds, so ``signer`` is not for the serving thread.
    """

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._trusted: TrustedKeys | None = None
        self._lock = threading.Lock()
        self._asked = ""
        self._printed: PrivateKey | SigningKeyError | ConfigError | None = None
        self._asked_at = 0.0

    def signer(self) -> PrivateKey | None:
        """Return the key to sign with, or None if there is none.

        Raise SigningKeyError if there is one that cannot be used: then nothing leaves the machine, not even unsigned.
        """
        now = self._settings.now
        source = now.signing_key
        if source.startswith(signing_key.COMMAND):
            return self._from_command(source)
        return signing_key.load(source) if now.has_signing_key else None

    def trusted(self) -> TrustedKeys:
        """Return the trusted keys as the file names them now."""
        path, before = self._settings.now.trusted_keys, self._trusted
        self._trusted = before.fresh() if before is not None and before.path == path else TrustedKeys.load(path)
        return self._trusted

    def _from_command(self, source: str) -> PrivateKey:
        with self._lock:
            is_due = time.monotonic() - self._asked_at > _RETRY_SECONDS
            if is_asking := source != self._asked or (not isinstance(self._printed, PrivateKey) and is_due):
                # Other threads that ask meanwhile get this error at once, and go on without a signature.
                self._printed = SigningKeyError("the command that prints the key to sign with has not answered yet")
                self._asked, self._asked_at = source, time.monotonic()
        if is_asking:
            try:
                self._printed = signing_key.load(source)
            except (SigningKeyError, ConfigError) as error:
                self._printed = error
        if isinstance(self._printed, PrivateKey):
            return self._printed
        assert self._printed is not None  # noqa: S101 - it was asked for above
        raise self._printed
