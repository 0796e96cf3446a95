"""The function that replaces jax's ``compile_or_get_cached``."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from xcache import keys
from xcache.cache import Cache
from xcache.errors import UncacheableError
from xcache.executables import deserialize, iterate_once, must_be_serialized_first, serialize, show_as_compiled
from xcache.hook import compile_path
from xcache.hook.collecting import stop_if_collecting
from xcache.hook.jax_versions import Jax
from xcache.hook.skipping import NEVER, Never, Skipping
from xcache.hook.stages import Stages
from xcache.keys import custom_calls, describe, stablehlo
from xcache.keys.options import asks_for_dumps
from xcache.keys.platform import GPU, without_key
from xcache.request import Alias, LoadTarget, Request

logger = logging.getLogger("xcache")


def wrap(
    original: Callable[..., Any],
    jax: Jax,
    cache: Cache,
    surroundings: describe.Surroundings,
    stages: Stages,
    skipping: Skipping | Never = NEVER,
) -> Callable[..., Any]:
    """Return a function that does what ``original`` does, from the cache if possible."""
    has_logged = False

    @functools.wraps(original)
    def compile_or_get_cached(*arguments: Any, **options: Any) -> Any:
        stop_if_collecting(skipping, arguments, options)
        with cache.ledger.asking():
            return compile_or_get(*arguments, **options)

    def note_use() -> None:
        nonlocal has_logged
        if not has_logged:
            has_logged = True
            jax.record_event("/jax/compilation_cache/tasks_using_cache")
            if jax.config.compilation_cache_dir.value:
                logger.debug("jax's own cache in %s is bypassed", jax.config.compilation_cache_dir.value)

    def compile_or_get(
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        host_callbacks: Sequence[Any],
        executable_devices: Any,
        pgle_profiler: Any = None,
    ) -> Any:
        iterate_once(executable_devices)
        reason = reason_to_leave_to_jax(jax, backend, devices, compile_options, pgle_profiler)
        late = skipping.late(computation)
        lowered = skipping.take_lowered(computation)
        stages.describe(lambda: stablehlo.name(computation) if late is None else late.alias.module_name)
        if late is not None and (reason is not None or skipping.is_watched()):
            computation, late = late.lowered(), None

        def leave_to_jax() -> Any:
            """Compile as without xcache: jax's own cache may have the program."""
            return original(
                backend, computation, devices, compile_options, host_callbacks, executable_devices, pgle_profiler
            )

        if reason is not None:
            cache.count_uncacheable(reason)
            cache.check_guard()
            with cache.ledger.stage("compile"):
                return leave_to_jax()

        def compile_now() -> Any:
            # Look it up at each call: the program may have replaced it in jax.
            return jax.compiler.backend_compile_and_load(
                backend, computation, executable_devices, compile_options, host_callbacks
            )

        def request(alias: Alias | None = None) -> Request:
            """Return the request for the module, or for the program that its alias names."""
            options = compile_options.SerializeAsString()
            known = "" if alias is None else alias.program
            parts = components_of(
                jax, surroundings, backend, computation, tuple(devices.flat), options, host_callbacks, known
            )
            note_use()
            if alias is None and (dumped_to := jax.dump_module(computation)):
                jax.compiler.logger.info("Dumped the module to %s.", dumped_to)
            canonical = parts["program"]
            name = stablehlo.name(computation) if alias is None else alias.module_name
            # An executable with callbacks into the program cannot be loaded without them. One with the program's own
            # custom calls runs the program's code when it is loaded, which may not be ready for that yet.
            runs_program_code = alias is None and (
                bool(host_callbacks) or custom_calls.foreign(computation, canonical.content) is not None
            )
            if alias is None and lowered is not None:
                alias = skipping.checked_alias(lowered, computation, parts, name)
            return Request(
                key=keys.combine(parts),
                module_name=name,
                platform=backend.platform,
                device_kind=devices.flat[0].device_kind,
                jaxlib_version=jax.jaxlib_version,
                program=canonical.content,
                details=lambda: describe.texts(parts),
                load=lambda raw: deserialize(backend, raw, executable_devices, compile_options, host_callbacks),
                serialize=lambda executable: serialize(backend, executable),
                target=None if runs_program_code else LoadTarget(options, backend, tuple(executable_devices)),
                serialize_first=lambda: must_be_serialized_first(backend.platform, canonical.content),
                toolchain_files=lambda: surroundings.toolchain_files(backend.platform, options),
                alias=alias,
                located=lambda: stablehlo.bytecode(computation),
                # The processes of one job may all have to compile at once.
                may_wait=jax.distributed.client is None and not describe.span_processes(devices.flat),
            )

        outcome = None
        if late is not None:
            outcome = cache.get_if_stored(lambda: request(late.alias))
            if outcome is None:
                lowered, computation = skipping.missed(late)
        outcome = outcome or cache.get_or_compile(compile_now, request, leave_to_jax)
        if outcome.kind != "uncacheable":
            jax.record_event("/jax/compilation_cache/compile_requests_use_cache")
        if outcome.kind == "hit":
            held = late if late is not None and late.late.stand_in is computation else computation
            anew = _anew(jax, weakref.ref(held), backend, executable_devices, compile_options, host_callbacks)
            show_as_compiled(outcome.executable, anew)
            jax.record_event("/jax/compilation_cache/cache_hits")
            jax.record_duration(
                "/jax/compilation_cache/compile_time_saved_sec", outcome.compile_seconds - outcome.retrieval_seconds
            )
            jax.record_duration("/jax/compilation_cache/cache_retrieval_time_sec", outcome.retrieval_seconds)
        elif outcome.kind == "miss":
            jax.record_event("/jax/compilation_cache/cache_misses")
            jax.note_compile_after_miss()
        return outcome.executable

    return compile_or_get_cached


def _anew(jax: Jax, held: Callable[[], Any], *arguments: Any) -> Callable[[], Any]:
    """Return a function that compiles a program as if there were no cache; it returns None if the program is gone.

    It must not hold the module: jax keeps what was compiled for as long as the module lives.
    """

    def compile_anew() -> Any:
        module = held()
        if module is None:
            return None
        backend, devices, options, host_callbacks = arguments
        module = getattr(module, "lowered", lambda: module)()
        return jax.compiler.backend_compile_and_load(backend, module, devices, options, host_callbacks)

    return compile_anew


def components_of(
    jax: Jax,
    surroundings: describe.Surroundings,
    backend: Any,
    computation: Any,
    devices: tuple[Any, ...],
    serialized_options: bytes,
    host_callbacks: Sequence[Any] = (),
    known_program: str = "",
) -> dict[str, keys.Component]:
    """Return the components of a program's key under jax's present settings; raise UncacheableError without a key."""
    if jax.only_compiles(backend):
        raise UncacheableError("compile-only client")
    if host_callbacks and jax.callbacks_hold_pointers:
        raise UncacheableError("python callback")
    if asks_for_dumps(serialized_options):
        raise UncacheableError("dumps are asked for")
    return surroundings.components(
        backend,
        computation,
        devices,
        serialized_options,
        keep_locations=jax.config.compilation_cache_include_metadata_in_key.value,
        ignore_partitioning_pointer=jax.config.remove_custom_partitioning_ptr_from_cache_key.value,
        callbacks_hold_pointers=jax.callbacks_hold_pointers,
        strip_kernels=jax.strip_kernels,
        extra_flags=jax.custom_key(),
        flag_prefixes=tuple(jax.flag_prefixes()),
        known_program=known_program,
    )


def reason_to_leave_to_jax(jax: Jax, backend: Any, devices: Any, options: Any, pgle_profiler: Any) -> str | None:
    """Return why xcache leaves a compile to jax's own function, or None."""
    config = jax.config
    if sys.is_finalizing():
        # A new thread would never run, and its start would wait for ever.
        return "the interpreter is ending"
    several_processes = describe.span_processes(devices.flat)
    if not config.enable_compilation_cache.value:
        return "jax_enable_compilation_cache is off"
    if (
        pgle_profiler is not None
        or (config.enable_pgle.value and config.pgle_profiling_runs.value > 0)
        or config.compilation_cache_expect_pgle.value
        or options.executable_build_options.fdo_profile
        or options.profile_version > 0
    ):
        return "profile-guided optimization"
    if several_processes and config.share_binary_between_hosts.value and jax.distributed.client is not None:
        return "binary shared between hosts"
    if several_processes and backend.platform in GPU:
        # XLA divides autotuning among the job's processes: one that compiles waits up to a day for one that does not.
        return "GPU program of several processes"
    # jax's own cache may serve such a platform.
    return without_key(backend) or compile_path.replaced(type(backend))
