"""Marks for some of a test's cases."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def thorough(cases: Iterable[Any], usual: Container[Any]) -> list[Any]:
    """Return the cases; those that are not among the ``usual`` ones run only with scripts/test --thorough."""
    return [case if case in usual else pytest.param(case, marks=pytest.mark.thorough) for case in cases]


def further(*cases: tuple[Any, ...]) -> list[Any]:
    """Return cases of several values each that run only with scripts/test --thorough."""
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]
