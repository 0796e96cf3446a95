"""Take folders, the arguments of programs and the names of hosts out of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_GONE = "\N{HORIZONTAL ELLIPSIS}"
_MOST_WORDS = 1000
_PATH = re.compile(r"(?<![\w.<\u2026])(?:~|\.{1,2})?(?:/[^\s/\"'`,:;=()\[\]{}<>]+)+/?")
# A place in the user's code, as sentences about a miss have it: relative to where the report is made.
_PLACE = re.compile(r"\((?:[^()\n]|\([^()\n]*\))*/([^/()\n]+:\d+\))")


class Redaction:
    """Replaces folders that are known, and whatever else looks like a path."""

    def __init__(self, folders: Iterable[str], words: Iterable[str]) -> None:
        """``folders`` may hold spaces, which no pattern can find; ``words`` are hosts and arguments."""
        known = {folder.rstrip("/") for folder in folders if folder.strip("/")}
        # The longest first, since one may contain another.
        self._folders = sorted(known, key=len, reverse=True)
        # A number is no secret by itself, and stands in every shape.
        secret = {word for word in words if len(word) > 2 and not word.replace(".", "").isdigit()}
        longest = "|".join(re.escape(word) for word in sorted(secret, key=len, reverse=True)[:_MOST_WORDS])
        self._words = re.compile(rf"(?<!\w)(?:{longest})(?!\w)") if secret else None

    def text(self, text: str) -> str:
        """Return a text of which only file names are left, without the folders that lead to them."""
        for folder in self._folders:
            text = text.replace(f"{folder}/", f"{_GONE}/").replace(folder, _GONE)
        text = _PLACE.sub(rf"({_GONE}/\1", text)
        text = _PATH.sub(lambda found: f"{_GONE}/{Path(found[0]).name}", text)
        return self._words.sub(_GONE, text) if self._words else text

    def __call__(self, value: Any) -> Any:
        """Return data with all its texts redacted; the names in dictionaries stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {name: self(each) for name, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self(each) for each in value))
        if isinstance(value, list | tuple):
            return type(value)(self(each) for each in value)
        return value


def folder_of(site: str) -> str:
    """Return the folder in a place such as ``/home/me/train.py:3 in main``."""
    return site.rpartition("/")[0] if "/" in site else ""
