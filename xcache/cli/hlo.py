"""``xcache hlo``: an entry's program in each stage of its compile, and the difference between two."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from xcache.cli import WrongUsage
from xcache.cli.artifacts import comparison, stages
from xcache.cli.artifacts.entry import Entry, read
from xcache.cli.artifacts.stages import STAGES
from xcache.cli.completion import complete_key
from xcache.cli.output import counted, emit, json_option, note, print_line, print_text, write_file
from xcache.cli.selection import SHORT_KEY
from xcache.config import config

# The width of two columns in a pipe.
_PIPE_WIDTH = 160
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}

python_option = click.option(
    "--python",
    metavar="PATH",
    help="Use the jaxlib of this Python. [default: the one that wrote the entry]",
)


@click.command()
@click.argument("wanted", metavar="KEY", shell_complete=complete_key)
@click.option("--stage", type=click.Choice(tuple(STAGES)), default="stablehlo", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Write files into this folder.")
@click.option(
    "--diff",
    "other",
    metavar="KEY2",
    shell_complete=complete_key,
    help="Show in which lines another entry differs in the same stage.",
)
@click.option("--side-by-side", is_flag=True, help="Show a difference in two columns.")
@python_option
@json_option
def hlo(
    wanted: str,
    stage: str,
    output: Path | None,
    other: str | None,
    side_by_side: bool,
    python: str | None,
    as_json: bool,
) -> None:
    """Show the program of an entry as StableHLO, HLO, optimized HLO, after every pass, as LLVM IR or as assembly.

    KEY is as in `xcache show`. StableHLO is in the store, HLO is converted from it, and optimized HLO is in the
    executable. For passes, llvm and asm the program is compiled again, with the same options and flags. All of this
    happens in a process of its own, with the Python and jaxlib that wrote the entry and with the rights of the user who
    wrote it.

    \b
    JSON: {"key": str, "module_name": str, "stage": str, "jaxlib_version": str,
           "files": [{"name": str, "text": str}]}
    JSON with -o: {..., "files": [{"name": str, "file": str}]}
    JSON with --diff: {"key": str, "other": str, "stage": str, "differences": [{"name": str, "lines": [str]}]}
    """
    if output is not None and other is not None:
        raise WrongUsage("-o and --diff exclude each other")
    if side_by_side and other is None:
        raise WrongUsage("--side-by-side needs --diff")
    settings = config.load()
    chosen = [
        read(settings, each, with_executable=stage == "optimized") for each in (wanted, other) if each is not None
    ]
    made = [stages.make(entry, stage, python) for entry in chosen]
    contents = [each.texts() for each in made] if output is None else []
    for remark in dict.fromkeys(each.remark for each in made if each.remark):
        note(remark)
    if other is not None:
        compared = _compared(chosen, contents, side_by_side=side_by_side)
        if as_json:
            differences = [{"name": name, "lines": lines} for name, lines in compared.items()]
            emit({"key": chosen[0].key, "other": chosen[1].key, "stage": stage, "differences": differences})
        elif compared:
            _print(compared, {} if side_by_side else _COLOURS)
        else:
            note(f"the two programs are the same as {stage}")
        return
    facts = {"key": chosen[0].key, "module_name": chosen[0].module_name, "stage": stage}
    facts["jaxlib_version"] = made[0].jaxlib
    if output is not None:
        _write(made[0].files, output, facts, as_json)
        return
    texts = {name: content.decode("utf-8", "replace") for name, content in contents[0].items()}
    if as_json:
        emit(facts | {"files": [{"name": name, "text": text} for name, text in texts.items()]})
    else:
        _print({name: [text.removesuffix("\n")] for name, text in texts.items()}, {})


def _compared(entries: list[Entry], files: list[dict[str, bytes]], *, side_by_side: bool) -> dict[str, list[str]]:
    """Return the lines that show in what two programs differ, by file."""
    here, there = (entry.key[:SHORT_KEY] for entry in entries)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    return {
        pair.name: comparison.side_by_side(pair, width) if side_by_side else comparison.unified(pair, (here, there))
        for pair in comparison.pairs(*files)
    }


def _write(files: dict[str, bytes], folder: Path, facts: dict[str, Any], as_json: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(folder / name, content)
    if as_json:
        emit(facts | {"files": [{"name": name, "file": str(folder / name)} for name in files]})
    else:
        note(f"{counted(len(files), 'file')} written to {folder}")


def _print(files: dict[str, list[str]], colours: dict[str, str]) -> None:
    """Print files, with their names if there are several, and lines in the colour of their first character."""
    for name, lines in files.items():
        if len(files) > 1:
            print_line(f"==== {name}", bold=True)
        for line in lines:
            print_text(line, fg=colours.get(line[:1]))
