"""Checks of what comes from elsewhere: texts of components, aliases, and what a program wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xcache.errors import ProtocolError
from xcache.wire import framing, protocol
from xcache.wire.hashing import digest, is_digest

_MOST_OPTIONS_BYTES = 1 << 18
_LONGEST_VALUE = 5000
FIELDS_OF_ITEM = {"key": str, "options": str, "devices": str, "platform": str, "seconds": float}


def is_text_of(text: str | None, component: str) -> bool:
    """Return whether a text is that of a component, whoever says so: the component's name is its digest."""
    return text is not None and digest(text.encode("utf-8", "surrogatepass")) == component


def proven_texts(components: Mapping[str, str], texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return those of these names and texts that are the components' own."""
    names = [name for name in protocol.DESCRIBED_COMPONENTS if name in components]
    return {
        name: text
        for name, text in texts
        if name in names and is_text_of(text, components[name]) and len(text.encode()) <= protocol.LONGEST_DESCRIPTION
    }


def alias_of(fields: list[Any]) -> protocol.Alias | None:
    """Return the alias that has these fields, or None if there can be no such alias."""
    try:
        alias = protocol.Alias(*fields)
        framing.check(alias)
    except (TypeError, ProtocolError):
        return None
    digests = alias.structure, alias.program, alias.seal
    return alias if all(map(is_digest, digests)) and len(alias.facts) <= protocol.MAX_RECORD else None


def is_sound(message: protocol.Remember) -> bool:
    """Return whether a client's list is within the limits and well formed."""
    return (
        len(message.items) <= protocol.MAX_WANTED
        and sum(map(len, message.options.values())) <= _MOST_OPTIONS_BYTES
        and all(is_item(item, message.options) for item in message.items)
    )


def is_item(item: dict[str, Any], options: Sequence[str] | dict[str, bytes]) -> bool:
    """Return whether an item of a list is well formed; ``options`` has what it may refer to."""
    types = {name: type(value) for name, value in item.items()}
    are_short = all(len(str(value)) < _LONGEST_VALUE for value in item.values())
    return types == FIELDS_OF_ITEM and item["options"] in options and are_short
