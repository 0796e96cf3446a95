"""``xcache doctor``: whether everything is in place, and a real compile that must be found again."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import click

from xcache._version import __version__
from xcache.cli import daemon, remote_findings, store_file, trial
from xcache.cli.config import suggestion, unknown_variables
from xcache.cli.output import emit, json_option, print_finding, size
from xcache.cli.remote_asking import asking
from xcache.client.connector import told_of_ignored
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import (
    ClosedStoreError,
    ConfigError,
    ProtocolError,
    RefusedError,
    SharedUidError,
    UnavailableError,
    UntrustedError,
    XcacheError,
)
from xcache.wire import commands, protocol
from xcache.wire.ownership import check_directory, trusted_uids

State = Literal["ok", "note", "wrong"]
_LOG_BYTES, _LOG_DAYS, _MOST_LOG_LINES = 256 * 1024, 7, 3
_LOG_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ \d+ (ERROR|WARNING) (.*)$")
# Settings of jax under which each program is compiled, with the value that does it, and how jax reads such variables.
_AGAINST = {"JAX_ENABLE_COMPILATION_CACHE": False, "JAX_ENABLE_PGLE": True, "JAX_COMPILATION_CACHE_EXPECT_PGLE": True}
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")
# Advice for an error that a check has met.
_ADVICE: dict[type[Exception], str] = {
    SharedUidError: "Run programs under an account of their own (a service's User=, docker run --user), not as nobody.",
    UntrustedError: "Remove what is there or let its owner do so, or name another place: XCACHE_SOCKET, XCACHE_DIR.",
    ProtocolError: "`xcache restart` starts a daemon of this version.",
    UnavailableError: "End it if it hangs. `xcache restart` starts another one; programs compile meanwhile.",
    ConfigError: "`xcache config` shows all settings and where they come from.",
}


class Check(NamedTuple):
    """One line: what was looked at, how it is, what was found, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


@click.command()
@click.option("--no-compile", is_flag=True, help="Leave out the real compile, which takes some seconds.")
@json_option
def doctor(no_compile: bool, as_json: bool) -> None:
    """Check that everything is in place, one line each, with what to do about it.

    The last check compiles a small program in two processes: the second must find what the first has stored. It may
    start a daemon, as a program would. It leaves no entry and no run, and `xcache stats` counts only that something was
    stored.

    \b
    JSON: {"checks": [{"name": str, "state": "ok", "note" or "wrong", "found": str, "advice": str}]}

    Exit status 1 if something is wrong.
    """
    checks: list[Check] = []
    for check in (_plugin, _versions, _switch, _settings, _socket, _daemon, _log, _store, _programs, _remotes, _of_jax):
        checks += _guarded(check)
    if not no_compile:
        checks += _guarded(_compile)
    if as_json:
        emit({"checks": [each._asdict() for each in checks]})
    else:
        for each in checks:
            print_finding(each.state, each.name, each.found, each.advice)
    if any(each.state == "wrong" for each in checks):
        click.get_current_context().exit(1)


def _guarded(check: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(check())
    except (XcacheError, OSError) as error:
        advice = next((each for kind, each in _ADVICE.items() if isinstance(error, kind)), "")
        return [Check(check.__name__.strip("_").replace("_", " "), "wrong", str(error), advice)]


def _plugin() -> Iterator[Check]:
    found = [each.value for each in metadata.entry_points(group="jax_plugins") if each.name == "xcache"]
    if found:
        yield Check("plugin", "ok", f"jax of {sys.executable} finds it")
    else:
        advice = (
            "Install xcache into the environment that has jax: scripts/install --python PATH, in a checkout of xcache."
        )
        yield Check(
            "plugin", "wrong", f"the Python of this command ({sys.executable}) has no entry point of xcache", advice
        )


def _versions() -> Iterator[Check]:
    versions = {"xcache": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("jax", "jaxlib"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            advice = f"Programs need it; xcache works with the {name} of their environment."
            yield Check("versions", "note", f"{name} is not installed here", advice)
    yield Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _switch() -> Iterator[Check]:
    mode = config.mode()
    if mode == "off":
        advice = "Set XCACHE=1 for the programs that are to use the cache."
        yield Check("switch", "note", "XCACHE is not set here, or off", advice)
    else:
        yield Check("switch", "ok", f"XCACHE={os.environ['XCACHE']} ({mode})")


def _settings() -> Iterator[Check]:
    settings, problems = config.load_usable()
    for problem in problems:
        advice = f"Programs {config.without_usable_settings()} until this is corrected."
        yield Check("settings", "wrong", problem, advice)
    unknown = unknown_variables()
    for variable in unknown:
        yield Check("settings", "note", f"{variable} is no setting{suggestion(variable)}")
    if problems or unknown:
        return
    changed = [f"{name} from {source}" for name, source in settings.sources.items() if source != "default"]
    yield Check("settings", "ok", ", ".join(changed) if changed else "all are the defaults")


def _socket() -> Iterator[Check]:
    settings, _ = config.load_usable()
    trusted = trusted_uids(settings.daemon_uid())
    if settings.socket.parent.exists():
        check_directory(settings.socket.parent, trusted)
    if settings.socket.exists() and (owner := settings.socket.stat().st_uid) not in trusted:
        raise UntrustedError(f"{settings.socket} belongs to another user (uid {owner})")
    yield Check("socket", "ok", str(settings.socket))


def _daemon() -> Iterator[Check]:
    settings, _ = config.load_usable()
    connection, problem = daemon.find_with_any_store(settings)
    if connection is None:
        starts = settings.autostart and not settings.daemon_user
        advice = "A program starts one when it compiles." if starts else "Start it: xcache start, or systemctl."
        yield Check("daemon", "note" if starts else "wrong", f"none listens on {settings.socket}", advice)
        return
    version, pid = connection.welcome.version, connection.welcome.pid
    connection.close()
    if ignored := settings.ignored_by(connection.welcome.settings or {}):
        yield Check("daemon", "note", told_of_ignored(ignored), "`xcache restart` starts it with the settings of now.")
    if problem:
        yield Check("daemon", "wrong", problem, "`xcache config` says where XCACHE_SOCKET and XCACHE_DIR come from.")
    elif version != __version__:
        advice = "It is replaced when programs of this version ask it; or `xcache restart`."
        yield Check("daemon", "note", f"process {pid} is xcache {version}, this is {__version__}", advice)
    else:
        yield Check("daemon", "ok", f"process {pid} answers on {connection.path}")


def _log() -> Iterator[Check]:
    settings, _ = config.load_usable()
    path = settings.dir / protocol.LOG
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            lines = file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # The store's check says what is wrong with its folder.
        return
    since = time.time() - _LOG_DAYS * 86400
    found = [match for line in lines if (match := _LOG_LINE.match(line))]
    recent = [each for each in found if time.mktime(time.strptime(each[1], "%Y-%m-%d %H:%M:%S")) > since]
    for match in recent[-_MOST_LOG_LINES:]:
        yield Check("log", "note", f"{match[1]} {match[2]} {match[3]}", f"The whole log is {path}.")
    if not recent:
        yield Check("log", "ok", f"no errors in {_LOG_DAYS} days")


def _store() -> Iterator[Check]:
    settings, _ = config.load_usable()
    if settings.daemon_user:
        yield Check("store", "ok", f"{settings.dir} belongs to the daemon of account {settings.daemon_user}")
        return
    place = daemon.nearest(settings.dir)
    if not place.is_dir():
        yield Check("store", "wrong", f"{place} is not a directory", "Choose a folder with XCACHE_DIR.")
        return
    if unusable := daemon.unusable_store(settings):
        advice = f"Choose another folder with XCACHE_DIR: nothing can be made in {place}, {_owned(place)}."
        if place == settings.dir:
            advice = f"Choose another with XCACHE_DIR, or correct the owner and mode of this one, {_owned(place)}."
        yield Check("store", "wrong", unusable, advice)
        return
    others = _files_of_others(settings.dir)
    if others:
        advice = f"Give them to the owner of the folder: chown -R {os.getuid()} {settings.dir}"
        yield Check("store", "wrong", f"files of other users are in it: {', '.join(others)}", advice)
    free, is_enough = _free(settings)
    advice = "" if is_enough else "Entries are evicted, and new ones refused, until there is room."
    yield Check("store", "wrong" if advice else "ok", f"{settings.dir}, {size(free)} free on its disk", advice)


def _files_of_others(directory: Path) -> list[str]:
    """Return the store's own files that belong to somebody else, as after a program was run with sudo."""
    if not directory.is_dir():
        return []
    owner = directory.stat().st_uid
    return sorted(each.name for each in directory.iterdir() if each.lstat().st_uid != owner)[:_MOST_LOG_LINES]


def _owned(place: Path) -> str:
    """Return words for the owner and mode of a folder, and for who asks."""
    found = place.stat()
    return f"which belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):03o}; you are uid {os.getuid()}"


def _free(settings: Config) -> tuple[int, bool]:
    """Return the free bytes of the store's disk, and whether they are as many as must stay free, or some megabytes."""
    status = os.statvfs(daemon.nearest(settings.dir))
    free, text = status.f_bavail * status.f_frsize, settings.min_free
    if text.endswith("%"):
        least = min(status.f_blocks * status.f_frsize * float(text[:-1]) / 100, 20 * 1024**3)
    else:
        least = max(float(text), 16 * 1024**2)
    return free, free >= least


def _programs() -> Iterator[Check]:
    """Say what programs do that cannot be cached, such as callbacks into Python."""
    settings, _ = config.load_usable()
    if not settings.daemon_user and not daemon.nearest(settings.dir).is_dir():
        # The store's check says so.
        return
    with contextlib.suppress(XcacheError):
        # The daemon holds counts back; what is wrong with it is another check's.
        if (connection := daemon.find(settings)) is not None:
            with contextlib.closing(connection):
                connection.demand(commands.Sync(), protocol.Done, settings.timeout)
    try:
        with store_file.open_store(settings) as store:
            counted = store.statistics() if store else {}
    except ClosedStoreError:
        return
    reasons = {name.partition(":")[2]: n for name, n in counted.items() if name.startswith("uncacheable:") and n > 0}
    if reasons:
        listed = ", ".join(
            f"{reason} ({count:g})" for reason, count in sorted(reasons.items(), key=itemgetter(1))[::-1]
        )
        advice = "docs/not-cached.md says what each means; `xcache why` names the programs of the last run."
        yield Check("programs", "note", f"some were compiled each time: {listed}", advice)
    else:
        yield Check("programs", "ok", "none did what cannot be cached")


def _remotes() -> Iterator[Check]:
    """Have the daemon ask each remote store, if there is any; it is started if none runs."""
    settings, _ = config.load_usable()
    if not settings.has_tiers:
        # The machine's daemon may have some, which are its administrator's.
        return
    try:
        with asking(settings) as remotes:
            checked = remotes.check()
    except RefusedError as error:
        yield Check("remotes", "note", f"the daemon refuses: {error}", "`xcache status` says how they do.")
        return
    except click.ClickException as error:
        yield Check("remotes", "wrong", error.message)
        return
    for about, state, found, advice in remote_findings.findings(checked):
        yield Check(about if about == remote_findings.KEYS else f"remote {about}", state, found, advice)


def _of_jax() -> Iterator[Check]:
    there = False
    if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        there = True
        yield Check("jax", "note", f"JAX_COMPILATION_CACHE_DIR={folder} is not used while xcache is on")
    for variable, value in _AGAINST.items():
        if os.environ.get(variable, "").lower() in (_TRUE if value else _FALSE):
            there = True
            advice = f"Programs compile each time, because jax goes its own way. Take {variable} away."
            yield Check("jax", "wrong", f"{variable}={os.environ[variable]}", advice)
    if re.search(r"xla_dump_(to|hlo_as)", os.environ.get("XLA_FLAGS", "")):
        there = True
        advice = "Programs are compiled each time, so that the files appear. Take the flag away to use the cache."
        yield Check("jax", "note", "XLA_FLAGS asks for dumps", advice)
    if not there:
        yield Check("jax", "ok", "no setting works against the cache")


def _compile() -> Iterator[Check]:
    settings, _ = config.load_usable()
    with contextlib.suppress(OSError):
        if not settings.daemon_user and not _free(settings)[1]:
            yield Check("compile", "note", "not tried: for its entry, others would be evicted from the full disk")
            return
    verdict = trial.compile_twice()
    yield Check("compile", "ok" if verdict.is_found else "wrong", verdict.text, verdict.advice)
