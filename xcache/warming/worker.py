"""The process that plans and compiles, started by ``process.py`` with the Python that has the wanted jaxlib.

It reads messages from its stdin and answers each on its stdout: a length and a msgpack map. It plans in this process,
and compiles each program in a child of its own, forked before there is a client of jax. So the import of jax, which
takes a second, is paid once, and a compile that crashes, runs out of memory or is killed takes nothing else along.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import warnings
from typing import IO, Any, BinaryIO

import msgpack

from xcache._version import __version__
from xcache.warming.frames import read_frame, write_frame
from xcache.wire.bounded import read_all
from xcache.wire.envelope import MAX_RAW_SIZE

_LONGEST_POLL_SECONDS = 0.05
_END_BYTES = 4000


def main() -> None:
    """Answer until there are no more messages."""
    answers = os.fdopen(os.dup(1), "wb")
    # Libraries print to where errors go.
    os.dup2(2, 1)
    import jax

    from xcache.warming import compiling

    write_frame(answers, {"xcache": __version__, "jax": jax.__version__, "python": sys.version.split()[0]})
    messages = sys.stdin.buffer
    machine = None
    while (message := read_frame(messages)) is not None:
        if message["action"] == "compile":
            write_frame(answers, _in_a_child(message, messages))
            continue
        try:
            machine = machine or compiling.Machine(message["platform"])
            answer = _planned(machine, message)
        except compiling.Refused as refused:
            answer = {"refused": str(refused), "options": list(refused.options)}
        except Exception as error:  # noqa: BLE001 - whatever jax raises
            answer = {"refused": _said(error)}
        write_frame(answers, answer)


def _planned(machine: Any, message: dict[str, Any]) -> dict[str, Any]:
    if message["action"] == "toolchain":
        return {"toolchain": machine.toolchain()}
    return dict(machine.plan(message["program"], message["texts"])._asdict())


def _in_a_child(message: dict[str, Any], messages: BinaryIO) -> dict[str, Any]:
    """Compile in a child of its own; return its answer, or how it ended."""
    with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as said:
        with warnings.catch_warnings():
            # OpenBLAS has threads, and knows about forks.
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            _compile(message, result, said)
        status = _ended(child, messages)
        result.seek(0)
        content = read_all(result, MAX_RAW_SIZE)
        if status == 0 and content:
            return {"packed": content}
        said.seek(max(0, said.seek(0, os.SEEK_END) - _END_BYTES))
        lines = said.read(_END_BYTES).decode("utf-8", "replace").strip().splitlines()
    if status == -signal.SIGKILL:
        return {"failed": "it was killed, perhaps because memory ran out"}
    how = f"it crashed ({signal.strsignal(-status)})" if status < 0 else f"it ended with status {status}"
    return {"failed": f"{how}{': ' if lines else ''}{lines[-1] if lines else ''}"}


def _compile(message: dict[str, Any], result: IO[bytes], said: IO[bytes]) -> None:
    """Compile in this child, write the answer, and end the process."""
    status = 1
    try:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
        from xcache.warming import compiling

        try:
            machine = compiling.Machine(message["platform"])
            answer = machine.compile(message["program"], message["options"], message["components"])
        except compiling.Refused as refused:
            answer = {"refused": str(refused)}
        except Exception as error:  # noqa: BLE001 - whatever jaxlib raises
            answer = {"failed": _said(error)}
        result.write(msgpack.packb(answer))
        result.flush()
        status = 0
    finally:
        # Nothing of the parent's may be done again here, and jax's client need not be taken apart.
        os._exit(status)


def _ended(child: int, messages: BinaryIO) -> int:
    """Wait for a child, and return its status; kill it once nobody waits for the answer any more."""
    poll = 0.001
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # No message comes before this one is answered: the other end is gone if there is something to read.
        if select.select([messages], [], [], poll)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sys.exit(1)
        poll = min(2 * poll, _LONGEST_POLL_SECONDS)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


if __name__ == "__main__":
    main()
