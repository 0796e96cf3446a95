"""The messages between a program and the daemon; ``commands`` has the command line's, ``framing`` encodes them all.

A frame is a 4-byte big-endian length and a msgpack array ``[request id, message name, fields...]``, with the fields in
the order below. A payload larger than ``INLINE_LIMIT`` travels as a file, with ``None`` in its place. Only the daemon
sends descriptors: it makes the memory file that a client writes a large payload into, and disconnects a client that
sends one. Each end disconnects a peer that breaks a limit.

``Hello`` and ``Welcome`` change only by growing at their end, so that any two versions can find out that they differ.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from xcache.wire import commands

VERSION = 17
Scalar = str | int | float | bool | None
# Up to this size SQLite reads a blob about as fast as a file; above it, a descriptor beats copying through the socket.
INLINE_LIMIT = 32 * 1024
MAX_FRAME = 1024 * 1024
# Files of one Put: its payload and its program.
MAX_FILES = 2
# Files that come with one Prediction.
MAX_PREDICTED_FILES = 8
MAX_TEXT = 16 * 1024
# Bytes of the text of a component of a key.
LONGEST_DESCRIPTION = 16_000
# Bytes of a module's name, or of a reason, that a row of the store keeps. Clients send at most as many characters.
MAX_NAME = 500
MAX_LIST = 4096
MAX_DICTIONARY = 1024
# Lists or dictionaries in one list, elements of each, and all lists and dictionaries of a frame: a frame of a million
# takes long to decode and to check.
MAX_ROWS, MAX_FIELDS, MAX_CONTAINERS = 2048, 16, 5000
# Entries in one answer to AskEntries.
MAX_LISTED = 400
# Runs in one answer to AskRuns, and rows in one to AskLedger.
MAX_LISTED_RUNS, MAX_LISTED_ROWS = 100, 60
# Programs in one Seen, what they do, and misses; and characters of each text in them.
MAX_SEEN_PROGRAMS, MAX_SEEN_DOING, MAX_SEEN_MISSES, MAX_SEEN_TEXT = 100, 200, 50, 120
# Keys in the list of what one run wanted.
MAX_WANTED = 2000
# Bytes of an alias's facts: without the record of a call, unless a name is very long, and with one.
MAX_FACTS, MAX_RECORD = 256, 64 * 1024
# Structures that one Prediction may name, and the bytes of each.
MAX_STRUCTURES, STRUCTURE_BYTES = 4096, 8
# Aliases in one RememberAliases, and the bytes of their facts.
MAX_ALIASES, MAX_ALIAS_BYTES = 500, 512 * 1024
# Files in the store's folder that both ends know.
LOCK, DATABASE, LOG = "daemon.lock", "store.db", "daemon.log"
MOST_LOCK_BYTES = 8192
# A daemon that is started reports one of these, on a line of its own, to the process that started it.
READY, FAILED = "ready", "failed: "
# The function that `xcache doctor` has compiled; its entries are removed again.
TRIAL = "xcache_doctor"
# The reason in a mark which means that the executable must be serialized early, not that it cannot be.
SERIALIZE_FIRST = "it can only be serialized before it runs"
# The kind of a refusal: the reader's processes have crashed while they loaded these very bytes.
SET_ASIDE = "set aside"
# The components of a key that are stored with a readable text; the program is stored whole.
DESCRIBED_COMPONENTS = ("options", "flags", "platform", "toolchain")


class InstalledFile(NamedTuple):
    """A file of a toolchain: stat values that show whether it changed, and its content's digest."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    digest: str


class Hello(NamedTuple):
    """The first message of a connection: the client names itself."""

    protocol: int
    version: str
    pid: int
    program: str


class Welcome(NamedTuple):
    """The daemon's answer to Hello, even if the two versions cannot talk to each other.

    ``remotes`` are the addresses of the remote stores and bundles that it was started with, and ``namespace`` is what
    it calls its objects there; None if it does not say. ``settings`` are those that it has now, as text, and
    ``problems`` say what keeps it from sharing entries.
    """

    protocol: int
    version: str
    pid: int
    directory: str
    remotes: list[str] | None = None
    namespace: str | None = None
    settings: dict[str, str] | None = None
    problems: list[str] | None = None


class Get(NamedTuple):
    """Ask for the executable of a key. ``wait`` is how many seconds to wait for another client's compile, 0 for none.

    ``unusable`` is the digest of an entry that the client got before and could not use, or "".
    """

    key: str
    wait: float
    module_name: str
    program_digest: str
    unusable: str = ""


class Found(NamedTuple):
    """The entry: its digest, size and compile time, and its bytes (or a descriptor).

    ``seconds`` is what the daemon took to find it; 0 if the client has waited for it. ``offset`` is where the bytes
    begin in the descriptor's file.
    """

    digest: str
    stored_size: int
    compile_seconds: float
    payload: bytes | None
    seconds: float = 0.0
    offset: int = 0


class Missing(NamedTuple):
    """There is no entry. With a lease (not 0), the client compiles it for all clients that ask from now on.

    ``cause`` is one of ``ledger.CAUSES``, or empty. ``nearest`` is the key of the newest entry of the same
    program, with the digests of its options, flags, platform and toolchain; or else that of the same name; or None.
    ``seconds`` is the time the daemon took to look; 0 if the client has waited.
    """

    lease: int
    cause: str = ""
    nearest: list[str] | None = None
    seconds: float = 0.0


class Wait(NamedTuple):
    """Another process is compiling it: since when, and how long the answer may still take. More such may follow."""

    pid: int
    program: str
    seconds: float
    at_most: float


class Release(NamedTuple):
    """The holder of a lease will not store anything, so the next in line may compile. No answer."""

    key: str
    lease: int


class Loading(NamedTuple):
    """The client begins to load an entry, perhaps ``ahead`` of the program's request. No answer.

    If the process crashes before the next message on this connection, the load may be the reason. A second Loading ends
    the load before it, as Loaded does.
    """

    key: str
    digest: str
    ahead: bool


class Loaded(NamedTuple):
    """The load is over, with an executable or without, and the process lives. No answer."""


class Complain(NamedTuple):
    """The client could not use the entry of this key, and has compiled the same program since.

    The daemon checks by itself whether the bytes are damaged. ``whole`` means that they match their digest, but jaxlib
    did not load them.
    """

    key: str
    digest: str
    reason: str
    whole: bool


class Announce(NamedTuple):
    """A toolchain is installed here: path, size, mtime_ns, inode and digest of each file."""

    toolchain: str
    platform: str
    jaxlib_version: str
    description: str
    files: list[dict[str, Scalar]]


class Predict(NamedTuple):
    """Ask for the entries that a program of this name and digest of arguments will probably want."""

    program: str
    arguments: str


class Prediction(NamedTuple):
    """The items that a program of this name wanted last time, in order, as in Remember.

    ``made_with`` in an item is an index into the list ``made_with``, which holds digests of the flags, platform and
    toolchain that the entry was made with. The first entries come along: their items have ``digest``, ``stored_size``,
    ``compile_seconds`` and ``offset``, small payloads are in ``payloads`` by key, and a descriptor follows for each key
    in ``files``. ``aliases`` has the newest aliases of the entries' programs, each as the fields of Alias.
    ``structures`` has the first bytes of each structure of which there is any alias, one after the other; None if there
    are too many. So a client need not ask for the others.
    """

    items: list[dict[str, Scalar]]
    options: dict[str, bytes]
    payloads: dict[str, bytes]
    files: list[str]
    made_with: list[str]
    aliases: list[list[str | bytes]]
    structures: bytes | None


def beginning(structure: str) -> bytes:
    """Return the first bytes of a structure, as in ``Prediction.structures``."""
    return bytes.fromhex(structure[: 2 * STRUCTURE_BYTES])


class Remember(NamedTuple):
    """The items that this program wanted, in order: key, options (a digest), devices, platform, seconds to load."""

    program: str
    arguments: str
    items: list[dict[str, Scalar]]
    options: dict[str, bytes]


class AskAlias(NamedTuple):
    """Ask which program a jaxpr of this structure (a digest) was lowered to."""

    structure: str


class Alias(NamedTuple):
    """A jaxpr of this structure was lowered to this program (digests); ``facts`` are the client's own.

    ``seal`` is made of the others by the client that wrote the alias, and checked by the one that reads it.
    """

    structure: str
    program: str
    facts: bytes
    seal: str


class NoAlias(NamedTuple):
    """There is no alias of this structure that the client may use, or no entry of its program."""


class RememberAliases(NamedTuple):
    """Keep these aliases, each as the fields of Alias, in place of the client's own of the same structures.

    The daemon leaves out aliases of programs for which the client could get no entry.
    """

    aliases: list[list[str | bytes]]


class DropAlias(NamedTuple):
    """Forget the client's own alias of this structure: it was found to be wrong."""

    structure: str


class NotCacheable(NamedTuple):
    """No entry can exist for this key, for this reason."""

    reason: str


class MarkNotCacheable(NamedTuple):
    """Have the daemon remember that the executable of this key cannot be stored."""

    key: str
    module_name: str
    reason: str


class AskFiles(NamedTuple):
    """Ask for memory files for the large contents of the next Put; earlier ones are dropped."""

    files: int


class Files(NamedTuple):
    """The memory files, as descriptors with this message; the client writes and seals them before the Put."""


class Put(NamedTuple):
    """Store this executable; ``program`` is the canonical StableHLO it was compiled from.

    A content that is None is in a file asked for on the same connection: first the payload, then the program.
    """

    key: str
    overwrite: bool
    module_name: str
    platform: str
    device_kind: str
    jaxlib_version: str
    codec: str
    raw_size: int
    compile_seconds: float
    digest: str
    stored_size: int
    program_digest: str
    program_raw_size: int
    program_stored_digest: str
    program_stored_size: int
    components: dict[str, str]
    details: dict[str, str]
    payload: bytes | None
    program: bytes | None

    @property
    def files(self) -> int:
        """The number of its contents that are in files."""
        return (self.payload is None) + (self.program is None)


class Stored(NamedTuple):
    """The entry is safe on disk; ``kept`` is false if an earlier one was there and stays."""

    kept: bool


class Report(NamedTuple):
    """Add a client's counts since its last report to the statistics."""

    counts: dict[str, int | float]


class RecordRun(NamedTuple):
    """Keep these rows of a run's ledger, each as the fields of ``ledger.Row``, in place of those of the same positions.

    ``began_at`` is when the process began, in seconds since 1970. ``facts`` describe the process, by name. The daemon
    keeps what came last.
    """

    run: str
    began_at: float
    ended: bool
    facts: dict[str, str]
    rows: list[list[int | str]]


class AskStatus(NamedTuple):
    """Ask for the daemon's status."""


class Status(NamedTuple):
    """The daemon's status: facts by name, the compiles in progress, and the remote stores."""

    facts: dict[str, Scalar]
    compiles: list[dict[str, Scalar]]
    remotes: list[dict[str, Scalar]]


class Done(NamedTuple):
    """The request was carried out."""


class Refused(NamedTuple):
    """The request was refused: a kind for statistics, and a reason for people."""

    kind: str
    reason: str


OfPrograms = (
    Hello | Welcome | Get | Found | Missing | Wait | Release | Loading | Loaded | Complain | Announce
    | Predict | Prediction | Remember | AskAlias | Alias | NoAlias | RememberAliases | DropAlias
    | NotCacheable | MarkNotCacheable | AskFiles | Files | Put | Stored | Report | RecordRun | AskStatus | Status
    | Done | Refused
)  # fmt: skip
if TYPE_CHECKING:
    Message = OfPrograms | commands.Message


def __getattr__(name: str) -> Any:
    """Return the type of all messages, with the command line's, which programs never import: they take 4 ms."""
    if name != "Message":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xcache.wire import commands

    return OfPrograms | commands.Message


def path_text(path: Path) -> str:
    """Return a path as text, with escapes for bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
