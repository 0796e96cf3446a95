"""``xcache report``: one HTML file that says where the time went, and what to do about it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from xcache.cli import Failure, WrongUsage
from xcache.cli.output import counted, emit, json_option, note, print_bytes, print_wrapped, size, write_file
from xcache.config import config, parsing

_WEEK = "7d"


def _seconds(_context: click.Context, _option: click.Parameter, text: str) -> float:
    try:
        return parsing.parse_duration(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a duration such as 30m, 12h or 7d") from None


@click.command()
@click.option("--run", "wanted", metavar="RUN", help="The run to explain, as in `xcache run`; the last one by default.")
@click.option("--compare", "compared", nargs=2, metavar="A B", help="Explain run B, and show A and B side by side.")
@click.option(
    "--since",
    metavar="DURATION",
    default=_WEEK,
    show_default=True,
    callback=_seconds,
    help="Sum up the runs of this time (12h, 7d).",
)
@click.option("-o", "--output", metavar="FILE", default="report.html", show_default=True, help="- for stdout.")
@click.option("--open", "is_opened", is_flag=True, help="Open the report in a browser.")
@click.option("--with-programs", is_flag=True, help="Put the StableHLO of the run's programs into the report.")
@click.option("--redact", is_flag=True, help="Leave out hosts, folders and the arguments of programs.")
@json_option
def report(
    wanted: str | None,
    compared: tuple[str, str] | None,
    since: float,
    output: str,
    is_opened: bool,
    with_programs: bool,
    redact: bool,
    as_json: bool,
) -> None:
    """Write an HTML file that shows a run, all runs of some days, and what the store holds.

    It says where the time of the start went and what to do about it, why programs were compiled, which functions were
    compiled for many shapes, what the cache saved and lost, and what it keeps. The
    file loads nothing from anywhere. Needs the extra `report` (pip install 'jax-xcache[report]').

    \b
    JSON: {"file": str, "bytes": int, "run": str or null (the run explained), "runs": int (summed up),
           "verdict": str or null, "actions": [{"text": str, "reason": str, "seconds": float}]}
    """
    settings = config.load()
    if wanted is not None and compared:
        raise WrongUsage("--run and --compare exclude each other")
    if output == "-" and (as_json or is_opened):
        raise WrongUsage(f"-o - and {'--json' if as_json else '--open'} exclude each other")
    # Imported now, so that --help is quick.
    from xcache.cli.report import page
    from xcache.cli.report.content import content
    from xcache.cli.report.gathering import gather

    page.need_template_engine()
    first, second = compared or (None, wanted or "last")
    gathered = gather(settings, second, first, since, with_programs=with_programs)
    shown = content(gathered, redact=redact)
    text = page.rendered(shown).encode("utf-8", "replace")
    if output == "-":
        print_bytes(text)
        return
    target = Path(output)
    write_file(target, text)
    run = shown["run"]
    if as_json:
        actions = (
            [{name: each[name] for name in ("text", "reason", "seconds")} for each in run["actions"]] if run else []
        )
        emit(
            {
                "file": output,
                "bytes": len(text),
                "run": run["id"] if run else None,
                "runs": len(gathered.period),
                "verdict": run["verdict"] if run else None,
                "actions": actions,
            }
        )
    else:
        if run:
            print_wrapped(run["verdict"])
        note(f"{output}: {size(len(text))}, {counted(len(gathered.period), 'run')}")
    if is_opened:
        _open(target)


def _open(target: Path) -> None:
    try:
        is_open = webbrowser.open(target.resolve().as_uri())
    except webbrowser.Error:
        is_open = False
    if not is_open:
        raise Failure(f"no browser can be opened here; the report is in {target}")
