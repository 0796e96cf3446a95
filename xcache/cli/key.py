"""``xcache key``: the key that signs what leaves this machine, and the keys whose signatures count here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from xcache.cli import Failure, Group, WrongUsage
from xcache.cli.key_files import Keys, write_private_key
from xcache.cli.output import Column, emit, json_option, note, print_line, print_table, printable
from xcache.config import config
from xcache.wire.signatures import PRIVATE, PUBLIC, PublicKey, checked_name, new_key
from xcache.wire.trusted_keys import MOST_BYTES, Line, TrustedKey, parse, parse_date, today


@click.group(cls=Group)
def key() -> None:
    """Sign what is shared between machines, and say whose signatures count.

    Entries that leave the machine are signed with a private key. Those from elsewhere are used only if a key of the
    list signed them: whoever owns such a key can run code here. XCACHE_SIGNING_KEY and XCACHE_TRUSTED_KEYS say where
    they are.
    """


@key.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Replace the key that is there.")
@json_option
def new(name: str, force: bool, as_json: bool) -> None:
    """Make a private key, with which the daemon here signs from now on, and print the public one.

    NAME tells people whose key it is. The private key is a file that only its owner can read; nothing prints it. Others
    trust the public key by `xcache key trust`, and so does this machine, if it is to use what it signed itself.

    \b
    JSON: {"name": str, "id": str, "key": str (the line for `xcache key trust`), "file": str (with the private key),
           "replaced": str (the id of the key before; empty if there was none, or none that can be read)}
    """
    settings = config.load()
    source = settings.signing_key
    if not source.startswith("/"):
        raise Failure(
            f"signing_key is {source!r} ({settings.sources['signing_key']}), which is not a file; to make a key in one:"
            " XCACHE_SIGNING_KEY=/path xcache key new NAME"
        )
    made = new_key(checked_name(name))
    before = Keys(settings).signer_if_usable()
    path = Path(source)
    try:
        write_private_key(path, made, settings.daemon_uid(), replace=force)
    except FileExistsError:
        raise Failure(f"{path} has a key already; --force replaces it, and changes nothing of who trusts it") from None
    if as_json:
        replaced = before.id if before else ""
        emit(_told(made.public) | {"file": str(path), "replaced": replaced})
        return
    print_line(str(made.public))
    note(f"{path} holds the private key; to trust what it signs: xcache key trust '{made.public}'")
    if before:
        note(f"the key {before.id} ({before.name}) signs nothing here any more; where it is trusted, it stays so")


@key.command()
@json_option
def show(as_json: bool) -> None:
    """Print the public key of the daemon here, a line for `xcache key trust` elsewhere.

    \b
    JSON: {"name": str, "id": str, "key": str (that line), "source": str (where the private key comes from)}
    """
    keys = Keys(config.load())
    public = keys.signer()
    if public is None:
        raise Failure("no key signs here; xcache key new NAME makes one")
    if as_json:
        emit(_told(public) | {"source": keys.settings.signing_key})
    else:
        print_line(str(public))


@key.command()
@click.argument("lines", metavar="LINE|FILE|-", nargs=-1, required=True)
@click.option("--expires", metavar="DATE", help="Trust it to the end of this day (UTC), such as 2027-01-31.")
@json_option
def trust(lines: tuple[str, ...], expires: str | None, as_json: bool) -> None:
    """Trust the owner of a public key: let everything that it signs run here.

    The key is the LINE that `xcache key show` prints, or comes from a FILE or the standard input (-) with one or more
    such lines. Make sure that it came from its owner unaltered. A key that was revoked stays so.

    \b
    JSON: {"trusted": [{"name": str, "id": str, "key": str, "expires": str}] (that were not trusted so before),
           "already": int (that were), "file": str (the list)}
    """
    keys = Keys(config.load())
    day = _day(expires)
    found = _given(lines)
    wanted = [one._replace(expires=day or one.expires) for one in found]
    for one in wanted:
        if one.state(time.time()) == "expired":
            raise Failure(f"the key {one.public.id} ({one.public.name}) would be trusted until {one.expires}: too late")
    added = keys.trust(wanted, time.time())
    if as_json:
        told = [_told(one.public) | {"expires": str(one.expires or "")} for one in added]
        emit({"trusted": told, "already": len(wanted) - len(added), "file": str(keys.path)})
        return
    for one in added:
        until = f" until {one.expires}" if one.expires else ""
        print_line(f"{one.public.id} ({one.public.name}) is trusted{until}: what it signs may run here")
    if already := len(wanted) - len(added):
        print_line(f"trusted already: {already}")


@key.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Show which keys are trusted here, which are not any more, and which one signs.

    \b
    JSON: {"file": str (the list), "keys": [{"name": str, "id": str, "key": str, "expires": str, "revoked": str,
           "state": "trusted", "expired", "revoked", "malformed" or "not trusted", "signs": bool (here)}],
           "problems": [str] (why the list, a line of it, or the signing key is not used)}

    Exit status 1 if there is any problem.
    """
    keys = Keys(config.load())
    rows = _rows(keys)
    problems = keys.problems()
    if as_json:
        emit({"file": str(keys.path), "keys": rows, "problems": problems})
    elif rows:
        columns = [
            Column("id", lambda row: row["id"]),
            Column("name", lambda row: row["name"], cut=True),
            Column("state", _state),
            Column("signs here", lambda row: "yes" if row["signs"] else ""),
        ]
        print_table(columns, rows)
    else:
        print_line("no key is trusted, and none signs here")
    for problem in problems:
        note(problem)
    if problems:
        click.get_current_context().exit(1)


@key.command()
@click.argument("name")
@json_option
def revoke(name: str, as_json: bool) -> None:
    """Stop trusting a key at once, whenever it signed; its line stays in the list, so that nobody trusts it again.

    NAME is the key's name or its id, or the first digits of that, at least four.

    \b
    JSON: {"revoked": {"name": str, "id": str, "key": str}, "already": bool, "file": str (the list)}
    """
    keys = Keys(config.load())
    one = _one(keys.usable(), name, keys.path)
    already = one.revoked is not None
    if not already:
        keys.revoke(one.public, today(time.time()))
    if as_json:
        emit({"revoked": _told(one.public), "already": already, "file": str(keys.path)})
        return
    told = f"{one.public.id} ({one.public.name})"
    print_line(f"{told} was revoked on {one.revoked} already" if already else f"{told} is revoked")
    signer = keys.signer_if_usable()
    if signer is not None and signer.raw == one.public.raw:
        note("this machine still signs with it; to make another: xcache key new NAME --force")


def _told(public: PublicKey) -> dict[str, Any]:
    return {"name": public.name, "id": public.id, "key": str(public)}


def _day(text: str | None) -> date | None:
    day = parse_date(text) if text else None
    if text and day is None:
        raise WrongUsage(f"--expires {text!r} is not a day such as 2027-01-31")
    return day


def _given(words: Sequence[str]) -> list[TrustedKey]:
    """Return the keys of a line, which may come as several words, of a file, or of the standard input."""
    text = " ".join(words)
    # A private key by mistake is not taken for a file's name, which would be repeated.
    is_file = len(words) == 1 and PUBLIC not in text and PRIVATE not in text
    lines = parse(_read(text) if is_file else os.fsencode(text))
    for line in lines:
        _refuse(line)
    found = [line.key for line in lines if line.key]
    if not found:
        raise Failure(f"there is no line NAME {PUBLIC}... in it")
    return found


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read(MOST_BYTES)
    try:
        with open(name, "rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        why = f"it is no line NAME {PUBLIC}..., and no file that can be read: {error.strerror}"
        raise Failure(
            f"{printable(name)!r} names no key to trust: {why}; `xcache key show` prints such a line"
        ) from None


def _refuse(line: Line) -> None:
    if line.problem:
        raise Failure(f"that is no line to trust: {line.problem}")
    if line.key is not None and line.key.revoked is not None:
        raise Failure(f"the line says that {line.key.public.name} was revoked; nothing is trusted")


def _rows(keys: Keys) -> list[dict[str, Any]]:
    signer, now = keys.signer_if_usable(), time.time()
    rows = []
    for one in keys.trusted.keys:
        state = one.state(now)
        if state == "trusted" and keys.trusted.why_not(one.public.id, now):
            state = "malformed"
        signs = signer is not None and signer.raw == one.public.raw
        days = {"expires": str(one.expires or ""), "revoked": str(one.revoked or "")}
        rows.append(_told(one.public) | days | {"state": state, "signs": signs})
    if signer is not None and not any(row["signs"] for row in rows):
        rows.append(_told(signer) | {"expires": "", "revoked": "", "state": "not trusted", "signs": True})
    return rows


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "trusted" and row["expires"]:
        return f"trusted until {row['expires']}"
    return f"{row['state']} {row['revoked'] if row['state'] == 'revoked' else ''}".strip()


def _one(listed: Sequence[TrustedKey], name: str, path: Path) -> TrustedKey:
    """Return the key of this name or id; of several of one name, the one that is not revoked."""
    found = [one for one in listed if one.public.name == name]
    if not found and len(name) >= 4:
        found = [one for one in listed if one.public.id.startswith(name.lower())]
    if len(found) > 1:
        found = [one for one in found if one.revoked is None] or found[:1]
    if len(found) > 1:
        ids = " or ".join(one.public.id for one in found)
        raise Failure(f"{len(found)} keys could be meant by {name!r}; say {ids}")
    if not found:
        raise Failure(f"{path} has no key of the name or id {name!r}, so that none such is trusted")
    return found[0]
