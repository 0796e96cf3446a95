"""The private key comes from a file, a variable, or a command that prints it."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Container, Mapping
from pathlib import Path

from xcache.errors import SigningKeyError
from xcache.wire.ownership import at_once, trusted_uids
from xcache.wire.signatures import PrivateKey, parse_private

VARIABLE, COMMAND = "env:", "command:"
_COMMAND_SECONDS = 10.0
# A key has some 100 bytes.
_MOST_BYTES = 4096


def load(source: str, trusted: Container[int] | None = None, environ: Mapping[str, str] | None = None) -> PrivateKey:
    """Return the key that the setting ``signing_key`` names; raise SigningKeyError if it cannot be used.

    A file must belong to one of ``trusted`` (this user and root, unless given). A command may take ten seconds.
    """
    where = source
    try:
        if source.startswith(VARIABLE):
            name = source.removeprefix(VARIABLE)
            where, text = f"the variable {name}", (os.environ if environ is None else environ).get(name)
            if text is None:
                raise SigningKeyError("it is not set")
        elif source.startswith(COMMAND):
            where = f"the command {shlex.split(source.removeprefix(COMMAND))[0]}"
            text = _printed_by(shlex.split(source.removeprefix(COMMAND)))
        else:
            text = _content(Path(source), trusted_uids() if trusted is None else trusted)
        return parse_private(text)
    except SigningKeyError as error:
        raise SigningKeyError(f"the signing key cannot be used: {where}: {error}") from None


def _content(path: Path, trusted: Container[int]) -> str:
    try:
        with open(path, "rb", opener=at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise SigningKeyError("it is not a file")
            if found.st_uid not in trusted:
                raise SigningKeyError(f"it belongs to another user (uid {found.st_uid})")
            if found.st_mode & 0o077:
                raise SigningKeyError(f"others may open it (its mode is {stat.S_IMODE(found.st_mode):04o}): chmod 600")
            return _text(file.read(_MOST_BYTES + 1))
    except OSError as error:
        raise SigningKeyError(error.strerror or str(error)) from None


def _printed_by(words: list[str]) -> str:
    try:
        # A process group of its own, so that all of it can be ended.
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    except (OSError, ValueError) as error:
        raise SigningKeyError(getattr(error, "strerror", None) or str(error)) from None
    deadline = time.monotonic() + _COMMAND_SECONDS
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    try:
        text = _text(_read(process.stdout.fileno(), deadline))
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise SigningKeyError(f"it did not end within {_COMMAND_SECONDS:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    if status:
        raise SigningKeyError(f"it ended with status {status}")
    return text


def _read(descriptor: int, deadline: float) -> bytes:
    """Return what comes, to the end or as much as is too much; raise TimeoutError."""
    # Not select(), which takes no descriptor above 1023.
    polled = select.poll()
    polled.register(descriptor, select.POLLIN)
    content = b""
    while len(content) <= _MOST_BYTES:
        if not polled.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        got = os.read(descriptor, _MOST_BYTES)
        if not got:
            break
        content += got
    return content


def _text(content: bytes) -> str:
    if len(content) > _MOST_BYTES:
        raise SigningKeyError("it is too long for a key")
    # Text that is not ASCII is no key, and is refused as such.
    return content.decode("ascii", "replace")
