"""``xcache completion``: code with which a shell completes commands, options, keys, runs and remote stores.

Completing reads the store's file or offers nothing. It asks no daemon, starts none, and says nothing of what fails.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from xcache.cli.output import ago, print_text, printable

_Rows = Callable[..., list[Any]]

# Completing may take this long; then nothing is offered.
_SECONDS = 1.0
_MOST_OFFERED = 50
_SHORT_KEY, _SHORT_RUN = 12, 8
_DIGITS, _NAME = re.compile(r"[0-9a-fA-F]*"), re.compile(r"[\w.<>-]+")
# The end of click's call of this program in the code for each shell: what it writes to stderr would be in the prompt.
_CALL_ENDS = {"bash": "$1)", "zsh": "zsh_complete xcache)", "fish": "xcache);"}


@click.command()
@click.argument("shell", type=click.Choice(sorted(_CALL_ENDS)))
def completion(shell: str) -> None:
    """Print the code with which a shell completes commands, options, keys and runs.

    A KEY is completed by its digits or by the name of its function, a RUN by its digits.

    \b
    bash: put this into ~/.bashrc:  eval "$(xcache completion bash)"
    zsh:  put this into ~/.zshrc:   eval "$(xcache completion zsh)"
    fish: call once:                xcache completion fish > ~/.config/fish/completions/xcache.fish

    In ~/.zshrc, the line comes below `autoload -Uz compinit && compinit`.
    """
    # It reads no settings: wrong ones must not disturb every new shell.
    made = get_completion_class(shell)
    assert made is not None, shell  # noqa: S101 - click knows these shells
    end = _CALL_ENDS[shell]
    main = click.get_current_context().find_root().command
    source = made(main, {}, "xcache", "_XCACHE_COMPLETE").source()
    print_text(source.replace(end, end.replace(")", " 2>/dev/null)")))


def complete_key(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Offer the keys that begin so, and the functions whose names do; for a name that fits alone, its keys."""
    return _found(lambda rows: _entries(rows, typed))


def complete_run(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Offer `last`, and the latest runs that begin so."""
    last = [CompletionItem("last", help="the last run here")] if "last".startswith(typed) else []
    return last + _found(lambda rows: _runs(rows, typed.lower()))


def complete_remote(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Offer the remote stores of the settings, without what is before the host: shells take a colon for a blank."""
    try:
        # Not loaded by every command that has something to complete.
        from xcache.config import config

        urls = [tier.public_url for tier in config.load().tiers()]
    except Exception:  # noqa: BLE001 - the user is typing a command, and this is no place to complain
        return []
    places = [(url.partition("://")[2], url) for url in urls]
    return [CompletionItem(place, help=printable(url)) for place, url in places if place.startswith(typed)]


def _entries(rows: _Rows, typed: str) -> list[CompletionItem]:
    found: list[CompletionItem] = []
    if _DIGITS.fullmatch(typed):
        found += _keys(rows, "key >= ? AND key < ?", typed.lower(), f"{typed.lower()}g")
    sql = "SELECT DISTINCT module_name FROM entries WHERE module_name >= ? AND module_name < ? LIMIT ?"
    names = [name for (name,) in rows(sql, typed, f"{typed}\U0010ffff", _MOST_OFFERED)] if typed else []
    for name in names:
        keys = _keys(rows, "module_name = ?", name) if name == typed or len(names) == 1 else []
        if name == typed or len(keys) == 1:
            found += keys
        elif _NAME.fullmatch(name):
            found.append(CompletionItem(name))
    return found


def _keys(rows: _Rows, where: str, *values: str) -> list[CompletionItem]:
    """Return the keys for which a condition holds, those used last first."""
    order = "GROUP BY key ORDER BY max(last_used_at) DESC LIMIT ?"
    sql = f"SELECT key, module_name FROM entries WHERE {where} {order}"  # noqa: S608 - our own words
    return [_item(key[:_SHORT_KEY], name) for key, name in rows(sql, *values, _MOST_OFFERED)]


def _runs(rows: _Rows, typed: str) -> list[CompletionItem]:
    sql = "SELECT run, program, began_at FROM runs WHERE run >= ? AND run < ? ORDER BY id DESC LIMIT ?"
    found = rows(sql, typed, f"{typed}g", _MOST_OFFERED)
    return [_item(run[:_SHORT_RUN], f"{program}, {ago(began_at)} ago") for run, program, began_at in found]


def _item(value: str, described: str) -> CompletionItem:
    return CompletionItem(value, help=printable(described))


def _found(find: Callable[[_Rows], list[CompletionItem]]) -> list[CompletionItem]:
    """Return what is found by queries of the store; nothing if anything fails, or takes too long."""
    # SQLite may wait for a lock, and the disk for anything: neither can be interrupted from this thread.
    alarm = threading.Timer(_SECONDS, os._exit, [0])
    alarm.daemon = True
    alarm.start()
    try:
        # Not loaded by every command that has something to complete.
        from xcache.cli import store_file
        from xcache.config import config

        with store_file.open_store(config.load()) as store:
            if store is None:
                return []
            connection = store.connection
            return find(lambda sql, *values: connection.execute(sql, values).fetchall())
    except Exception:  # noqa: BLE001 - the user is typing a command, and this is no place to complain
        return []
    finally:
        alarm.cancel()
