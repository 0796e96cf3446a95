"""Read a bundle for the command line: its objects, whether they are whole, and who signed them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from xcache.cli import Failure
from xcache.cli.output import counted, note
from xcache.config.config import Config
from xcache.errors import DamagedError, SignatureError
from xcache.wire import parcel, protocol, runs, signed_header
from xcache.wire.bundles import Bundle, Part
from xcache.wire.names import Names
from xcache.wire.trusted_keys import TrustedKeys

_NAMESPACE = re.compile(r"v1/(?:all|in-([^/]+))/")
_MOST_TOLD = 10
# Nobody is trusted: all objects look alike.
NOBODY = TrustedKeys(Path(), frozenset(), [], "", ())


class Object(NamedTuple):
    """An object of a bundle: an entry, or what a program wanted; with what is wrong with it."""

    name: str
    content: bytes
    # The id of the key that should have signed it; empty if none is named.
    signer: str
    entry: parcel.Parcel | None = None
    history: protocol.Remember | None = None
    problem: str = ""
    # Whether bytes of it are not as they were written; otherwise the problem is who signed it.
    is_damaged: bool = False

    @property
    def shown(self) -> str:
        """The part of its name that people know."""
        return self.name.rpartition("/")[2][:12]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """Yield an open bundle."""
    try:
        bundle = Bundle(path)
    except DamagedError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    with contextlib.closing(bundle):
        yield bundle


def namespace_of(bundle: Bundle) -> str:
    """Return the namespace of a bundle's objects."""
    found = {_NAMESPACE.match(name) for name, _ in bundle.names()}
    names = {each[1] or "" for each in found if each}
    if None in found or len(names) > 1:
        raise Failure(f"{bundle.path} is damaged: names in it are not those of one namespace")
    return names.pop() if names else ""


def executable_in(content: bytes, key: str, namespace: str) -> Part:
    """Return where the executable is in an entry; raise DamagedError if the daemon made no such entry."""
    entry = parcel.unpack(content, key, namespace, NOBODY, time.time(), len(content), trust_unsigned=True)
    behind = 0 if entry.program is None else len(entry.program)
    return Part(entry.put.digest, len(content) - behind - len(entry.payload), len(entry.payload))


def objects(bundle: Bundle, trusted: TrustedKeys, *, trust_unsigned: bool) -> Iterator[Object]:
    """Yield the objects, each checked: entries first. Damage is found whoever signed them, and said before that."""
    namespace = namespace_of(bundle)
    names, now = Names(namespace), time.time()

    def entry(name: str, content: bytes, by: TrustedKeys, *, unsigned: bool) -> dict[str, Any]:
        key = name.rpartition("/")[2]
        if name != names.entry(key):
            raise DamagedError("its name is not one of an entry")
        return {"entry": parcel.unpack(content, key, namespace, by, now, len(content), trust_unsigned=unsigned)}

    def history(name: str, content: bytes, by: TrustedKeys, *, unsigned: bool) -> dict[str, Any]:
        found = [
            runs.unpack(part, None, namespace, by, now, trust_unsigned=unsigned) for part in runs.parts_of(content)
        ]
        wanted = {(each.run.history.program, each.run.history.arguments) for each in found}
        if [names.run(*each) for each in wanted] != [name]:
            raise DamagedError("it belongs to another program")
        return {"history": found[0].run.history}

    def checked(name: str, read: Callable[..., dict[str, Any]]) -> Object:
        content = bundle.get(name) or b""
        signer = signed_header.signer_of(memoryview(content)[8 * (read is history) :])
        try:
            try:
                return Object(name, content, signer, **read(name, content, trusted, unsigned=trust_unsigned))
            except SignatureError as error:
                # Its bytes were not looked at yet.
                read(name, content, NOBODY, unsigned=True)
                return Object(name, content, signer, problem=str(error))
        except DamagedError as error:
            return Object(name, content, signer, problem=str(error), is_damaged=True)

    for name, _ in bundle.names(names.entries):
        yield checked(name, entry)
    for name, _ in bundle.names(names.runs):
        yield checked(name, history)


def tell_problems(found: Iterable[Object], settings: Config) -> int:
    """Say on stderr what is wrong, a line for each reason, damage first; return how many objects that were."""
    damaged: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    for each in found:
        if each.problem:
            (damaged if each.is_damaged else others).setdefault(each.problem, []).append(each.shown)
    for by_reason, said in ((damaged, " damaged"), (others, "")):
        for reason, names in by_reason.items():
            some = ", ".join(names[:_MOST_TOLD]) + (", ..." if len(names) > _MOST_TOLD else "")
            note(f"{counted(len(names), 'object')}{said}: {reason} ({some})")
    if damaged:
        # No option of import takes such a file, so that advice about keys would lead nowhere.
        note("export or copy the file again: `xcache import` takes nothing from a damaged one")
    elif any("nobody has signed" in reason for reason in others):
        note("`xcache import --unsigned` takes it all the same, if you vouch for the file")
    if not damaged and any("is not in" in reason or "does not exist" in reason for reason in others):
        note(f"`xcache key trust` adds a key to {settings.trusted_keys}")
    return sum(map(len, (*damaged.values(), *others.values())))
