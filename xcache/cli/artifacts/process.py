"""Run ``worker.py``: with the Python and jaxlib that wrote an entry, as the user who wrote it.

Loading an executable runs its code, and the Python of an entry is one that its writer has named. So the process has the
rights of the writer and no others: root takes the writer's, and nobody else may look into another user's entry. It gets
its task from an unnamed file, and leaves its results in a temporary folder, from which only regular files are read.
"""

from __future__ import annotations

import inspect
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from xcache.cli import Failure
from xcache.cli.artifacts.entry import Entry
from xcache.cli.output import printable, size
from xcache.cli.programs import ProgramElsewhere
from xcache.cli.writers import trusted_signers
from xcache.keys import stablehlo
from xcache.wire.bounded import SMALL_FILE, UnreadableError, parsed_json, read_all, text_of
from xcache.wire.ownership import is_signer

# A compile may take as long as the first of these, or as many times what the entry's took, but no more than the last.
_LEAST_SECONDS, _TIMES, _MOST_SECONDS = 300.0, 10.0, 86400.0
# For an account that is not there.
_NOBODY = 65534
# Bytes of all that a worker may leave; the text of a program is several times as large as the program.
_MOST_LEFT = 1024**3
_KEPT_VARIABLES = re.compile(r"PATH|LANG|LC_.*|LD_LIBRARY_PATH|CUDA_.*|NVIDIA_.*|TPU_.*")
_RESULT = "result.json"
_END_BYTES = 4000


class Python(NamedTuple):
    """An interpreter, and the folder of the packages it is to use; empty for its own."""

    path: str
    place: str = ""


class Result(NamedTuple):
    """The version of jaxlib that was used, the data that an action returned, and the files that it left."""

    jaxlib: str
    found: Any
    files: dict[str, bytes]

    def file(self, name: str) -> bytes:
        """Return the content of a file that must be there."""
        if name not in self.files:
            raise Failure(f"jaxlib {printable(self.jaxlib)} left no {name}")
        return self.files[name]


def of_entry(entry: Entry) -> Python:
    """Return the Python with the jaxlib that wrote an entry; raise Failure if it is gone."""
    there = [place for place in entry.places if (Path(place) / "jaxlib").is_dir()]
    for place in there:
        if found := _interpreter(Path(place)):
            return Python(found, place)
    if there:
        raise Failure(f"no Python was found for the jaxlib in {printable(there[0])}, which wrote this entry")
    if entry.places:
        raise Failure(f"jaxlib {entry.jaxlib}, which wrote this entry, is gone from {printable(entry.places[0])}")
    raise Failure(f"the store does not know where jaxlib {entry.jaxlib}, which wrote this entry, is installed")


def run(entry: Entry, python: Python, action: str, *, environment: dict[str, str] | None = None, **task: Any) -> Result:
    """Do an action of the worker; raise Failure if it fails."""
    if entry.program is None and not entry.executable:
        # With the executable, an action needs no program.
        raise ProgramElsewhere
    program = entry.program or b""
    description = {
        "action": action,
        "platform": entry.platform,
        "jaxlib": entry.jaxlib,
        "place": python.place,
        "parser": inspect.getsource(stablehlo),
        "program": len(program),
        "executable": len(entry.executable),
        **task,
    }
    content = b"".join((json.dumps(description).encode(), b"\n", program, entry.executable))
    seconds = min(max(_LEAST_SECONDS, _TIMES * entry.compile_seconds), _MOST_SECONDS)
    rights = _rights(entry.writer)
    with tempfile.TemporaryDirectory(prefix="xcache-") as folder:
        if rights:
            os.chown(folder, rights["user"], rights["group"])
        status, said = _run(python.path, content, folder, seconds, environment or {}, rights)
        files = _left_in(folder)
    try:
        result = parsed_json(files.pop(_RESULT), SMALL_FILE)
        version, error, found = str(result["jaxlib"]), str(result.get("error", "")), result.get("found")
    except (KeyError, ValueError, TypeError):
        how = f"crashed ({signal.strsignal(-status)})" if status < 0 else "failed"
        raise Failure(f"jaxlib {entry.jaxlib} {how}{': ' if said else ''}{said}") from None
    if error:
        raise Failure(f"jaxlib {printable(version)}: {printable(error.partition(chr(10))[0])}")
    return Result(version, found, files)


def _run(
    python: str, given: bytes, folder: str, seconds: float, environment: dict[str, str], rights: dict[str, Any]
) -> tuple[int, str]:
    """Run the worker; return its exit status and the last line that it wrote to stderr."""
    kept = {name: value for name, value in os.environ.items() if _KEPT_VARIABLES.fullmatch(name)}
    source = text_of(Path(__file__).with_name("worker.py"))
    with tempfile.TemporaryFile() as task, tempfile.TemporaryFile() as said:
        task.write(given)
        task.seek(0)
        try:
            process = subprocess.Popen(
                [python, "-I", "-S", "-c", source],
                stdin=task,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=folder,
                env=kept | environment,
                # It has no terminal that it could type into.
                start_new_session=True,
                umask=0o077,
                **rights,
            )
        except OSError as error:
            who = f" with the rights of uid {rights['user']}, who wrote this entry" if rights else ""
            raise Failure(f"{printable(python)} cannot be run{who}: {error.strerror}") from None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failure(f"it did not end within {seconds:.0f} s and was stopped") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - _END_BYTES))
        lines = said.read(_END_BYTES).decode("utf-8", "replace").strip().splitlines()
    return status, printable(lines[-1].strip()) if lines else ""


def _rights(writer: int) -> dict[str, Any]:
    if writer == os.getuid():
        return {}
    if is_signer(writer):
        # This user's programs load it, too.
        if writer not in trusted_signers():
            raise Failure("no key that is trusted now has signed this entry, so nobody may look into it")
        return {}
    if os.getuid() != 0:
        raise Failure(f"the user with the uid {writer} wrote this entry, and only that user and root may look into it")
    try:
        group = pwd.getpwuid(writer).pw_gid
    except KeyError:
        group = _NOBODY
    return {"user": writer, "group": group, "extra_groups": []}


def _left_in(folder: str) -> dict[str, bytes]:
    """Return the files that the worker has written, by name."""
    files: dict[str, bytes] = {}
    left = _MOST_LEFT
    for name in sorted(each.name for each in os.scandir(folder) if each.is_file(follow_symlinks=False)):
        try:
            files[name] = _content(Path(folder, name), left)
        except UnreadableError:
            raise Failure(f"it wrote more than {size(_MOST_LEFT)}, which is not read") from None
        left -= len(files[name])
    return files


def _content(path: Path, most: int) -> bytes:
    # The worker runs as another user, who may have put a link or a pipe there, or a file of terabytes without a byte.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        return read_all(file, most) if stat.S_ISREG(os.fstat(handle).st_mode) else b""


def _interpreter(place: Path) -> str | None:
    """Return the interpreter of a folder such as ``/prefix/lib/python3.11/site-packages``."""
    name = place.parent.name if re.fullmatch(r"python3(\.\d+)?", place.parent.name) else "python3"
    own = place.parents[2] / "bin" / name if len(place.parents) > 2 else None
    if own and os.access(own, os.X_OK):
        return str(own)
    if name == f"python3.{sys.version_info.minor}":
        return shutil.which(name) or sys.executable
    return shutil.which(name)
