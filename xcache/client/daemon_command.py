"""The command that runs the daemon, and the variables of this program's environment that it gets."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from xcache.errors import UnavailableError, UntrustedError
from xcache.wire.ownership import check_directory, trusted_uids

# python3.12, python3.13t, python3-dbg, pypy3, and the .python3-wrapped that wrappers run.
_IS_PYTHON = re.compile(r"\.?(python|pypy|graalpy)[\w.-]*\Z")
# The daemon gets variables by name, because no list of harmful ones would ever be complete: LD_PRELOAD, profilers,
# coverage, MALLOC_* and PYTHONINSPECT are meant for the program, and NOTIFY_SOCKET, WATCHDOG_* and LISTEN_* are between
# the program and its service manager.
_GIVEN = frozenset(
    {
        # The daemon finds its files by these.
        *("HOME", "USER", "LOGNAME", "PATH", "TMPDIR"),
        # The daemon writes its log in this language and time zone.
        *("LANG", "LANGUAGE", "TZ", "TZDIR"),
        # Without these, some installations of Python find neither their libraries nor their modules.
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "NIX_LD", "NIX_LD_LIBRARY_PATH"),
    }
)
_GIVEN_BY_PREFIX = ("LC_", "XDG_", "XCACHE_")
# How a remote store is reached and what allows it: for all of them, and by the scheme of their addresses.
_GIVEN_FOR_REMOTES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    }
)
_GIVEN_BY_SCHEME = {"s3": ("AWS_",), "gs": ("GOOGLE_",), "az": ("AZURE_", "IDENTITY_", "MSI_")}
# Python finds its modules by these, and writes bytecode accordingly.
_GIVEN_TO_PYTHON = frozenset(
    {
        *("PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONUTF8"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    }
)


def daemon_command() -> list[str]:
    """Return the command; raise UnavailableError if this program is not run by Python and no ``xcached`` is found."""
    for python in _pythons():
        if os.access(python, os.X_OK):
            return [python, *_flags(), "-P", "-m", "xcached"]
    for script in _scripts():
        if _can_be_run(script):
            return [str(script)]
    raise UnavailableError(
        f"no Python interpreter is known that this process can run (sys.executable is {sys.executable!r}), and there is"
        " no xcached on the PATH that only you or root can have put there; start a daemon beforehand: xcache start"
    )


def daemon_environment(environ: Mapping[str, str], named: str = "", remotes: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of a program's environment that its daemon gets: those that say where things are.

    ``named`` is one more, which a setting names; ``remotes`` are the addresses of the remote stores.
    """
    schemes = {address.partition(":")[0] for address in remotes}
    by_name = _GIVEN | {named} | (_GIVEN_FOR_REMOTES if schemes else set())
    by_prefix = (*_GIVEN_BY_PREFIX, *(each for scheme in schemes for each in _GIVEN_BY_SCHEME.get(scheme, ())))
    given = {name: value for name, value in environ.items() if name in by_name or name.startswith(by_prefix)}
    if _is_frozen():
        # In a bundle LD_LIBRARY_PATH names the bundle itself; PyInstaller keeps the user's value in another variable.
        before = environ.get("LD_LIBRARY_PATH_ORIG")
        given = {name: value for name, value in given.items() if "LIBRARY_PATH" not in name}
        return given | ({"LD_LIBRARY_PATH": before} if before else {})
    if not sys.flags.ignore_environment:
        given |= {name: value for name, value in environ.items() if name in _GIVEN_TO_PYTHON}
        if sys.dont_write_bytecode:
            given["PYTHONDONTWRITEBYTECODE"] = "1"
    return given


def _is_frozen() -> bool:
    """Return whether this program is its own interpreter; most bundlers set ``sys.frozen``, Nuitka does not."""
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    return bool(getattr(sys, "frozen", False)) or "__compiled__" in globals() or "__compiled__" in main


def _pythons() -> Iterator[str]:
    """Yield the interpreter that runs this program, then those of the installation that the program embeds."""
    if _is_frozen():
        return
    if sys.executable and _IS_PYTHON.match(Path(sys.executable).name):
        yield sys.executable
    for name in (f"python{sys.version_info.major}.{sys.version_info.minor}", "python3", "python"):
        yield str(Path(sys.exec_prefix, "bin", name))


def _scripts() -> Iterator[Path]:
    """Yield the paths that ``xcached`` may have, but not those of relative entries of PATH."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder.startswith("/"):
            yield Path(folder, "xcached")


def _can_be_run(script: Path) -> bool:
    """Return whether the command exists and only root or this user can have put it there."""
    trusted = trusted_uids()
    try:
        check_directory(script.parent, trusted)
        found = script.resolve().stat()
        check_directory(script.resolve().parent, trusted)
    except (OSError, UntrustedError):
        return False
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid in trusted
        and not found.st_mode & 0o022
        and os.access(script, os.X_OK)
    )


def _flags() -> Iterator[str]:
    """Yield the interpreter flags that isolate this program from its surroundings, to isolate the daemon alike."""
    if sys.flags.isolated:
        yield "-I"
    if sys.flags.ignore_environment:
        yield "-E"
    if sys.flags.no_user_site:
        yield "-s"
    if sys.dont_write_bytecode and sys.flags.ignore_environment:
        yield "-B"
