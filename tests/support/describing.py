"""Describe the program's own values, as the digest of a call does."""

from __future__ import annotations

from xcache.hook.calls.program_values import ProgramEncoding


def told(value):
    encoding = ProgramEncoding()
    encoding.encode(value)
    return encoding.digest()


def of_text(text, **names):
    """Return the function that a text defines."""
    space = {"__name__": "of_text", **names}
    exec(text, space)  # noqa: S102 - the text is one of this file's
    return space["function"]


def using(value):
    return of_text("def function(x): return x * USED", USED=value)


def reading(text, **names):
    return of_text(f"def function(x): return {text}", **names)


class Plain:
    """An object of the program's."""

    def __init__(self, rate):
        self.rate = rate
