"""``xcache.prebuild``: compile what calls will want, several at once, before any of them is made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from xcache import keys, logs
from xcache.errors import ClusterError, UncacheableError
from xcache.hook import Handle, current_handle
from xcache.hook.collecting import Asked, collected
from xcache.keys import describe, stablehlo
from xcache.warming.building import Builder, LocalWorkers, Outcome, Task, Workers, workers_of
from xcache.warming.place import place_of
from xcache.warming.process import this_python

# Arguments and keywords.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Prebuilt(NamedTuple):
    """How many programs other processes compiled, how many were there already, and how many this process compiled.

    ``failed`` names those that could not be compiled, each with the reason.
    """

    built: int = 0
    there: int = 0
    here: int = 0
    failed: tuple[str, ...] = ()


def prebuild(jitted: Any, *specs: Any, workers: int | None = None, dask: str | None = None) -> Prebuilt:
    """Compile what these calls of a jitted function need, in ``workers`` processes at once, and run nothing.

    Each spec is the arguments of one call: a tuple, or ``inspect.signature(fun).bind(...)`` for a call with keywords.
    A ``jax.ShapeDtypeStruct``, also one with a sharding, stands for an array. The calls then hit. A program that only
    this process can compile, such as one with a Python callback, is compiled here. A compile that crashes costs its
    program alone, and is named in the result. By default there are as many workers as processors. ``dask`` is the
    address of a Dask cluster whose workers do it instead (``tcp://host:8786``); if it cannot be reached, this machine
    does, and a warning says so. While the cache is off, nothing is done, and a warning says that once.
    """
    calls = [as_call(spec) for spec in specs]
    handle = _handle()
    if handle is None or handle.cache.mode == "readonly":
        _warn("off" if handle is None else "readonly")
        return Prebuilt()
    counts, failed = {"built": 0, "there": 0, "here": 0}, []
    with closing(_processes(dask)) as processes:
        for outcome in prebuilt(handle, jitted, calls, processes, workers):
            if outcome.kind == "failed":
                failed.append(f"{outcome.module_name}: {outcome.reason}")
            else:
                counts[outcome.kind] += 1
    return Prebuilt(**counts, failed=tuple(failed))


class Done(NamedTuple):
    """The outcome of one program: built, there, compiled here, or failed."""

    module_name: str
    key: str
    kind: str
    reason: str = ""
    compile_seconds: float = 0.0


def prebuilt(
    handle: Handle, jitted: Any, calls: Sequence[Call], processes: Workers, count: int | None
) -> Iterator[Done]:
    """Yield what became of each distinct program of these calls; jax's exceptions reach the caller.

    ``count`` of them are compiled at once by ``processes``.
    """
    tasks: dict[str, Task] = {}
    compile_here: dict[str, Callable[[], object]] = {}
    for arguments, keywords in calls:
        lowered = jitted.lower(*arguments, **keywords)
        asked = collected(lowered.compile)
        if asked is None:
            # Another library has replaced jax's function since, and it was compiled.
            yield Done(_name(lowered), "", "here")
            continue
        task = _task(handle, asked)
        if isinstance(task, str):
            lowered.compile()
            yield Done(_name(lowered), "", "here", task)
        elif task.key not in tasks:
            tasks[task.key], compile_here[task.key] = task, lowered.compile
    if not tasks:
        return
    builder = Builder(handle.cache.client, processes, count, handle.cache.config.max_wait)
    with closing(builder.build(list(tasks.values()))) as outcomes:
        refused = []
        for outcome in outcomes:
            if outcome.kind == "refused":
                refused.append(outcome)
            else:
                yield _done(outcome)
    for outcome in refused:
        # One after the other, as a program without this would.
        compile_here[outcome.task.key]()
        yield _done(outcome)._replace(kind="here")


def as_call(spec: Any) -> Call:
    """Return the arguments and keywords of a spec."""
    if isinstance(spec, inspect.BoundArguments):
        return spec.args, spec.kwargs
    if isinstance(spec, tuple | list):
        return tuple(spec), {}
    raise TypeError(f"each spec is a tuple of arguments, not {type(spec).__name__}")


def _task(handle: Handle, asked: Asked) -> Task | str:
    """Return the task for what jax asks for, or why only this process can compile it."""
    # It imports numpy, which this module needs only with jax.
    from xcache.hook.wrapper import components_of, reason_to_leave_to_jax

    backend, options = asked.backend, asked.compile_options
    if reason := reason_to_leave_to_jax(handle.jax, backend, asked.devices, options, asked.pgle_profiler):
        return reason
    if asked.host_callbacks:
        return "python callback"
    if handle.jax.distributed.client is not None or describe.span_processes(asked.devices.flat):
        return "several processes"
    module = asked.computation
    serialized, placed = options.SerializeAsString(), tuple(asked.devices.flat)
    try:
        parts = components_of(handle.jax, handle.surroundings, backend, module, placed, serialized)
        place = place_of(*(parts[name].content.decode() for name in ("flags", "platform")))
    except (UncacheableError, ValueError) as error:
        return str(error)
    key, program = keys.combine(parts), stablehlo.bytecode(module)
    return Task(key.digest, stablehlo.name(module), place, dict(key.components), serialized, 0.0, lambda: program)


def _handle() -> Handle | None:
    if current_handle() is None:
        import jax

        # XCACHE switches the cache on when jax makes its backends.
        jax.devices()
    return current_handle()


def _processes(dask: str | None) -> Workers:
    try:
        return workers_of(this_python(), dask)
    except ClusterError as error:
        logs.complain("%s; prebuild() compiles on this machine", error)
        return LocalWorkers(this_python())


def _done(outcome: Outcome) -> Done:
    task = outcome.task
    return Done(task.module_name, task.key, outcome.kind, outcome.reason, outcome.compile_seconds)


def _name(lowered: Any) -> str:
    return str(getattr(lowered, "fun_name", "") or "a program")


@functools.cache
def _warn(mode: str) -> None:
    logs.complain("xcache is %s, so that prebuild() compiles nothing", mode)
