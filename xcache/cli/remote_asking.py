"""Ask the daemon about its remote stores for ``xcache remote`` and ``xcache doctor``, each question with a bound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from xcache.cli import Failure, WrongUsage, daemon
from xcache.cli.completion import complete_remote
from xcache.cli.output import note, printable
from xcache.client.connection import Connection
from xcache.config.config import Config
from xcache.errors import RefusedError
from xcache.wire import commands, protocol

# One question may take so many times what a program waits for an entry.
_TIMES = 3
# The daemon may have many other jobs, and a large store.
_PUSH_SECONDS = 600.0
_NAMES_AT_ONCE = 200

# Advice for each kind of trouble with a remote store.
ADVICE = {
    "unreachable": "Is the address right, and does the server run? Programs compile meanwhile, and nothing is lost.",
    "untrusted": "If only its authority is missing here, name it by SSL_CERT_FILE: xcache restart after that.",
    "denied": "The credentials that the daemon was started with are wrong, or do not allow this.",
    "missing": "Make the bucket, container, database or folder, or correct the address in XCACHE_REMOTE.",
    "full": "Make room there: xcache remote gc, or rules of the store's own. Or it was asked for too much at once.",
    "read-only": "Say so with ?readonly=1 in XCACHE_REMOTE, or allow writing there.",
    "too large": "Raise the limit of the store for one object.",
    "failed": "The daemon's log may say more. Is it a store of the kind that the address says?",
    "unusable": "Correct XCACHE_REMOTE, or install what it needs, and restart the daemon: xcache restart.",
}
_NONE = "no remote store is set; XCACHE_REMOTE names them"
# The daemon refuses: a store does not say what it has, or the settings say that it is only read from.
CANNOT_LIST, READ_ONLY = "cannot list", "readonly"

tier_option = click.option(
    "--tier", metavar="NAME", shell_complete=complete_remote,
    help="Only the store whose address is, or contains, this; otherwise all.",
)  # fmt: skip


class Object(NamedTuple):
    """An object of a remote store, with its name in the namespace."""

    remote: str
    name: str
    size: int
    # Seconds since 1970 by the store's clock; None where it does not say.
    modified_at: float | None

    @property
    def kind(self) -> str:
        """The first part of the name: ``entries``, ``runs``, or another."""
        return self.name.partition("/")[0]

    @property
    def id(self) -> str:
        """The last part of the name; of an entry, its key."""
        return self.name.rpartition("/")[2]


def other_namespace(settings: Config, facts: Mapping[str, Any]) -> str:
    """Return what is to be said if a daemon uses another namespace than the settings name, in its AskStatus facts."""
    theirs = facts.get("namespace", settings.namespace)
    if theirs == settings.namespace:
        return ""
    mine, theirs = (f"the namespace {each}" if each else "no namespace" for each in (settings.namespace, theirs))
    return f"the daemon was started with {theirs}, and the settings name {mine}; to start it anew: xcache restart"


class RemoteTroubleError(Failure):
    """A remote store did not do what was asked; ``kind`` is one of ``ADVICE``, ``CANNOT_LIST`` or ``READ_ONLY``."""

    def __init__(self, remote: str, kind: str, reason: str) -> None:
        super().__init__(f"{remote}: {reason}")
        self.kind = kind


class Remotes:
    """The remote stores of the daemon."""

    def __init__(self, settings: Config, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._seconds = settings.remote_timeout * _TIMES
        status = connection.demand(protocol.AskStatus(), protocol.Status, settings.timeout)
        self.names = [str(each["name"]) for each in status.remotes]
        if not self.names:
            if settings.has_tiers:
                raise Failure("the daemon has no remote store: it was started with other settings; xcache restart")
            raise Failure(_NONE)
        if problem := other_namespace(settings, status.facts):
            raise Failure(problem)

    def named(self, wanted: str | None) -> list[str]:
        """Return the one store whose address is this or contains it; all of them if none is wanted."""
        if not wanted:
            return self.names
        found = [name for name in self.names if name == wanted] or [name for name in self.names if wanted in name]
        if len(found) != 1:
            listed = "".join(f"\n  {name}" for name in self.names)
            which = "several remote stores match" if found else "no remote store matches"
            raise WrongUsage(f"{which} {printable(wanted)}; there are:{listed}")
        return found

    def check(self, name: str = "") -> commands.RemotesChecked:
        """Have one store, or all of them, asked."""
        asked = commands.CheckRemotes(name, self._seconds)
        return self._connection.demand(asked, commands.RemotesChecked, self._patience)

    def objects(self, name: str, under: str = "") -> Iterator[Object]:
        """Yield the objects whose names begin so."""
        position = 0
        while True:
            asked = commands.AskObjects(name, under, position, self._seconds)
            with _translated(name):
                page = self._connection.demand(asked, commands.Objects, self._patience)
            for each, size, modified_at in page.objects:
                yield Object(name, str(each), int(size or 0), None if modified_at is None else float(modified_at))
            position = page.position
            if not position:
                return

    def described(self, name: str, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield what each of these entries says that it is, with its key."""
        left = list(keys)
        while left:
            asked = commands.DescribeEntries(name, left[: commands.MAX_DESCRIBED], self._seconds)
            with _translated(name):
                answer = self._connection.demand(asked, commands.EntriesDescribed, self._patience)
            yield from answer.entries
            left = left[max(1, len(answer.entries)) :]

    def remove(self, name: str, objects: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Remove objects; yield for each batch how many are done with, and how many were there."""
        left = list(objects)
        while left:
            asked = commands.RemoveObjects(name, left[:_NAMES_AT_ONCE], self._seconds)
            with _translated(name):
                answer = self._connection.demand(asked, commands.ObjectsRemoved, self._patience)
            yield answer.done, answer.removed
            left = left[max(1, answer.done) :]

    def push(self, name: str, *, even_quick: bool) -> list[dict[str, protocol.Scalar]]:
        """Have uploads queued; return the counts for each store."""
        asked = commands.Push(name, even_quick)
        return self._connection.demand(asked, commands.Pushed, self._settings.timeout + _PUSH_SECONDS).remotes

    def waiting(self) -> dict[str, int]:
        """Return how much waits to be uploaded to each store."""
        status = self._connection.demand(protocol.AskStatus(), protocol.Status, self._settings.timeout)
        return {str(each["name"]): int(each["waiting"] or 0) for each in status.remotes}

    @property
    def _patience(self) -> float:
        return self._seconds + self._settings.timeout


class Problems:
    """The trouble with one store; the others are looked at all the same."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []
        self._errors: list[RemoteTroubleError] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note trouble with a store instead of raising it."""
        try:
            yield
        except RemoteTroubleError as error:
            self._errors.append(error)
            self.found.append({"remote": name, "kind": error.kind, "problem": error.message})

    def objects(self, remotes: Remotes, names: Sequence[str]) -> Iterator[Object]:
        """Yield all objects of these stores."""
        for name in names:
            with self.of(name):
                yield from remotes.objects(name)

    def tell(self) -> None:
        """Say on stderr what went wrong, with advice; exit with status 1 unless a store is just not made for it."""
        for error in self._errors:
            note(error.message)
            if error.kind in ADVICE:
                note(ADVICE[error.kind])
        if any(error.kind not in (CANNOT_LIST, READ_ONLY) for error in self._errors):
            click.get_current_context().exit(1)


@contextlib.contextmanager
def asking(settings: Config) -> Iterator[Remotes]:
    """Yield the remote stores of the daemon, which is started if none runs."""
    if not settings.has_tiers and (running := daemon.find(settings)) is None:
        # A daemon that is started now would have none later either.
        raise Failure(_NONE)
    connected = daemon.connect_for_change(settings) if settings.has_tiers else running
    assert connected is not None  # noqa: S101 - it was found above
    with contextlib.closing(connected) as connection:
        yield Remotes(settings, connection)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        if error.kind in (*ADVICE, CANNOT_LIST, READ_ONLY):
            raise RemoteTroubleError(name, error.kind, str(error)) from None
        raise
