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
from xcache.hook.collecting import Asked, stop_if_collecting
from xcache.hook.jax_versions import Jax
from xcache.hook.skipping import NEVER, Lowered, Never, Skipping
from xcache.hook.stages import Stages
from xcache.keys import custom_calls, describe, stablehlo
from xcache.keys.options import asks_for_dumps
from xcache.keys.platform import GPU, without_key
from xcache.request import Alias, LoadTarget, Outcome, Request

logger = logging.getLogger("xcache")

_PROFILE_GUIDED = "profile-guided optimization"


def wrap(
    original: Callable[..., Any],
    jax: Jax,
    cache: Cache,
    surroundings: describe.Surroundings,
    stages: Stages,
    skipping: Skipping | Never = NEVER,
) -> Callable[..., Any]:
    """Return a function that does what ``original`` does, from the cache if possible."""
    compiling = _Compiling(original, jax, cache, surroundings, stages, skipping)

    @functools.wraps(original)
    def compile_or_get_cached(*arguments: Any, **options: Any) -> Any:
        asked = Asked(*arguments, **options)
        stop_if_collecting(skipping, asked)
        with cache.ledger.asking():
            return compiling.compile_or_get(asked)

    return compile_or_get_cached


class _Compiling:
    """Compiles programs as jax's own function does, or gets them from the cache."""

    def __init__(
        self,
        original: Callable[..., Any],
        jax: Jax,
        cache: Cache,
        surroundings: describe.Surroundings,
        stages: Stages,
        skipping: Skipping | Never,
    ) -> None:
        self._original, self._jax, self._cache = original, jax, cache
        self._surroundings, self._stages, self._skipping = surroundings, stages, skipping
        self._has_logged = False

    def compile_or_get(self, asked: Asked) -> Any:
        """Return the executable of a program."""
        backend, computation, devices, compile_options, host_callbacks, executable_devices, pgle_profiler = asked
        iterate_once(executable_devices)
        reason = reason_to_leave_to_jax(self._jax, backend, devices, compile_options, pgle_profiler)
        late = self._skipping.late(computation)
        lowered = self._skipping.take_lowered(computation)
        self._stages.describe(lambda: stablehlo.name(computation) if late is None else late.alias.module_name)
        if late is not None and (reason is not None or self._skipping.is_watched()):
            asked, late = asked._replace(computation=late.lowered()), None
        if reason is not None:
            self._cache.count_uncacheable(reason)
            self._cache.check_guard()
            with self._cache.ledger.stage("compile"):
                return self._original(*asked)
        outcome = None
        if late is not None:
            outcome = self._cache.get_if_stored(lambda: self._request(asked, None, late.alias))
            if outcome is None:
                lowered, module = self._skipping.missed(late)
                asked = asked._replace(computation=module)
        if outcome is None:
            outcome = self._cache.get_or_compile(
                lambda: self._compile_now(asked),
                lambda: self._request(asked, lowered, None),
                # As without xcache: jax's own cache may have the program.
                lambda: self._original(*asked),
                has_another=bool(self._jax.config.compilation_cache_dir.value),
            )
        if outcome.kind == "hit":
            held = late if late is not None and late.late.stand_in is asked.computation else asked.computation
            anew = _anew(self._jax, weakref.ref(held), backend, executable_devices, compile_options, host_callbacks)
            show_as_compiled(outcome.executable, anew)
        if outcome.kind in ("hit", "miss"):
            self._note_use()
        _tell(self._jax, outcome)
        return outcome.executable

    def _compile_now(self, asked: Asked) -> Any:
        # Look it up at each call: the program may have replaced it in jax.
        return self._jax.compiler.backend_compile_and_load(
            asked.backend, asked.computation, asked.executable_devices, asked.compile_options, asked.host_callbacks
        )

    def _request(self, asked: Asked, lowered: Lowered | None, alias: Alias | None) -> Request:
        """Return the request for the module, or for the program that its alias names."""
        backend, computation, devices, compile_options, host_callbacks, executable_devices, _ = asked
        jax, surroundings = self._jax, self._surroundings
        options = compile_options.SerializeAsString()
        known = "" if alias is None else alias.program
        parts = components_of(
            jax, surroundings, backend, computation, tuple(devices.flat), options, host_callbacks, known
        )
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
            alias = self._skipping.checked_alias(lowered, computation, parts, name)
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

    def _note_use(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            self._jax.record_event("/jax/compilation_cache/tasks_using_cache")
            if folder := self._jax.config.compilation_cache_dir.value:
                logger.debug("jax's own cache in %s is bypassed", folder)


def _tell(jax: Jax, outcome: Outcome) -> None:
    """Give the events that jax's own cache gives."""
    if outcome.kind in ("hit", "miss"):
        jax.record_event("/jax/compilation_cache/compile_requests_use_cache")
    if outcome.kind == "hit":
        saved = outcome.compile_seconds - outcome.retrieval_seconds
        jax.record_event("/jax/compilation_cache/cache_hits")
        jax.record_duration("/jax/compilation_cache/compile_time_saved_sec", saved)
        jax.record_duration("/jax/compilation_cache/cache_retrieval_time_sec", outcome.retrieval_seconds)
    elif outcome.kind == "miss":
        jax.record_event("/jax/compilation_cache/cache_misses")
        jax.note_compile_after_miss()


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
    several_processes = describe.span_processes(devices.flat)
    if pgle_profiler is not None or options.executable_build_options.fdo_profile or options.profile_version > 0:
        return _PROFILE_GUIDED
    if several_processes and jax.config.share_binary_between_hosts.value and jax.distributed.client is not None:
        return "binary shared between hosts"
    if several_processes and backend.platform in GPU:
        # XLA divides autotuning among the job's processes: one that compiles waits up to a day for one that does not.
        return "GPU program of several processes"
    return reason_to_leave_all_to_jax(jax, backend)


def reason_to_leave_all_to_jax(jax: Jax, backend: Any) -> str | None:
    """Return why xcache leaves all compiles for a client to jax's own function as things stand, or None."""
    config = jax.config
    if sys.is_finalizing():
        # A new thread would never run, and its start would wait for ever.
        return "the interpreter is ending"
    if not config.enable_compilation_cache.value:
        return "jax_enable_compilation_cache is off"
    if (config.enable_pgle.value and config.pgle_profiling_runs.value > 0) or (
        config.compilation_cache_expect_pgle.value
    ):
        return _PROFILE_GUIDED
    # jax's own cache may serve such a platform.
    return without_key(backend) or compile_path.replaced(type(backend))
