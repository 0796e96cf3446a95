"""``xcache graph``: the HLO of an entry as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from xcache.cli import WrongUsage
from xcache.cli.artifacts import process, stages
from xcache.cli.artifacts.entry import read
from xcache.cli.completion import complete_key
from xcache.cli.hlo import python_option
from xcache.cli.output import emit, json_option, note, print_bytes, printable, write_file
from xcache.cli.selection import SHORT_KEY
from xcache.config import config

_FORMATS = ("svg", "png", "pdf")
# graphviz takes more than linear time.
_MOST_DRAWING_SECONDS = 120


@click.command()
@click.argument("wanted", metavar="KEY", shell_complete=complete_key)
@click.option("--stage", type=click.Choice(("hlo", "optimized")), default="optimized", show_default=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="An .svg, .png, .pdf or .dot file, - for DOT on stdout. [default: NAME-KEY.svg]",
)
@python_option
@json_option
def graph(wanted: str, stage: str, output: str | None, python: str | None, as_json: bool) -> None:
    """Draw the HLO of an entry, as it was before or after optimization.

    KEY is as in `xcache show`. jaxlib makes the graph in DOT, as `xcache hlo` has it made, and graphviz draws it.
    Without graphviz, the file gets the DOT and the suffix .dot.

    \b
    JSON: {"key": str, "module_name": str, "stage": str, "file": str, "remark": str (why it was not drawn, or "")}
    """
    settings = config.load()
    entry = read(settings, wanted, with_executable=stage == "optimized")
    file = Path(output or f"{entry.module_name}-{entry.key[:SHORT_KEY]}.svg".replace("/", "_"))
    wish = file.suffix.removeprefix(".")
    if output != "-" and wish not in (*_FORMATS, "dot"):
        raise WrongUsage(f"{file} should end in .svg, .png, .pdf or .dot")
    chosen, remark = stages.chosen_python(entry, python, any_jaxlib=stage == "hlo")
    if remark:
        note(remark)
    task, environment = ({}, {}) if stage == "hlo" else stages.of_loading(entry)
    drawing = {"format": wish if wish in _FORMATS else "", "seconds": _MOST_DRAWING_SECONDS}
    result = process.run(entry, chosen, "graph", environment=environment, **task, **drawing)
    if output == "-":
        print_bytes(result.file("graph.dot"))
        return
    remark = printable(str(result.found or ""))
    if remark:
        file = file.with_suffix(".dot")
    write_file(file, result.file(f"graph{file.suffix}"))
    if as_json:
        emit({"key": entry.key, "module_name": entry.module_name, "stage": stage, "file": str(file), "remark": remark})
    else:
        note(f"{remark}, so {file} is DOT" if remark else f"{file} written")
