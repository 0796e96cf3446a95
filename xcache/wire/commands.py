"""The messages between the command line and the daemon, beside those of programs in ``protocol``."""

from typing import NamedTuple

from xcache.wire.protocol import Scalar

# Keys in one AskPresence or Fetch: looking for so many takes the serving thread a few milliseconds.
MAX_KEYS = 100
# The states of a key in Presence: in the store, in a remote store, in neither; or a remote store could not be asked.
HERE, REMOTE, MISSING, UNKNOWN = PRESENCES = ("here", "remote", "missing", "unknown")
# The kind of a refusal: so much of an import waits that an EndImport has to come first.
IMPORT_FULL = "import full"
# Entries in one EntriesDescribed.
MAX_DESCRIBED = 100
# The states of an entry there: a key that is trusted now has signed it (or nobody need sign it there); nobody trusted
# has; it is not as it was written; the store does not give it; it has gone.
OK, NOT_TRUSTED, DAMAGED, UNREADABLE, GONE = STATES = ("ok", "not trusted", "damaged", "unreadable", "gone")


class AskRuns(NamedTuple):
    """Ask for the client's own runs that were recorded before the one of this number, the latest first; 0 for the last.

    An administrator of the daemon gets the runs of all users.
    """

    before: int


class Runs(NamedTuple):
    """The runs, each with the columns of the table ``runs``, as many as fit; none after the last."""

    runs: list[dict[str, Scalar]]


class AskLedger(NamedTuple):
    """Ask for the rows of a run's ledger from this position on; ``run`` is the number in ``Runs``."""

    run: int
    position: int


class LedgerRows(NamedTuple):
    """The rows, each as the fields of ``ledger.Row``, as many as fit; none after the last."""

    rows: list[list[int | str]]


class Remove(NamedTuple):
    """Delete the entries of these keys; the daemon records the reason, if any."""

    keys: list[str]
    reason: str = ""


class Clear(NamedTuple):
    """Delete every entry."""


class Removed(NamedTuple):
    """The numbers of entries and bytes that were removed."""

    entries: int
    bytes: int


class Pin(NamedTuple):
    """Keep the entries of these keys, whatever the limits say."""

    keys: list[str]


class Unpin(NamedTuple):
    """End the pin of the entries of these keys, so that the limits apply to them again."""

    keys: list[str]


class Pinned(NamedTuple):
    """The entries changed, those that were so already, and the entries and bytes that the client has pinned.

    An administrator of the daemon gets the counts of all users.
    """

    entries: int
    already: int
    all_entries: int
    all_bytes: int


class AskEntries(NamedTuple):
    """Ask for the client's own entries whose keys begin with ``prefix``, after the one of key ``after`` and ``writer``.

    An administrator of the daemon gets the entries of all users.
    """

    prefix: str
    after: str
    writer: int


class Entries(NamedTuple):
    """The entries, ordered by key and writer; exactly ``MAX_LISTED`` of them if there are more."""

    entries: list[dict[str, Scalar]]


class AskProgram(NamedTuple):
    """Ask for the program and the components of an entry that the client may load."""

    key: str


class StoredProgram(NamedTuple):
    """An entry's key, name, program and components; their texts; the program's content, or a file that comes along.

    ``blob`` is the content's digest, ``sizes`` has the size of the program that is compressed in it.
    """

    entry: dict[str, Scalar]
    texts: dict[str, str]
    blob: str
    sizes: dict[str, int]
    content: bytes | None


class CollectGarbage(NamedTuple):
    """Enforce every limit now, delete unreferenced files, and return the database's free pages to the disk."""


class Collected(NamedTuple):
    """The entries, bytes and files that were removed, entries by reason, and the bytes the database gave back."""

    entries: int
    bytes: int
    files: int
    reasons: dict[str, int]
    given_back: int


class Sync(NamedTuple):
    """Write all pending changes to the database and enforce the limits, so that a reader sees the current state."""


class ZeroStatistics(NamedTuple):
    """Reset the statistics."""


class Watch(NamedTuple):
    """Ask for a Seen twice a second, until the connection ends; a client that reads too slowly gets fewer."""


class Seen(NamedTuple):
    """The state of the daemon at this moment, and what has happened since the last Seen, or since the Watch.

    ``facts`` describe the daemon and the store, and count. ``programs`` are the connected processes, and ``doing`` what
    they compile, wait for and load. ``missed`` are rows of ledgers, of what was compiled; a row may come again when it
    has changed. Only an administrator of the daemon gets more than numbers about other users' programs.
    """

    facts: dict[str, Scalar]
    programs: list[dict[str, Scalar]]
    doing: list[dict[str, Scalar]]
    missed: list[dict[str, Scalar]]


class CheckRemotes(NamedTuple):
    """Have a remote store, or each one if the name is empty, asked now; it may take so many seconds.

    A small object is written, read back and removed; what may only be read is read.
    """

    remote: str
    seconds: float


class RemotesChecked(NamedTuple):
    """How each remote store did, and what is known of the key that signs here and of those that are trusted."""

    remotes: list[dict[str, Scalar]]
    keys: dict[str, Scalar]


class AskObjects(NamedTuple):
    """Ask for objects of a remote store in the daemon's namespace, within so many seconds.

    ``under`` is the beginning of their names; ``position`` is 0, or that of the last answer, for the objects after it.
    """

    remote: str
    under: str
    position: int
    seconds: float


class Objects(NamedTuple):
    """Some objects, each with name, size and when it was written (None: it is not known); position 0: those were all.

    There may be none although more come.
    """

    objects: list[list[str | int | float | None]]
    position: int


class DescribeEntries(NamedTuple):
    """Ask what these entries of a remote store say that they are, as many as can be looked at within so many seconds.

    Only the beginning of each object is read.
    """

    remote: str
    keys: list[str]
    seconds: float


class EntriesDescribed(NamedTuple):
    """The facts of the keys that were looked at, from the first on, each with a ``state``, one of ``STATES``.

    One that is ok or not trusted has facts of its header: module_name, platform, jaxlib_version, toolchain,
    compile_seconds, size (of the object) and signer (the id of a key). ``problem`` says why one is not ok.
    """

    entries: list[dict[str, Scalar]]


class RemoveObjects(NamedTuple):
    """Remove objects of these names, as ``Objects`` has them, as many as can be within so many seconds."""

    remote: str
    names: list[str]
    seconds: float


class ObjectsRemoved(NamedTuple):
    """How many of the names are done with, from the first on, and how many of these objects were there."""

    done: int
    removed: int


class Push(NamedTuple):
    """Queue what the store has and may share for a remote store, or for all if the name is empty.

    ``even_quick``: also entries that compiled faster than the setting demands.
    """

    remote: str
    even_quick: bool


class Pushed(NamedTuple):
    """For each remote store that takes uploads, how many entries and runs were queued, and how many had no room."""

    remotes: list[dict[str, Scalar]]


class AskHistory(NamedTuple):
    """Ask what a program of the client wanted: at position 0, or at that of the last answer."""

    position: int


class WantedBefore(NamedTuple):
    """The keys that a program wanted with these arguments (a digest), and the next position; 0: that was the last.

    Without a program there is none.
    """

    program: str
    arguments: str
    keys: list[str]
    position: int


class ExportEntry(NamedTuple):
    """Ask for an entry that the client may load in its signed form, perhaps with its StableHLO.

    ``unsigned``: nobody needs to sign it.
    """

    key: str
    programs: bool
    unsigned: bool


class ExportHistory(NamedTuple):
    """Ask for what a program of the client wanted with these arguments in the signed form, with aliases."""

    program: str
    arguments: str
    unsigned: bool


class Exported(NamedTuple):
    """The signed form; in a file that comes along if it is large (None)."""

    content: bytes | None
    size: int


class ImportEntry(NamedTuple):
    """Store an entry of another machine in its signed form, which is in a file if it is None, with the next EndImport.

    ``unsigned``: the client vouches for it if no key that the daemon knows has signed it; it is stored as the client's.
    """

    key: str
    unsigned: bool
    content: bytes | None
    size: int

    @property
    def files(self) -> int:
        """The number of its contents that are in files."""
        return int(self.content is None)


class ImportHistory(NamedTuple):
    """Remember what a program wanted elsewhere, as ``ImportEntry`` stores an entry."""

    program: str
    arguments: str
    unsigned: bool
    content: bytes | None
    size: int

    @property
    def files(self) -> int:
        """The number of its contents that are in files."""
        return int(self.content is None)


class EndImport(NamedTuple):
    """Store all that this connection has sent to be imported since the last EndImport, or nothing of it."""


class Imported(NamedTuple):
    """The entries that were stored, their bytes, and the programs whose wants were remembered."""

    entries: int
    bytes: int
    programs: int


class AskPresence(NamedTuple):
    """Ask which of these keys, ``MAX_KEYS`` at most, the client would find an entry of.

    What the store does not have, the remote stores are asked for, within so many seconds. Nothing is fetched, and no
    use is counted.
    """

    keys: list[str]
    seconds: float


class Fetch(NamedTuple):
    """Have the entries of these keys, ``MAX_KEYS`` at most, brought here from the remote stores.

    It may take so many seconds; what has come by then stays.
    """

    keys: list[str]
    seconds: float


class Presence(NamedTuple):
    """The answer to AskPresence and Fetch: for each key a state, the name of a remote store, and a reason.

    The state is one of ``PRESENCES``. ``problems`` has the remote stores that could not be asked, each with the reason.
    """

    entries: list[list[str]]
    problems: dict[str, str]


class Stop(NamedTuple):
    """Finish the requests in progress and exit; the connection ends when that is done."""

    reason: str


Message = (
    AskRuns | Runs | AskLedger | LedgerRows | Remove | Clear | Removed | Pin | Unpin | Pinned | AskEntries | Entries
    | AskProgram | StoredProgram | CollectGarbage | Collected | Sync | ZeroStatistics | Watch | Seen
    | CheckRemotes | RemotesChecked | AskObjects | Objects | RemoveObjects | ObjectsRemoved | Push | Pushed
    | DescribeEntries | EntriesDescribed
    | AskHistory | WantedBefore | ExportEntry | ExportHistory | Exported | ImportEntry | ImportHistory
    | EndImport | Imported
    | AskPresence | Fetch | Presence | Stop
)  # fmt: skip
