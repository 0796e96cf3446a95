"""The ``xcache`` command. The module of a subcommand is imported when that subcommand is called."""

from __future__ import annotations

import contextlib
import importlib
import keyword
import os
from typing import Any

import click

from xcache._version import __version__
from xcache.cli.output import emit, print_text
from xcache.errors import ConfigError, ConnectionLostError, RefusedError, XcacheError

# Every command and its module, in the order in which --help shows them.
_COMMANDS = {
    "status": "status",
    "monitor": "monitor",
    "stats": "stats",
    "ls": "ls",
    "doctor": "doctor",
    "show": "show",
    "hlo": "hlo",
    "graph": "graph",
    "cost": "cost",
    "runs": "runs",
    "run": "runs",
    "why": "why",
    "compare": "compare",
    "trace": "trace",
    "report": "report",
    "toolchains": "toolchains",
    "rm": "rm",
    "invalidate": "toolchains",
    "clear": "rm",
    "pin": "pin",
    "unpin": "pin",
    "gc": "gc",
    "rewarm": "rewarm",
    "prebuild": "prebuild",
    "key": "key",
    "remote": "remote",
    "export": "exporting",
    "import": "importing",
    "bundle": "bundle",
    "preflight": "preflight",
    "config": "config",
    "start": "control",
    "stop": "control",
    "restart": "control",
    "service": "service",
    "completion": "completion",
}
# These messages need a subject in front of them.
_PREFIXES = {ConnectionLostError: "the daemon does not answer: ", RefusedError: "the daemon refuses: "}
# Longer than the first sentence of any command.
_LONGEST_HELP = 300


class Failure(click.ClickException):
    """A command failed; the message is one line on stderr."""

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - as click calls it
        """Print the line."""
        print_text(f"xcache: {self.format_message()}", err=True)


# Terminals that show escapes as they are; click would make text bold there.
_APPENDING = ("dumb", "unknown")


class WrongUsage(Failure):
    """A command was called in a way that makes no sense."""

    exit_code = 2


class Group(click.Group):
    """A group of commands whose help has the first sentence of each in full, which click would cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(_LONGEST_HELP)) for name, found in commands if found])


class Commands(Group):
    """The group of commands; it turns their exceptions into one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command of this name and return it, or None if there is none."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{_COMMANDS[cmd_name]}")
        # A function cannot be called import.
        command: click.Command = getattr(module, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name; for a misspelt one, suggest similar ones."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            alike = difflib.get_close_matches(name, _COMMANDS, n=2)
            meant = f"; did you mean {' or '.join(alike)}?" if alike else ""
            raise click.UsageError(f"there is no command {name!r}{meant}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; with --json, a failure prints a JSON document, too."""
        # Read now: click empties the list as it parses.
        as_json = "--json" in ctx.args
        try:
            return self._invoke(ctx)
        except (click.ClickException, click.Abort) as error:
            if as_json:
                # The failure may be that nothing can be written there.
                with contextlib.suppress(OSError):
                    emit({"error": error.format_message() if isinstance(error, click.ClickException) else "aborted"})
            raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except XcacheError as error:
            kind = WrongUsage if isinstance(error, ConfigError) else Failure
            raise kind(_PREFIXES.get(type(error), "") + str(error)) from None
        except click.FileError as error:
            raise Failure(error.format_message()) from None
        except BrokenPipeError:
            # The reader of the output has closed the pipe; click exits quietly.
            raise
        except OSError as error:
            raise Failure(str(error)) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xcache", message="%(prog)s %(version)s")
def main() -> None:
    """Inspect the compilation cache and manage its daemon.

    Commands that only read work without a daemon and never start one. With --json each prints one JSON document, and
    monitor one a line, whose shape its --help shows: sizes in bytes, durations in seconds, moments in seconds since
    1970. A command that fails prints {"error": str} instead, and the same text on stderr.

    Exit status: 0 done, 1 failed, 2 wrong usage or settings.
    """
    if os.environ.get("TERM") in _APPENDING:
        click.get_current_context().color = False
