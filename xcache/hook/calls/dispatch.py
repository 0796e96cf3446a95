"""Answer jax's dispatcher, in C++, which asks a Python function for each call that it has not met before.

Here is another such function, which looks for a record of the call first. What it answers takes jax's fast path from
then on, in a cache of its own: jax's would serve it to a plain ``jax.jit`` of the same function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jax._src import core, pjit, tree_util, util, xla_bridge
from jax._src.lib import _jax

from xcache.errors import UnsupportedError, WrongVersionError
from xcache.hook import current_calls, late_module
from xcache.hook.call_records import CallRecords
from xcache.hook.calls import records, second_trace
from xcache.hook.calls.description import Call, describe
from xcache.hook.structure.encoding import MustLowerError
from xcache.request import Alias
from xcache.signals import reraise_if_the_programs
from xcache.wire import protocol

logger = logging.getLogger("xcache")

# The daemon keeps no larger ones.
_MOST_THREADS = min(8, os.cpu_count() or 1)
_MOST_BYTES = protocol.MAX_RECORD - 1024
# Of jax's function for the fast path: the names of its parameters, and what is given for those of no record.
_NOTHING: dict[str, Any] = {
    "effects": frozenset(),
    "consts_for_constvars": (),
    "abstracted_axes": None,
    "pgle_profiler": None,
    "const_args": (),
}


class Ready(NamedTuple):
    """A loaded executable, and the tree of its results."""

    executable: Any
    results: Any


class Function:
    """Answers jax's dispatcher for one function; ``made`` is what the program calls."""

    def __init__(self, fun: Any, plain: Any, version: str) -> None:
        self._fun, self._version = fun, version
        second_trace.check()
        try:
            state = plain.__getstate__()
            self._miss, self._options = state["cache_miss"], plain._jit_info
            parameters = inspect.signature(pjit._get_fastpath_data).parameters
            self._fast_path = {name: _NOTHING[name] for name in list(parameters)[4:]}
            kind: Any = type(plain)
            made = kind.__new__(kind)
            answer = pjit.api_boundary(self._answer)
            state.update(cache_miss=answer, cache=_jax.PjitFunctionCache(capacity=4096))
            made.__setstate__(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedError(str(error)) from None
        self._ready: dict[str, Ready] = {}
        # Calls that jax has traced here, and that were recorded or cannot be.
        self._traced: set[str] = set()
        # After a clear, jax would trace anew. A function without a fast path would be described at each call.
        self._is_left_to_jax = False
        functools.update_wrapper(made, fun)
        made._fun, made._jit_info = fun, plain._jit_info
        made.clear_cache = self._clear
        self.made = made
        # jax holds it weakly.
        self._clearing = _Clearing(self)
        util.register_cache(self._clearing, "xcache.jit")

    def forget(self) -> None:
        """Forget all executables, and look for no records any more."""
        self._is_left_to_jax = True
        self._ready.clear()

    def _clear(self) -> None:
        self.forget()
        type(self.made).clear_cache(self.made)

    def _answer(self, *arguments: Any, **keywords: Any) -> Any:
        """Answer the dispatcher: the results, the data for its fast path, and whether to forget what it has."""
        calls = _calls()
        call = None if calls is None else self._described(calls, arguments, keywords)
        if calls is None or call is None:
            return self._miss(*arguments, **keywords)
        ready = None if calls.check else self._found(calls, call)
        if ready is not None:
            calls.count("skipped")
            return self._run(ready, call)
        answer = self._miss(*arguments, **keywords)
        if answer[1] is None:
            calls.count("no fast path")
            self._is_left_to_jax = True
            return answer
        made = self._record(calls, call, arguments, keywords)
        if calls.check and made is not None:
            self._compare(calls, made)
        return answer

    def prepare(self, wanted: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Load or compile what these calls need, several at once; each has its arguments and keywords."""
        calls, settings = _calls(), late_module.settings()

        def under_settings(function: Callable[..., Any], *arguments: Any) -> Any:
            with late_module.under(settings):
                return function(*arguments)

        with contextlib.closing(_Threads()) as threads:
            described = [None if calls is None else self._described(calls, *each) for each in wanted]
            loading = [None if call is None else threads.submit(under_settings, self._found, calls, call)
                       for call in described]  # fmt: skip
            missing = [number for number, loaded in enumerate(loading) if loaded is None or loaded.result() is None]
            lowered = [self.made.trace(*wanted[number][0], **wanted[number][1]).lower() for number in missing]
            compiling = [threads.submit(under_settings, each._lowering.compile) for each in lowered]
            for number, compiled in zip(missing, compiling, strict=True):
                compiled.result()
                call = described[number]
                if calls is not None and call is not None:
                    self._record(calls, call, *wanted[number])

    def _described(self, calls: CallRecords, arguments: Any, keywords: Any) -> Call | None:
        """Return the description of a call; None if jax has to trace it."""
        if self._is_left_to_jax or not core.trace_state_clean() or calls.is_watched():
            return None
        try:
            return describe(self._fun, self._options, self._version, arguments, keywords)
        except BaseException as error:  # noqa: BLE001 - jax says what is wrong with a call
            self._note(calls, error)
            return None

    def _found(self, calls: CallRecords, call: Call) -> Ready | None:
        """Return the executable of a call that was recorded, loaded; None if jax has to trace it."""
        ready = self._ready.get(call.digest)
        if ready is not None:
            return ready
        try:
            alias = calls.find(call.digest)
            if alias is None:
                calls.count("no record")
                return None
            record = records.read(alias.record, call.trees)
            executable = records.computation(record, calls.late_module(alias)).compile()
        except BaseException as error:  # noqa: BLE001 - jax can trace instead
            self._note(calls, error)
            return None
        ready = self._ready[call.digest] = Ready(executable, record.results)
        return ready

    def _run(self, ready: Ready, call: Call) -> Any:
        results = ready.executable.unsafe_call(*call.leaves)
        fast_path = pjit._get_fastpath_data(ready.executable, ready.results, call.leaves, results, **self._fast_path)
        return tree_util.tree_unflatten(ready.results, results), fast_path, False

    def _record(self, calls: CallRecords, call: Call, arguments: Any, keywords: Any) -> Alias | None:
        """Return the record of what jax has just traced, lowered and compiled, and have the next process find it."""
        if call.digest in self._traced or calls.is_readonly:
            return None
        self._traced.add(call.digest)
        try:
            traced = self.made.trace(*arguments, **keywords)
            lowered = traced.lower()
            program = calls.program_of(lowered._lowering)
            if program is None:
                raise MustLowerError("no alias")
            second_trace.compare(traced, lambda: self.made.trace(*arguments, **keywords))
            record = records.written(lowered._lowering, traced.out_tree, call.trees)
            if len(record) > _MOST_BYTES:
                raise MustLowerError("large record")
            records.read(record, call.trees)
            made = program._replace(structure=call.digest, record=record)
            if not calls.check:
                calls.note(made)
        except BaseException as error:  # noqa: BLE001 - the program has its results already
            self._note(calls, error)
            return None
        return made

    def _compare(self, calls: CallRecords, made: Alias) -> None:
        """Raise WrongVersionError, and forget the earlier record, if it says otherwise than this process."""
        found = calls.find(made.structure)
        if found is None:
            calls.count("no record")
            calls.note(made)
            return
        calls.count("checked")
        differs = "program" if found.program != made.program else "results" if found.record != made.record else None
        if differs is not None:
            calls.drop(made.structure)
            raise WrongVersionError(
                f"{self._options.fun_sourceinfo} has another {differs} than an earlier process recorded for version"
                f" {str(self._version)!r}; the version has to change with the code and its configuration"
                " (xcache.version_of)"
            )

    def _note(self, calls: CallRecords, error: BaseException) -> None:
        """Count why jax has to trace; a bug in here must not stop the program."""
        reraise_if_the_programs(error)
        is_known = isinstance(error, MustLowerError)
        calls.count(error.kind if isinstance(error, MustLowerError) else "error")
        logger.debug(
            "traced: %s: %s%s", self._options.fun_sourceinfo, "" if is_known else f"{type(error).__name__}: ", error
        )


def _calls() -> CallRecords | None:
    """Return the records of calls, if the cache is on. The plugin that switches it on comes with jax's backends."""
    if not xla_bridge.backends_are_initialized() and core.trace_state_clean():
        xla_bridge.get_backend()
    return current_calls()


class _Threads(ThreadPoolExecutor):
    """Threads that load or compile."""

    def __init__(self) -> None:
        super().__init__(_MOST_THREADS, "xcache-prepare")

    def close(self) -> None:
        """End the threads; what none of them has begun is left undone."""
        self.shutdown(cancel_futures=True)


class _Clearing:
    """Poses as one of jax's caches, so that ``jax.clear_caches()`` reaches a function that is still in use."""

    def __init__(self, function: Function) -> None:
        self._function = weakref.ref(function)

    def cache_clear(self) -> None:
        function = self._function()
        if function is not None:
            function.forget()

    def cache_info(self) -> str:
        return "xcache.jit"

    def cache_keys(self) -> Sequence[Any]:
        return ()
