"""Redaction leaves no folder, host or argument, and what helps stays."""

from __future__ import annotations

import pytest

from xcache.cli.report.redaction import Redaction, folder_of

REDACTION = Redaction(["/home/me/my work", "/srv/", "", "/"], ["host17", "hush", "8", "0.25", "a"])


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/me/my work/train.py:3 in main", "…/train.py:3 in main"),
        ("--xla_dump_to=/tmp/some/where x", "--xla_dump_to=…/where x"),
        ("a constant (/a/b/c.py:12) is 3", "a constant (…/c.py:12) is 3"),
        ("a constant (deep/my own/c.py:12) is 3, sine (x (y)/d.py:7)", "a constant (…/c.py:12) is 3, sine (…/d.py:7)"),
        ("~/x/y and ../z/w and ./v", "…/y and …/w and …/v"),
        ("on host17, told to hush", "on …, told to …"),
        ("f32[8,128], 0.25 and/or 8", "f32[8,128], 0.25 and/or 8"),
        ("nothing of the kind: hushed", "nothing of the kind: hushed"),
        ("", ""),
    ],
)
def test_text(text, left):
    assert REDACTION.text(text) == left


def test_data_is_redacted_wherever_its_texts_are():
    data = {"/kept": ["/srv/x", ("/a/b", 3, None)], "deep": {"x": "/home/me/my work"}}
    assert REDACTION(data) == {"/kept": ["…/x", ("…/b", 3, None)], "deep": {"x": "…"}}


def test_folders():
    assert folder_of("/home/me/train.py:3 in main") == "/home/me"
    assert folder_of("train.py:3 in main") == ""


def test_with_nothing_to_hide_paths_go_all_the_same():
    assert Redaction([], []).text("/a/b") == "…/b"
