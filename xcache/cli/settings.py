"""``xcache config``: every setting, its value, and where that came from."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import click

from xcache.cli.output import emit, json_option, print_line, printable, size
from xcache.config import load, mode
from xcache.settings import SETTINGS


class Shown(NamedTuple):
    """One setting as it is shown."""

    name: str
    variable: str
    value: Any
    text: str
    source: str
    allowed: str
    meaning: str


@click.command()
@json_option
def config(as_json: bool) -> None:
    """Show every setting and where it came from.

    Source is default, environment, or the file it stands in.

    \b
    JSON: {"settings": [{"name": str, "variable": str, "value": str, int, float or bool, "source": str,
           "allowed": str, "meaning": str}]}
    """
    shown = _all()
    if as_json:
        emit({"settings": [{name: v for name, v in one._asdict().items() if name != "text"} for one in shown]})
        return
    width = max(len(one.variable) for one in shown)
    for one in shown:
        name = click.style(one.variable.ljust(width), bold=True)
        print_line(f"{name}  {printable(one.text)}  ({one.source})")
        print_line(f"{'':{width}}  {one.meaning}: {one.allowed}")


def _all() -> list[Shown]:
    settings = load()
    used = mode()
    shown = [
        Shown(
            "mode",
            "XCACHE",
            used,
            used,
            "environment" if "XCACHE" in os.environ else "default",
            "1 or on, 0 or off, readonly, refresh",
            "whether programs use the cache, from the environment only",
        )
    ]
    for setting in SETTINGS:
        value = getattr(settings, setting.name)
        value = " ".join(value) if isinstance(value, tuple) else str(value or "") if setting.kind == "path" else value
        text = _text(setting.kind, value)
        source = settings.sources[setting.name]
        shown.append(Shown(setting.name, setting.variable, value, text, source, setting.allowed, setting.meaning))
    return shown


def _text(kind: str, value: Any) -> str:
    """A value as it could stand in the environment."""
    if kind == "size":
        return size(value) if value else "0"
    if kind == "room" and not value.endswith("%"):
        return size(int(value)) if int(value) else "0"
    if kind == "time":
        return length(value)
    return str(int(value)) if kind == "flag" else str(value)


def length(seconds: float) -> str:
    """A time as it could be given: ``90d``, ``0.5s``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds and seconds % unit == 0:
            return f"{seconds // unit:g}{name}"
    return f"{seconds:g}s" if seconds else "0"
