"""``xcache status``: the state of the daemon and the store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from xcache.cli import daemon, remote_asking, store_file
from xcache.cli.config import spelled_time
from xcache.cli.output import counted, duration, emit, json_option, note, print_facts, print_line, printable, size
from xcache.client.connection import Connection
from xcache.client.connector import told_of_ignored
from xcache.client.launcher import Launcher
from xcache.config import config
from xcache.config.config import Config
from xcache.config.remotes import Remote
from xcache.config.table import LIMITS
from xcache.errors import ClosedStoreError, ConfigError, UnavailableError, UntrustedError
from xcache.wire import protocol

_TOTALS = ("entries", "bytes")


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Show whether the daemon runs, what is being compiled, and how full the store is.

    This command's own connection is not counted. The limits are the daemon's while one runs, else those of the
    settings. ls --quarantined lists the entries that were set aside.

    \b
    JSON: {"running": bool, "problem": str or null, "pid": int or null, "version": str or null,
           "uptime_seconds": float or null, "connections": int or null, "socket": str, "directory": str,
           "log": str or null (the daemon's file; null: none here, or it is the journal),
           "entries": int or null, "bytes": int or null, "max_size": int (0: no limit),
           "max_entries": int (0: no limit), "max_age": float (0: no limit),
           "limits_from": {LIMIT: str} (where the daemon has each limit from: default, a file, or environment,
           which was that of the program or command that started it;
           LIMIT is one of "max_size", "max_entries", "max_age", "min_free", "user_quota", "max_ledger"),
           "ignored": {SETTING: str} (what the daemon has in place of what this environment says),
           "quarantined": int or null,
           "stale": int or null (entries that are not served),
           "closed": str or null (why the store cannot be read here),
           "free": int or null (bytes on the disk, if min_free applies),
           "to_stay_free": int or null (bytes, by min_free; 0: none; null: only the daemon knows),
           "damaged_databases": [str], "settings_problems": [str] (why programs cannot use the cache),
           "configuration_problem": str or null (why the daemon keeps its former settings),
           "namespace": str or null (the daemon's, in remote stores),
           "compiles": [{"key": str, "module_name": str, "pid": int, "program": str,
                         "host": str (empty: this machine, or still being asked), "seconds": float, "waiting": int}],
           "remotes": [{"name": str, "state": "ok", "failing" or "unusable", "problem": str, "gets": int, "found": int,
                        "useless": str (why nothing of it may be loaded; empty: some may),
                        "rejected": int (signed by nobody trusted, or damaged), "last_rejected": str (why the last
                        was), "bytes_read": int, "puts": int,
                        "bytes_written": int, "foreign": int (not uploaded, because somebody whose key is not trusted
                        here has; all since the daemon began), "waiting": int (to be uploaded)}]}

    A value that cannot be known is null. Exit status 1 if a daemon has the store but does not answer, or programs get
    another store than the settings name.
    """
    settings, problems = config.load_usable()
    facts: dict[str, Any] = {}
    address = Launcher(settings).address() or settings.socket
    compiles: list[dict[str, Any]] = []
    remotes: list[dict[str, Any]] = []
    problem = None
    ignored: dict[str, str] = {}
    directory = str(settings.dir)
    is_managed = False
    try:
        connection, problem = daemon.find_with_any_store(settings)
        if connection is not None:
            address, directory = connection.path, connection.welcome.directory
            is_managed = connection.listener.pid != connection.welcome.pid
            ignored = settings.ignored_by(connection.welcome.settings or {})
            facts, compiles, remotes = _ask(connection, settings.timeout)
    except UntrustedError as error:
        problem = f"{error} ({error.kind})"
    except (UnavailableError, ConfigError) as error:
        problem = str(error)
    if not facts and (unusable := daemon.unusable_store(settings)):
        problems.append(unusable)
    held = _held(settings._replace(dir=Path(directory)), facts)
    found = {
        "running": bool(facts),
        "problem": problem,
        "pid": facts.get("pid"),
        "version": facts.get("version"),
        "uptime_seconds": facts.get("uptime_seconds"),
        # This command's own connection is one of them.
        "connections": facts["connections"] - 1 if facts else None,
        "socket": str(address),
        "directory": directory,
        "log": None if is_managed else _log(Path(directory)),
        **held,
        **{limit: facts.get(limit, getattr(settings, limit)) for limit in ("max_size", "max_entries", "max_age")},
        "limits_from": {name: facts.get(f"{name}_from", settings.sources[name]) for name in LIMITS},
        "ignored": ignored,
        "free": facts.get("free") if facts.get("to_stay_free") else None,
        "to_stay_free": facts.get("to_stay_free"),
        "damaged_databases": _damaged(settings),
        "settings_problems": problems,
        "configuration_problem": facts.get("configuration_problem") or None,
        "namespace": facts.get("namespace"),
        "compiles": compiles,
        "remotes": remotes,
    }
    if as_json:
        emit(found)
    else:
        _print(found)
    passing = [name for name, source in found["limits_from"].items() if facts and source == "environment"]
    if passing and not settings.daemon_user:
        note(
            f"the daemon has {', '.join(passing)} from the environment in which it was started, and the next one need"
            f" not have it; a line in {settings.kept_in} keeps it"
        )
    if ignored:
        note(f"{told_of_ignored(ignored)}; to start it with the settings of now: xcache restart")
    for path in found["damaged_databases"]:
        note(f"a damaged database was set aside and a fresh one begun; inspect or delete it: {path}")
    wanted = {tier.public_url for tier in settings.tiers()}
    if facts and (missing := wanted - {each["name"] for each in remotes}):
        listed = ", ".join(sorted(missing))
        note(f"the daemon began without {listed}, which the settings name; restart it: xcache restart")
    if wanted and (problem_of_names := remote_asking.other_namespace(settings, facts)):
        note(problem_of_names)
    refused = found["configuration_problem"]
    for each in problems:
        also = ", and the daemon keeps its former settings" if each == refused else ""
        note(f"programs {config.without_usable_settings()}{also}: {each}")
    if refused and refused not in problems:
        note(f"the daemon keeps its former settings: {refused}")
    if problem:
        note(problem)
        click.get_current_context().exit(1)


def _ask(connection: Connection, timeout: float) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    with contextlib.closing(connection):
        said = connection.demand(protocol.AskStatus(), protocol.Status, timeout)
    return said.facts, said.compiles, said.remotes


def _held(settings: Config, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the store's totals, from the store itself, or from the daemon's status if only the daemon may read it."""
    try:
        with store_file.open_store(settings) as store:
            totals = store.totals() if store else {}
            held: dict[str, Any] = {name: totals.get(name, 0) for name in _TOTALS}
            quarantined, stale = (len(store.quarantined()), store.stale_entries()) if store else (0, 0)
    except ClosedStoreError as error:
        held = {name: facts.get(name) for name in _TOTALS}
        return {**held, "quarantined": None, "stale": None, "closed": str(error)}
    return {**held, "quarantined": quarantined, "stale": stale, "closed": None}


def _log(directory: Path) -> str | None:
    """Return the file of the daemon's log, or None if there is none that this user can see."""
    with contextlib.suppress(OSError):
        return str(path) if (path := directory / protocol.LOG).is_file() else None
    return None


def _damaged(settings: Config) -> list[str]:
    with contextlib.suppress(OSError):
        found = settings.dir.glob(f"{protocol.DATABASE}.damaged-*")
        return sorted(str(path) for path in found if not path.name.endswith(("-wal", "-shm")))
    return []


def _held_of(found: dict[str, Any]) -> str:
    """Describe how many entries and bytes the store holds, and may hold."""
    if found["entries"] is None:
        return f"cannot be known: {found['closed']}"
    entries, limit = counted(found["entries"], "entry"), found["max_size"]
    if most := found["max_entries"]:
        entries += f" of {most} ({found['entries'] / most:.0%})"
    full = f" of {size(limit)} ({found['bytes'] / limit:.0%})" if limit else "" if most else ", no limit"
    return f"{entries}, {size(found['bytes'])}{full}" + (", of all users" if found["closed"] else "")


def _remote(each: dict[str, Any]) -> str:
    """Describe a remote store: what came from there and went there since the daemon began."""
    if each["state"] == "unusable":
        return f"{each['name']} is not used: {each['problem']}"
    used = max(0, each["found"] - each["rejected"])
    parts = [f"{used} of {each['gets']} found ({size(each['bytes_read'])})"]
    parts.append(f"{each['puts']} uploaded ({size(each['bytes_written'])})")
    parts += [f"{each['waiting']} to be uploaded"] * bool(each["waiting"])
    parts += [f"{each['rejected']} not used: {each['last_rejected']}"] * bool(each["rejected"])
    foreign = f"{each['foreign']} not uploaded, because others whose keys are not trusted here have put them there"
    parts += [foreign] * bool(each["foreign"])
    parts += [f"nothing of it is used: {each['useless']}"] * bool(each["useless"])
    parts += [f"failing: {each['problem']}"] * (each["state"] == "failing")
    parts += ["the file does not exist, and counts as empty until it does"] * _is_absent(Remote(each["name"]))
    return f"{each['name']}: {', '.join(parts)}"


def _is_absent(remote: Remote) -> bool:
    """Return whether a remote store is a bundle that is not there, which is no failure, and may be a misspelt path."""
    try:
        return remote.is_bundle and not remote.path.exists()
    except OSError:
        # Only the daemon may look.
        return False


def _print(found: dict[str, Any]) -> None:
    if found["running"]:
        state = f"running, xcache {found['version']}, process {found['pid']}"
    elif found["problem"]:
        state = "cannot be reached"
    else:
        state = "nobody listens on this socket" if found["closed"] else "not running"
    rows = [("daemon", state)]
    if found["running"]:
        rows += [("up for", duration(found["uptime_seconds"])), ("connections", str(found["connections"]))]
    rows += [("socket", found["socket"]), ("store", found["directory"]), ("holds", _held_of(found))]
    if found["log"]:
        rows.append(("log", found["log"]))
    if found["max_age"]:
        rows.append(("keeps", f"what was used within {spelled_time(found['max_age'])}"))
    if found["to_stay_free"] and found["free"] < found["to_stay_free"]:
        lacking = f"{size(found['free'])} free, and {size(found['to_stay_free'])} are to stay free (min_free)"
        rows.append(("disk", f"{lacking}: the daemon evicts entries and stores nothing"))
    if found["stale"]:
        rows.append(("stale", f"{counted(found['stale'], 'entry')}, not served (xcache toolchains)"))
    if found["quarantined"]:
        rows.append(("set aside", f"{counted(found['quarantined'], 'entry')} (xcache ls --quarantined)"))
    if found["namespace"]:
        rows.append(("namespace", found["namespace"]))
    rows += [("remote" if not number else "", _remote(each)) for number, each in enumerate(found["remotes"])]
    print_facts(rows)
    if found["compiles"]:
        print_line()
        print_line("being compiled", bold=True)
    for compiling in found["compiles"]:
        host = f" on {compiling['host']}" if compiling["host"] else ""
        who = printable(f"{compiling['module_name']} by process {compiling['pid']} ({compiling['program']}){host}")
        waiting = f", {compiling['waiting']} waiting" if compiling["waiting"] else ""
        print_line(f"  {compiling['key'][:12]}  {who} for {duration(compiling['seconds'])}{waiting}")
