"""The ``xcache`` command. Each command lives in a module that is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click

from xcache._version import __version__
from xcache.errors import ConfigError, ConnectionLostError, RefusedError, XcacheError

# Every command and the module it is in, in the order in which --help shows them.
_COMMANDS = {
    "status": "status",
    "stats": "counting",
    "ls": "listing",
    "show": "showing",
    "toolchains": "toolchains",
    "rm": "changing",
    "invalidate": "toolchains",
    "clear": "changing",
    "config": "settings",
    "start": "control",
    "stop": "control",
    "restart": "control",
    "service": "service",
}
# What these say by themselves leaves open who said it.
_BEFORE = {ConnectionLostError: "the daemon was lost: ", RefusedError: "the daemon refuses: "}


class Failure(click.ClickException):
    """What went wrong, as one line on stderr."""

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"xcache: {self.format_message()}", file=file, err=file is None)


class Misunderstood(Failure):
    """What was asked for makes no sense."""

    exit_code = 2


class Commands(click.Group):
    """The commands; what they raise becomes one line and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Their names."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of this name, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except XcacheError as error:
            kind = Misunderstood if isinstance(error, ConfigError) else Failure
            raise kind(_BEFORE.get(type(error), "") + str(error)) from None
        except click.FileError as error:
            raise Failure(error.format_message()) from None
        except BrokenPipeError:
            # Whoever reads the output has seen enough; click leaves quietly.
            raise
        except OSError as error:
            raise Failure(str(error)) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xcache", message="%(prog)s %(version)s")
def main() -> None:
    """Look into the compilation cache, and look after its daemon.

    The commands that only read work while no daemon runs, and never start one. With --json each prints one JSON
    document, whose shape its --help shows: sizes in bytes, durations in seconds, moments in seconds since 1970.

    Exit status: 0 done, 1 failed, 2 asked for in a way that cannot be understood.
    """
