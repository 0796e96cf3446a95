"""Facts for the ledger about a program that jax is to compile: what tracing and lowering took, the call, the types."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from xcache.clock import monotonic
from xcache.recording import Ledger, Program, place_of
from xcache.signals import reraise_if_the_programs
from xcache.wire import ledger

logger = logging.getLogger("xcache")

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
# As jax writes them.
_SHORT = {
    f"{name}{bits}": f"{short}{bits}"
    for name, short in (("float", "f"), ("int", "i"), ("uint", "u"), ("complex", "c"))
    for bits in (8, 16, 32, 64, 128)
} | {"bfloat16": "bf16"}
# Stages of other functions than the next program are no program's; more than these are not kept.
_MOST_PENDING = 64


class _State(threading.local):
    """One thread's stages since its last program, and the arguments of the program that it lowered last."""

    def __init__(self) -> None:
        self.pending: list[tuple[str, str, float, float]] = []
        self.arguments: tuple[str, Sequence[Any]] = "", ()
        # The place that asked another thread for this one's programs.
        self.site = ""


class Stages:
    """Notes for the ledger what precedes a compile. Each thread has its own notes."""

    def __init__(self, ledger: Callable[[], Ledger]) -> None:
        """``ledger`` returns that of this process, which a fork replaces."""
        self._ledger = ledger
        self._state = _State()
        # By file name: whether the user wrote it.
        self._is_users: dict[str, bool] = {}
        self._libraries = tuple({_folder(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._machinery = tuple({_package(name) for name in ("jax", "jaxlib", "xcache")})

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear from jax how long tracing and lowering took."""
        from jax._src import monitoring

        listeners = monitoring._event_duration_secs_listeners
        monitoring.register_event_duration_secs_listener(self._heard)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                listeners.remove(self._heard)

    def _heard(self, event: str, seconds: float, **named: Any) -> None:
        stage = _STAGES.get(event)
        if stage is None:
            return
        end = monotonic()
        start = end - seconds
        pending = self._state.pending
        # A function's own time includes that of the functions it calls.
        while pending and pending[-1][2] >= start:
            pending.pop()
        if len(pending) < _MOST_PENDING:
            pending.append((stage, str(named.get("fun_name", "")), start, end))

    @contextlib.contextmanager
    def noting_arguments(self) -> Iterator[None]:
        """Note the arguments of what jax lowers, for an xcache that skips no lowering."""
        from jax._src.interpreters import mlir

        original = mlir.lower_jaxpr_to_module

        @functools.wraps(original)
        def noted(module_name: str, jaxpr: Any, *arguments: Any, **options: Any) -> Any:
            self.note_arguments(module_name, getattr(jaxpr, "in_avals", ()))
            return original(module_name, jaxpr, *arguments, **options)

        try:
            mlir.lower_jaxpr_to_module = noted
            yield
        finally:
            if mlir.lower_jaxpr_to_module is noted:
                mlir.lower_jaxpr_to_module = original

    def note_arguments(self, module_name: str, types: Sequence[Any]) -> None:
        """Note the abstract values of the arguments of a program that is being lowered."""
        self._state.arguments = module_name, types

    def describe(self, module_name: Callable[[], str]) -> None:
        """Tell the ledger what this thread did for its program before it was to be compiled."""
        try:
            self._describe(self._ledger().current(), module_name())
        except BaseException as error:  # noqa: BLE001 - no trouble of the ledger may reach the program
            reraise_if_the_programs(error)
            logger.debug("could not describe a program: %s: %s", type(error).__name__, error)

    def _describe(self, program: Program, module_name: str) -> None:
        pending, self._state.pending = self._state.pending, []
        for stage, function, start, end in pending:
            if module_name in (_module_name(f"jit({function})"), _module_name(function)):
                self._ledger().note(stage, start, end)
        name, types = self._state.arguments
        if _module_name(name) == module_name:
            program.shapes = lambda: _as_text(types)
            self._state.arguments = "", ()
        program.module_name = module_name
        program.site = self._state.site or self.site()

    @contextlib.contextmanager
    def asked_from(self, site: str) -> Iterator[None]:
        """Note that a place in the user's code asked for what this thread does meanwhile."""
        try:
            self._state.site = site
            yield
        finally:
            self._state.site = ""

    def site(self) -> str:
        """Return the place in the user's code that this thread is in: else in a library's, other than jax."""
        library: FrameType | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            is_users = self._is_users.get(file)
            if is_users is None:
                is_users = self._is_users[file] = not file.startswith((*self._libraries, "<frozen"))
            if is_users and not file.startswith(self._machinery):
                return place_of(frame)
            if library is None and not file.startswith(self._machinery):
                library = frame
            frame = frame.f_back
        return place_of(library) if library is not None else ""


def _module_name(name: str) -> str:
    """Return the name of the module that jax makes of a function of this name."""
    return _NOT_IN_NAMES.sub("_", name).rstrip("_")


def _folder(name: str) -> str:
    return f"{sysconfig.get_path(name)}{os.sep}"


def _package(name: str) -> str:
    return f"{Path(str(sys.modules[name].__file__)).parent}{os.sep}"


def _as_text(types: Sequence[Any]) -> str:
    """Return abstract values as text; equal ones that follow each other are counted.

    If there are too many, those in the middle are left out: the last ones, after a model's parameters, change most.
    """
    grouped = [(text, len(list(same))) for text, same in itertools.groupby(_type_text(each) for each in types)]
    texts = [text if count == 1 else f"{count} x {text}" for text, count in grouped]
    first, last = 0, len(texts)
    room = ledger.MAX_TEXT - len(ledger.LEFT_OUT.format(len(types)))
    if sum(len(text) + 2 for text in texts) <= room:
        return ", ".join(texts)
    # By turns from the end and from the beginning.
    while first < last:
        is_at_end = first >= len(texts) - last
        room -= len(texts[last - 1 if is_at_end else first]) + 2
        if room < 0:
            break
        first, last = (first, last - 1) if is_at_end else (first + 1, last)
    left_out = ledger.LEFT_OUT.format(sum(count for _, count in grouped[first:last]))
    return ", ".join([*texts[:first], left_out, *texts[last:]])


def _type_text(aval: Any) -> str:
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return str(aval)
    weak = " weak" if getattr(aval, "weak_type", False) else ""
    return f"{_SHORT.get(str(dtype), str(dtype))}[{','.join(map(str, shape))}]{weak}"
