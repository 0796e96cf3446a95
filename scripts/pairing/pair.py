"""A pair: one program that runs in two ways, A and B, which must never get each other's results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# A program chooses by its argument, so that its file is the same for A and B, and with it what version_of makes.
HEAD = """\
import collections, contextvars, dataclasses, enum, functools, importlib, itertools, operator, os, sys, threading, types
import typing, weakref
import jax, jax.numpy as jnp, numpy as np
A = sys.argv[1] == "A"
def pick(a, b):
    return a if A else b
x = np.linspace(0.5, 2, 8, dtype=np.float32)
"""
# The two ways of use: lowering that is skipped, and calls that are not even traced.
JITS = {
    "jax.jit": "jit = jax.jit\n",
    "xcache.jit": "import xcache\njit = functools.partial(xcache.jit, version=xcache.version_of(__name__))\n",
}


class Pair(NamedTuple):
    """A program, and all that makes its runs as A others than those as B."""

    family: str
    # "family: what differs, where (xcache.jit)" is the name by which a pair is run alone.
    what: str
    source: str
    jit: str = "jax.jit"
    # It changes its process, so no other program may share it.
    is_alone: bool = False
    # It needs a process that has not imported jax yet.
    is_fresh: bool = False
    environments: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    # The two runs give the same, on purpose: it shows that the shortcut is still used, or that nothing is invented.
    is_same: bool = False
    # The program's source as B, if it is another file.
    source_as_b: str = ""
    # The file is the same one, edited between the runs, not one of two checkouts.
    is_edited: bool = False
    # Other modules beside the program, by file name; each as A and as B.
    modules: Mapping[str, tuple[str, str]] = {}
    # How the files of jax stand when the program starts as A and as B: a name in jax_files.EDITS, or "".
    jax_files: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """The name on the command line and in reports."""
        return f"{self.family}: {self.what} ({self.jit})"

    @property
    def has_own_process(self) -> bool:
        """Whether no other program may run where this one does."""
        return self.is_alone or self.is_fresh or self.jax_files is not None

    def text(self, side: str) -> str:
        """Return the program for one side."""
        return self.source_as_b if side == "B" and self.source_as_b else self.source


def program(body: str, jit: str) -> str:
    """Return the whole text of a program."""
    return HEAD + JITS[jit] + body
