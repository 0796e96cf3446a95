"""``xcache config``: every setting, its value, and where it was set."""

from __future__ import annotations

import difflib
import os
from typing import Any, NamedTuple

import click

from xcache.cli.output import emit, json_option, note, print_line, size
from xcache.config import remotes
from xcache.config.config import load_usable, mode
from xcache.config.table import SETTINGS
from xcache.errors import ConfigError

_PREFIX = "XCACHE_"
_VARIABLES = ["XCACHE_CONFIG", *(setting.variable for setting in SETTINGS)]


class Shown(NamedTuple):
    """One setting as the command shows it."""

    name: str
    variable: str
    value: Any
    text: str
    source: str
    allowed: str
    meaning: str
    used_by: str


@click.command()
@json_option
def config(as_json: bool) -> None:
    """Show every setting, where it was set, and whether programs or the daemon use it.

    The source is default, environment, or the path of a file. A running daemon may have started with other values of
    its own settings; restart gives it these.

    \b
    JSON: {"settings": [{"name": str, "variable": str, "value": str, int, float, bool or null (none),
           "source": str, "allowed": str, "meaning": str, "used_by": "program", "daemon" or "both"}],
           "problems": [str] (unusable values, which are left out above),
           "unknown": [str] (variables that begin with XCACHE_ and are not settings)}

    Exit status 2 if a value cannot be used; programs then run without the cache, or stop at their first compile if it
    is that of XCACHE_ON_MISS.
    """
    shown, problems = _all()
    if as_json:
        settings = [{name: v for name, v in one._asdict().items() if name != "text"} for one in shown]
        emit({"settings": settings, "problems": problems, "unknown": unknown_variables()})
    else:
        _print(shown)
    for problem in problems:
        note(problem)
    for variable in unknown_variables():
        note(f"{variable} is not a setting, and nothing reads it{suggestion(variable)}")
    if problems:
        click.get_current_context().exit(2)


def unknown_variables() -> list[str]:
    """Return the variables that look like settings and are none, such as XCACHE_MAXSIZE."""
    return sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in _VARIABLES)


def suggestion(variable: str) -> str:
    """Return words that name the setting which a misspelt variable may stand for; empty if there is none."""
    # A prefix that all share makes no two alike.
    names = {name.removeprefix(_PREFIX): name for name in _VARIABLES}
    alike = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, n=1)
    return f"; did you mean {names[alike[0]]}?" if alike else ""


def _print(shown: list[Shown]) -> None:
    width = max(len(one.variable) for one in shown)
    for one in shown:
        print_line(f"  {one.text}  ({one.source}; {one.used_by})", label=one.variable.ljust(width), bold=True)
        print_line(f"{'':{width}}  {one.meaning}: {one.allowed}")


def _all() -> tuple[list[Shown], list[str]]:
    settings, problems = load_usable()
    try:
        used = mode()
    except ConfigError as error:
        used = "off"
        problems.append(str(error))
    shown = [
        Shown(
            "mode",
            "XCACHE",
            used,
            used,
            "environment" if "XCACHE" in os.environ else "default",
            "1 or on, 0 or off, readonly, refresh",
            "whether programs use the cache; set only by the environment",
            "program",
        )
    ]
    for setting in SETTINGS:
        value = getattr(settings, setting.name)
        if isinstance(value, tuple):
            value = remotes.masked(" ".join(value))
        elif setting.kind == "path":
            value = str(value or "")
        text = spelled(setting.kind, value)
        where = settings.sources[setting.name], setting.allowed, setting.meaning, setting.used_by
        shown.append(Shown(setting.name, setting.variable, value, text, *where))
    return shown, problems


def spelled(kind: str, value: Any) -> str:
    """Return a value as the environment would spell it."""
    if value is None:
        return ""
    if kind == "size":
        return size(value) if value else "0"
    if kind == "room" and not value.endswith("%"):
        return size(int(value)) if int(value) else "0"
    if kind == "time":
        return spelled_time(value)
    return str(int(value)) if kind == "flag" else str(value)


def spelled_time(seconds: float) -> str:
    """Return a time as a setting would spell it: ``90d``, ``0.5s``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % unit == 0:
            return f"{seconds // unit:g}{name}"
    return f"{seconds:g}s" if seconds else "0"
