"""``xcache import``: take over the entries of a bundle, after all of it was checked."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from xcache.cli import Failure, compiler_here, daemon, store_file
from xcache.cli.bundle_file import Object, namespace_of, objects, opened, tell_problems
from xcache.cli.output import counted, emit, json_option, note, print_line, progress, size
from xcache.client.connection import Connection
from xcache.client.contents import hand_over
from xcache.config import config
from xcache.config.config import Config
from xcache.errors import ClosedStoreError, ConnectionLostError, RefusedError
from xcache.wire import commands, protocol
from xcache.wire.trusted_keys import TrustedKeys

# The kinds of refusals that say of one entry that nobody here may have it; the others are stored without it.
_OF_ONE_ENTRY = (protocol.SET_ASIDE, "too large")
# Seconds that checking one entry may take, and storing all of them.
_STORE_SECONDS = 60.0


@click.command("import")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--unsigned", is_flag=True, help="Take what no trusted key signed, too: you vouch for it.")
@click.option("--all", "even_foreign", is_flag=True, help="Take entries of compilers that are not here, too.")
@json_option
def import_(path: Path, unsigned: bool, even_foreign: bool, as_json: bool) -> None:
    """Take over the entries of a bundle, and what programs wanted, into the store.

    Everything in the file is checked first: if anything is damaged, or is not signed by a key that is trusted here
    (xcache key trust), nothing is taken over. Then all is stored at once, or nothing of it. Entries of compilers that
    are not installed here are left out: no program here can want them. An executable is code, so --unsigned is for
    files of your own.

    \b
    JSON: {"file": str, "stored": int, "there": int (already), "programs": int (whose wants were remembered),
           "left_out": {REASON: int}}

    Exit status 1 if nothing could be taken over.
    """
    settings = config.load()
    counts, left_out = Counter[str](), Counter[str]()
    with opened(path) as bundle:
        namespace = namespace_of(bundle)
        if namespace != settings.namespace:
            raise Failure(
                f"{path} belongs to {_said(namespace)}, and the settings name {_said(settings.namespace)}"
                " (XCACHE_NAMESPACE)"
            )
        trusted = TrustedKeys.load(settings.trusted_keys)
        total = sum(1 for _ in bundle.names())
        with progress(total, "checking") as advance:
            found = _told_to(advance, objects(bundle, trusted, trust_unsigned=unsigned))
            if count := tell_problems(found, settings):
                raise Failure(f"nothing is taken over: {counted(count, 'object')} of {total} cannot be used")
        here = {} if even_foreign else _toolchains(settings)
        with (
            contextlib.closing(daemon.connect_for_change(settings)) as connection,
            progress(total, "importing") as advance,
        ):
            for each in _told_to(advance, objects(bundle, trusted, trust_unsigned=unsigned)):
                if each.problem:
                    raise _nothing(counts, f"{path} was altered after it was checked ({each.problem})")
                why = _why_not(each, here) or _send(settings, connection, each, counts, unsigned=unsigned)
                if why:
                    left_out[why] += 1
            _store(settings, connection, counts)
    if as_json:
        document = {"file": str(path), **{name: counts[name] for name in ("stored", "there", "programs")}}
        emit(document | {"left_out": dict(left_out)})
    else:
        stored = f"stored {counted(counts['stored'], 'entry')}, {size(counts['bytes'])}"
        there = f"; {counts['there']} were here already" if counts["there"] else ""
        print_line(f"{stored}, and what {counted(counts['programs'], 'program')} wanted{there}")
        for why, count in left_out.most_common():
            print_line(f"  left out {counted(count, 'entry')}: {why}")
    if left_out and not counts["stored"] and not counts["there"]:
        note("nothing of it is of use here")
        click.get_current_context().exit(1)


def _told_to(advance: Callable[[int], object], found: Iterable[Object]) -> Iterator[Object]:
    for each in found:
        yield each
        advance(1)


def _said(namespace: str) -> str:
    return f"the namespace {namespace}" if namespace else "no namespace"


def _toolchains(settings: Config) -> dict[str, dict[str, str]]:
    """Return the states of the toolchains that are known here, by platform and digest."""
    found: dict[str, dict[str, str]] = {}
    # Only the daemon may read the store of a whole machine.
    with contextlib.suppress(ClosedStoreError), store_file.open_store(settings) as store:
        for row in store.toolchains() if store else ():
            if row["platform"] and row["installations"]:
                found.setdefault(row["platform"], {})[row["digest"]] = row["state"]
    here = compiler_here.of_python(None)
    if here is not None and (own := here.toolchain(settings.own_dir)) is not None:
        found.setdefault("cpu", {})[own] = "live"
    return found


def _why_not(found: Object, here: dict[str, dict[str, str]]) -> str:
    """Return why no program here can want an entry; empty if one may."""
    if found.entry is None:
        return ""
    put = found.entry.put
    known = here.get(put.platform, {})
    state = known.get(put.components["toolchain"])
    about = f"jaxlib {put.jaxlib_version} for {put.platform}"
    if state == "stale":
        return f"the compiler that made it, {about}, is no longer installed"
    return f"another compiler made it, {about}, which is not installed here" if known and state is None else ""


def _send(settings: Config, connection: Connection, found: Object, counts: Counter[str], *, unsigned: bool) -> str:
    """Give an object to the daemon, where it waits to be stored; return why it is left out."""
    content, size = found.content, len(found.content)
    inline = content if size <= protocol.INLINE_LIMIT else None
    message: commands.ImportEntry | commands.ImportHistory
    if found.entry is not None:
        message = commands.ImportEntry(found.entry.put.key, unsigned, inline, size)
    else:
        assert found.history is not None  # noqa: S101 - a checked object is one or the other
        message = commands.ImportHistory(found.history.program, found.history.arguments, unsigned, inline, size)

    def ask() -> protocol.Message:
        if inline is None:
            hand_over(connection, [content], settings.timeout + _STORE_SECONDS)
        return connection.ask(message, settings.timeout + _STORE_SECONDS)

    try:
        try:
            answer = ask()
        except RefusedError as error:
            if error.kind != commands.IMPORT_FULL:
                raise
            _store(settings, connection, counts)
            answer = ask()
    except RefusedError as error:
        if error.kind in _OF_ONE_ENTRY:
            return str(error)
        raise _nothing(counts, str(error)) from None
    except ConnectionLostError as error:
        raise _nothing(counts, str(error)) from None
    counts["there"] += isinstance(answer, protocol.Stored)
    return ""


def _store(settings: Config, connection: Connection, counts: Counter[str]) -> None:
    """Have the daemon store all that waits."""
    try:
        done = connection.demand(commands.EndImport(), commands.Imported, settings.timeout + _STORE_SECONDS)
    except RefusedError as error:
        raise _nothing(counts, str(error)) from None
    except ConnectionLostError as error:
        raise Failure(f"either all or nothing was taken over, and another import makes sure: {error}") from None
    counts.update(stored=done.entries, bytes=done.bytes, programs=done.programs)


def _nothing(counts: Counter[str], why: str) -> Failure:
    before = f" but the {counted(counts['stored'], 'entry')} before" if counts["stored"] else ""
    return Failure(f"nothing is taken over{before}: {why}")
