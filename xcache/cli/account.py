"""Make and remove the account of a machine's daemon, and the line in /etc that names it."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path

from xcache.config.config import SYSTEM_FILE, Config
from xcache.errors import StoreError
from xcache.wire.bounded import SMALL_FILE, parsed_toml, text_of

# These mark what install made, so that uninstall removes nothing else.
_GECOS = "xcache daemon made by xcache service install"
_COMMENT = "  # by xcache service install"
_SETTING = "daemon_user"
_COMMAND_SECONDS = 60


def prepare(name: str, home: Path, done: Callable[[str], None]) -> None:
    """Make the account if it is missing, and name it in the system's settings, where every program finds it."""
    if _account(name) is None:
        if name.isdigit():
            raise StoreError(f"there is no account with the number {name}; name one, or make it first")
        _run("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", str(home),
             "--shell", "/usr/sbin/nologin", "--comment", _GECOS, name)  # fmt: skip
        done(f"made the account {name}")
    text = text_of(SYSTEM_FILE) if SYSTEM_FILE.exists() else ""
    if _SETTING not in parsed_toml(text, SMALL_FILE):
        if not SYSTEM_FILE.parent.exists():
            SYSTEM_FILE.parent.mkdir()
            # Programs of all users read there, so the umask must not close the folder.
            SYSTEM_FILE.parent.chmod(0o755)
        # At the top, before any TOML table begins.
        _write(f'{_SETTING} = "{name}"{_COMMENT}\n{text}')
        done(f"named the account in {SYSTEM_FILE}: programs of all users go to that daemon now")


def prepare_store(settings: Config, done: Callable[[str], None]) -> None:
    """Make the store's folder for the daemon's account: the daemon may not make folders elsewhere."""
    folder = settings.dir
    owner = _account(settings.daemon_user) if settings.daemon_user else None
    if not folder.exists():
        for above in reversed([above for above in folder.parents if not above.exists()]):
            above.mkdir()
            if owner is not None:
                above.chmod(0o755)
        folder.mkdir(mode=0o700)
        done(f"made {folder}")
    if owner is not None and folder.stat().st_uid != owner.pw_uid and not any(folder.iterdir()):
        folder.chmod(0o700)
        os.chown(folder, owner.pw_uid, owner.pw_gid)


def take_back(name: str, keep: Path, done: Callable[[str], None]) -> None:
    """Undo what install did in ``prepare``; the account stays while it owns the store at ``keep``."""
    if SYSTEM_FILE.exists():
        before = text_of(SYSTEM_FILE).splitlines(keepends=True)
        after = [line for line in before if not (line.startswith(_SETTING) and line.rstrip().endswith(_COMMENT))]
        if after != before:
            if after:
                _write("".join(after))
            else:
                SYSTEM_FILE.unlink()
            done(f"took the account out of {SYSTEM_FILE}")
    with contextlib.suppress(OSError):
        SYSTEM_FILE.parent.rmdir()
    entry = _account(name)
    if entry is None or entry.pw_gecos != _GECOS:
        return
    if keep.exists():
        done(f"kept the account {name}, to which the store belongs")
        return
    _run("userdel", name)
    done(f"removed the account {name}")


def _account(name: str) -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    return None


def _write(text: str) -> None:
    beside = SYSTEM_FILE.with_name(f".{SYSTEM_FILE.name}.new")
    beside.write_text(text, "utf-8")
    beside.chmod(SYSTEM_FILE.stat().st_mode & 0o777 if SYSTEM_FILE.exists() else 0o644)
    beside.replace(SYSTEM_FILE)


def _run(*command: str) -> None:
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except FileNotFoundError:
        raise StoreError(f"there is no {command[0]} here; make or remove the account by hand") from None
    if result.returncode:
        raise StoreError(f"{' '.join(command)}: {result.stderr.strip()}")
