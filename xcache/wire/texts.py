"""Texts that others chose, made fit for a terminal or a log."""

REPLACED = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, kept: str = "") -> str:
    """Return the text with control characters replaced, which could steer the terminal, but those that are ``kept``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else REPLACED for c in text)
