"""The findings of a check of the remote stores in words, each with advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from xcache.cli.output import counted, duration
from xcache.cli.remote_asking import ADVICE
from xcache.config.remotes import Remote
from xcache.wire import commands

State = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    """One line: what was looked at (the keys, or the address of a store), how it is, and what to do about it."""

    about: str
    state: State
    found: str
    advice: str = ""


KEYS = "keys"
_OF_BUNDLES = "Is it a file that xcache export made, at the path in XCACHE_BUNDLES? `xcache bundle verify` checks it."
_OF_ABSENT_BUNDLES = "It counts as empty until the file is there, as on a first run. Or correct XCACHE_BUNDLES."

_OF_REJECTED = "`xcache key trust` has the daemon trust a key, and `xcache restart` begins the count anew."


def findings(checked: commands.RemotesChecked) -> Iterator[Finding]:
    """Yield what was found of the keys, and then of each store."""
    yield _of_keys(checked.keys, checked.remotes)
    for remote in checked.remotes:
        yield _of_remote(remote)


def _of_remote(remote: dict[str, Any]) -> Finding:
    name, seconds = str(remote["name"]), duration(remote["seconds"])
    if remote["problem"]:
        is_bundle = Remote(name).is_bundle
        if is_bundle and remote["kind"] == "missing":
            return Finding(name, "note", remote["problem"], _OF_ABSENT_BUNDLES)
        advice = _OF_BUNDLES if is_bundle else ADVICE.get(remote["kind"], "")
        return Finding(name, "wrong", f"{remote['problem']} ({remote['kind']})", advice)
    if remote["rejected"]:
        count = counted(remote["rejected"], "object")
        told = (
            f"it answers in {seconds}; since the daemon began, {count} of it were not used: {remote['last_rejected']}"
        )
        return Finding(name, "note", told, _OF_REJECTED)
    if remote["readonly"]:
        return Finding(name, "ok", f"it answers in {seconds}; it is only read from")
    done = "written" if remote["writeonly"] else "written and read back"
    if remote["not_removed"]:
        advice = "Programs do not need that. `xcache remote rm` and `gc` do: use the store's own rules instead."
        return Finding(
            name, "note", f"{done} in {seconds}, but not removed again: {remote['not_removed']}", advice
        )  # fmt: skip
    return Finding(name, "ok", f"{done.replace(' and', ',')} and removed in {seconds}")


def _of_keys(keys: dict[str, Any], remotes: list[dict[str, Any]]) -> Finding:
    """Return what is found of the keys: which of it matters depends on the stores."""
    by_key = [remote for remote in remotes if remote["trust"] == "keys"]
    writes, reads = (any(not remote[only] for remote in by_key) for only in ("readonly", "writeonly"))
    trusts_nobody = reads and not keys["trusted"]
    nobody = keys["trusted_problem"] or f"no key in {keys['trusted_file']} is trusted"
    if problem := keys["signer_problem"]:
        return Finding(KEYS, "wrong", problem, "Nothing is uploaded until that is corrected.")
    signs = f"{keys['signer']} ({keys['signer_id']}) signs"
    if not keys["signer"]:
        if writes:
            found, advice = "no key signs, so that nothing is uploaded", "Make one: xcache key new NAME"
            if trusts_nobody:
                found += f"; and nothing from there is used: {nobody}"
                advice += "; and trust those of others, and your own: xcache key trust LINE"
            return Finding(KEYS, "wrong", found, advice)
        signs = "no key signs"
    if trusts_nobody:
        return Finding(KEYS, "wrong", f"{signs}; {nobody}", "Nothing from there is used: xcache key trust LINE")
    if problem := keys["trusted_problem"]:
        if keys["trusted"]:
            return Finding(KEYS, "wrong", problem, "Correct the line, or remove it.")
        return Finding(KEYS, "note", f"{signs}; {problem}")
    trusted = f"{signs}; {counted(keys['trusted'], 'key')} trusted"
    if keys["signer"] and reads and (why := keys["why_not_trusted"]):
        advice = 'What this machine signs is not used here when it comes back: xcache key trust "$(xcache key show)"'
        return Finding(KEYS, "note", f"{trusted}, but not its own: {why}", advice)
    return Finding(KEYS, "ok", trusted)
