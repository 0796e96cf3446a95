"""A disk of any size, as reported to a daemon."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

_FILES = ("store.db", "store.db-wal", "blobs/*/*", "held/*")


class SmallDisk:
    """Reports a disk with ``size`` bytes beside an empty store, less what the store has grown and ``held``."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.held = size, 0
        self._directory = directory
        self._empty_store = 0
        monkeypatch.setattr(os, "statvfs", self._statvfs)

    def _statvfs(self, asked: object) -> object:
        if not self._empty_store:
            with contextlib.closing(sqlite3.connect(self._directory / "store.db")) as database:
                ((pages, size),) = database.execute(
                    "SELECT page_count, page_size FROM pragma_page_count, pragma_page_size"
                )
            self._empty_store = pages * size
        # A file may be deleted after it was found.
        there = 0
        for path in (path for pattern in _FILES for path in self._directory.glob(pattern)):
            with contextlib.suppress(FileNotFoundError):
                there += path.stat().st_size
        free = max(0, self.size + self._empty_store - there - self.held)
        return SimpleNamespace(f_frsize=1, f_bsize=1, f_blocks=self.size, f_bfree=free, f_bavail=free)
