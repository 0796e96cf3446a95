"""Answer calls for jax's dispatcher.

The dispatcher is in C++ and asks a Python function about each call that is new to it. Ours looks for a record first.
Later calls take jax's fast path, from a cache of our own: jax's would serve them to a plain ``jax.jit``, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jax._src import core, pjit, source_info_util, traceback_util, tree_util, util, xla_bridge
from jax._src.lib import _jax

from xcache import logs
from xcache.errors import UnsupportedError, WrongVersionError
from xcache.hook import current_calls, current_stages, late_module
from xcache.hook.call_records import CallRecords
from xcache.hook.calls import record_format, second_trace, trees
from xcache.hook.calls.description import Call, describe, parsed
from xcache.hook.skipping import SKIPPED
from xcache.hook.structure.encoding import CannotSkipError
from xcache.hook.structure.libraries import is_of_a_library, is_of_jax
from xcache.request import Alias
from xcache.signals import reraise_if_the_programs
from xcache.threads import usual_stack
from xcache.wire import protocol

logger = logging.getLogger("xcache")
# jax hides its own frames from the program's exceptions, and so do its callers here, with the cache off, too.
traceback_util.register_exclusion(__file__)
source_info_util.register_exclusion(__file__)

# Calls that jax has traced in this process, by digest, with their records; None for a call that may have none. All
# functions share them, to find two that xcache cannot tell apart.
_traced: dict[str, Alias | None] = {}
_MOST_THREADS = min(8, os.cpu_count() or 1)
# The daemon refuses larger records; the rest is for the other facts of an alias.
_MOST_BYTES = protocol.MAX_RECORD - 1024
# The parameters of jax's function for the fast path after the first four, and the value of each for a recorded call.
_EMPTY_PARAMETERS: dict[str, Any] = {
    "effects": frozenset(),
    "consts_for_constvars": (),
    "abstracted_axes": None,
    "pgle_profiler": None,
    "const_args": (),
}


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Ready(NamedTuple):
    """A loaded executable, and its record, from which each call gets a tree of results with the call's own objects."""

    executable: Any
    record: record_format.Record


class RecordedFunction:
    """Answers jax's dispatcher for one function; ``jitted`` is what the program calls."""

    def __init__(self, fun: Any, plain: Any, version: str) -> None:
        self._fun, self._version = fun, version
        try:
            state = plain.__getstate__()
            self._ask_jax, self._options = state["cache_miss"], plain._jit_info
            parameters = inspect.signature(pjit._get_fastpath_data).parameters
            self._fast_path = {name: _EMPTY_PARAMETERS[name] for name in list(parameters)[4:]}
            kind: Any = type(plain)
            jitted = kind.__new__(kind)
            # cloudpickle writes this function with its closure.
            answer = pjit.api_boundary(lambda *arguments, **keywords: self.answer(*arguments, **keywords))
            state.update(cache_miss=answer, cache=_jax.PjitFunctionCache(capacity=4096))
            jitted.__setstate__(state)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedError(str(error)) from None
        self._ready: dict[str, Ready] = {}
        # True after a clear (jax would trace anew), for a function without a fast path (each call would be described),
        # and for one that traces differently each time (one trace more may change the next).
        self._is_left_to_jax = False
        vars(jitted).update(vars(plain))
        jitted.clear_cache = self._clear
        self.jitted = jitted
        # ``jax.clear_caches()`` takes this for a cache of jax's, to which jax keeps only a weak reference.
        util.register_cache(self, "xcache.jit")

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process, to which cloudpickle sends this, ask jax alone."""
        return types.SimpleNamespace, (), {"answer": self._ask_jax}

    def cache_clear(self) -> None:
        """Drop all executables, and use no records from now on."""
        self._is_left_to_jax = True
        self._ready.clear()

    def _clear(self) -> None:
        self.cache_clear()
        type(self.jitted).clear_cache(self.jitted)

    def answer(self, *arguments: Any, **keywords: Any) -> Any:
        """Answer the dispatcher: the results, the data for its fast path, and whether to forget what it has."""
        records = _current_records()
        if records is None:
            _warn_if_unchecked()
        call = None if records is None else self._describe(records, arguments, keywords)
        if records is None or call is None:
            return self._ask_jax(*arguments, **keywords)
        ready_or_reason = "checked" if records.check else self._load(records, call)
        if isinstance(ready_or_reason, Ready):
            return self._run(ready_or_reason, call)
        before = frozenset(sys.modules)
        answer = self._ask_jax(*arguments, **keywords)
        if answer[1] is None:
            records.count("no fast path")
            self._is_left_to_jax = True
        else:
            self._record_and_count(records, call, (arguments, keywords), _imported_since(before), ready_or_reason)
        return answer

    def prepare(self, wanted: list[Arguments]) -> None:
        """Load or compile what these calls need, several at once; each has its arguments and keywords."""
        records = _current_records()
        # With check each call is traced when it is made, and compared then.
        usable = None if records is None or records.check else records
        described = [None if usable is None else self._describe(usable, *each, is_prepared=True) for each in wanted]
        loaded = _in_threads(lambda call: usable and call and self._load(usable, call), described)
        missing = [number for number, each in enumerate(loaded) if not isinstance(each, Ready)]
        lowered, imported = [], []
        for number in missing:
            before = frozenset(sys.modules)
            lowered.append(self.jitted.trace(*wanted[number][0], **wanted[number][1]).lower())
            imported.append(_imported_since(before))
        _in_threads(lambda each: each._lowering.compile(), lowered)
        for number, modules in zip(missing, imported, strict=True):
            call, reason = described[number], loaded[number]
            if usable is not None and call is not None:
                self._record_and_count(usable, call, wanted[number], modules, reason)

    def _describe(
        self, records: CallRecords, arguments: Any, keywords: Any, *, is_prepared: bool = False
    ) -> Call | None:
        """Return the description of a call; None if jax has to trace it."""
        if self._is_left_to_jax or not core.trace_state_clean() or records.is_watched():
            return None
        try:
            records.begin()
            return self._described(arguments, keywords, is_prepared=is_prepared)
        except BaseException as error:  # noqa: BLE001 - jax says what is wrong with a call
            records.count(self._reason(error))
            return None

    def _described(self, arguments: Any, keywords: Any, *, is_prepared: bool) -> Call:
        return describe(self._fun, self._options, self._version, arguments, keywords, is_prepared=is_prepared)

    def _load(self, records: CallRecords, call: Call) -> Ready | str:
        """Return the executable of a recorded call, or the reason why jax has to trace it."""
        ready = self._ready.get(call.digest)
        if ready is not None:
            return ready
        if _traced.get(call.digest) is not None:
            # Another function has it; whether both mean the same is known when this one has been traced.
            return "no record"
        try:
            alias = records.find(call.digest)
            if alias is None:
                return "no record"
            record = record_format.decode(alias.record)
            record.tree(call.trees)
            for name in record.imported:
                importlib.import_module(name)
            executable = record_format.make_computation(record, records.late_module(alias)).compile()
        except BaseException as error:  # noqa: BLE001 - jax can trace instead
            return self._reason(error)
        ready = self._ready[call.digest] = Ready(executable, record)
        records.count(SKIPPED)
        return ready

    def _run(self, ready: Ready, call: Call) -> Any:
        tree = ready.record.tree(call.trees)
        results = ready.executable.unsafe_call(*call.leaves)
        fast_path = pjit._get_fastpath_data(ready.executable, tree, call.leaves, results, **self._fast_path)
        return tree_util.tree_unflatten(tree, results), fast_path, False

    def _record_and_count(
        self, records: CallRecords, call: Call, arguments: Arguments, imported: list[str], reason: str
    ) -> None:
        """Record what jax has just compiled; count the call, once, by why it was traced."""
        is_first = call.digest not in _traced
        problem = self._record(records, call, arguments, imported)
        if problem is not None or is_first:
            records.count(problem or reason)
            if problem is None:
                self._say_traced(reason)

    def _record(self, records: CallRecords, call: Call, arguments: Arguments, imported: list[str]) -> str | None:
        """Record what jax has just compiled, or check the version by it; return why there can be no record, or None."""
        is_new, known = call.digest not in _traced, _traced.get(call.digest)
        # Unless all of the following succeeds, for good.
        _traced[call.digest] = None
        if records.is_readonly or not (is_new or known):
            return None
        try:
            made = self._alias(records, call, arguments, imported, is_new=is_new)
        except BaseException as error:  # noqa: BLE001 - the program has its results already
            self._is_left_to_jax = getattr(error, "kind", "") == second_trace.DIFFERS
            return self._reason(error)
        if known is not None and _difference(known, made):
            # Two calls that xcache cannot tell apart: neither may have a record.
            records.drop(call.digest)
            logger.error(
                "two calls, the last of %s, give different programs and xcache cannot tell them apart; neither is"
                " recorded. Please report this",
                self._options.fun_sourceinfo,
            )
            return "calls that cannot be told apart"
        _traced[call.digest] = made
        if is_new and records.check:
            outcome = self._check_version(records, made)
            self._say_traced(outcome)
            return outcome
        if is_new:
            records.note(made)
        return None

    def _alias(
        self, records: CallRecords, call: Call, arguments: Arguments, imported: list[str], *, is_new: bool
    ) -> Alias:
        """Return the alias of what jax has just compiled; raise CannotSkipError if there can be none."""
        if others := [name for name in imported if _must_count(name)]:
            # A process that has not imported it yet finds the record.
            raise CannotSkipError(f"module imported by the function: {others[0]}")
        positional, keywords = arguments
        if is_new:
            # It raises if the trace has left a tracer in what the function reads.
            self._described(positional, keywords, is_prepared=True)
        traced = self.jitted.trace(*positional, **keywords)
        lowered = traced.lower()
        program = records.program_of(lowered._lowering)
        if program is None:
            raise CannotSkipError("no alias")
        if is_new:
            second_trace.compare(traced, lambda: self.jitted.trace(*positional, **keywords))
        parts = trees.parts_of(call.trees, parsed(self._options, *arguments)[0].dynamic_arg_treedefs)
        of_jax = filter(is_of_jax, imported)
        record = record_format.encode(lowered._lowering, second_trace.out_tree(traced), parts, [*of_jax])
        if len(record) > _MOST_BYTES:
            raise CannotSkipError("large record")
        record_format.decode(record).tree(call.trees)
        return program._replace(structure=call.digest, record=record)

    def _check_version(self, records: CallRecords, made: Alias) -> str:
        """Compare with the record of an earlier process, or note ours; raise WrongVersionError if they differ."""
        found = records.find(made.structure)
        if found is None:
            records.note(made)
            return "no record"
        differs = _difference(found, made)
        if differs is None:
            return "checked"
        records.count("contradiction")
        records.drop(made.structure)
        # Where the record is another user's, our own hides it.
        records.note(made)
        raise WrongVersionError(
            f"{self._options.fun_sourceinfo} has another {differs} than an earlier process recorded for version"
            f" {str(self._version)!r}; the version has to change with the code and its configuration"
            " (xcache.version_of)"
        )

    def _reason(self, error: BaseException) -> str:
        """Return why jax has to trace, for the statistics; a bug in here must not stop the program."""
        reraise_if_the_programs(error)
        kind, said = "error", f"{type(error).__name__}: {error}"
        if isinstance(error, CannotSkipError):
            kind, said = error.kind, str(error)
        elif isinstance(error, RecursionError):
            kind = "large object"
        self._say_traced(said)
        return kind

    def _say_traced(self, why: str) -> None:
        logger.debug("traced: %s: %s", self._options.fun_sourceinfo, why)


def _imported_since(before: frozenset[str]) -> list[str]:
    """Return the modules that were imported since, in that order."""
    # A list, because other threads may import meanwhile.
    return [name for name in list(sys.modules) if name not in before]


def _must_count(module: str) -> bool:
    """Return whether a module is neither of Python, nor of jax, its plugins, xcache or what jax requires."""
    found = sys.modules.get(module)
    # Cython makes modules without a file, and gives one of scipy's a second name.
    name = getattr(found, "__name__", module)
    is_known = is_of_jax(name) or is_of_a_library(name) or name.startswith(("jax_", "xcache."))
    return getattr(found, "__file__", None) is not None and not is_known


def _difference(one: Alias, other: Alias) -> str | None:
    """Return in what two aliases of one call differ, or None."""
    if one.program != other.program:
        return "program"
    return None if record_format.are_same(one.record, other.record) else "results"


@functools.cache
def _warn_if_unchecked() -> None:
    if os.environ.get("XCACHE_JIT", "").strip().lower() == "check":
        logs.complain("XCACHE_JIT=check compares no calls here: that takes XCACHE=1, and XCACHE_LOWERING=auto or skip")


def _current_records() -> CallRecords | None:
    """Return the records of calls, if the cache is on. Start jax's backends first: the plugin comes with them."""
    if not xla_bridge.backends_are_initialized() and core.trace_state_clean():
        xla_bridge.get_backend()
    return current_calls()


def _in_threads(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return what ``work`` gives for each item, several at once, under this thread's settings of jax."""
    settings, stages = late_module.settings(), current_stages()
    site = "" if stages is None else stages.site()

    def work_under_settings(item: Any) -> Any:
        noted = contextlib.nullcontext() if stages is None else stages.asked_from(site)
        with late_module.under(settings), noted:
            return work(item)

    with ThreadPoolExecutor(_MOST_THREADS, "xcache-prepare") as threads:
        with usual_stack():
            results = threads.map(work_under_settings, items)
        return list(results)
