"""What stands in place of jax's ``compile_or_get_cached``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from xcache import keys, stablehlo
from xcache.cache import Cache
from xcache.errors import UncacheableError
from xcache.executables import deserialize, iterate_once, must_be_serialized_first, serialize
from xcache.hook.jax_versions import Jax
from xcache.keys import describe
from xcache.request import Ahead, Request

logger = logging.getLogger("xcache")


def wrap(
    original: Callable[..., Any], jax: Jax, cache: Cache, surroundings: describe.Surroundings
) -> Callable[..., Any]:
    """A function that does what ``original`` does, from the cache when it can."""
    said = False

    def compile_or_get_cached(
        backend: Any,
        computation: Any,
        devices: Any,
        compile_options: Any,
        host_callbacks: Sequence[Any],
        executable_devices: Any,
        pgle_profiler: Any = None,
    ) -> Any:
        nonlocal said
        iterate_once(executable_devices)
        reason = _not_ours(jax, devices, compile_options, pgle_profiler)
        if reason is not None:
            cache.count_uncacheable(reason)
            return original(
                backend, computation, devices, compile_options, host_callbacks, executable_devices, pgle_profiler
            )
        if not said:
            said = True
            jax.record_event("/jax/compilation_cache/tasks_using_cache")
            if jax.config.compilation_cache_dir.value:
                logger.debug("jax's own cache in %s is bypassed", jax.config.compilation_cache_dir.value)
        if dumped_to := jax.dump_module(computation):
            jax.compiler.logger.info("Dumped the module to %s.", dumped_to)

        def compile_now() -> Any:
            # Looked up at the call: whoever replaced it in jax means this one too.
            return jax.compiler.backend_compile_and_load(
                backend, computation, executable_devices, compile_options, host_callbacks
            )

        def request() -> Request:
            if isinstance(backend, jax.compile_only_client):
                raise UncacheableError("compile-only client")
            if host_callbacks and jax.callbacks_hold_pointers:
                raise UncacheableError("python callback")
            options = compile_options.SerializeAsString()
            parts = surroundings.components(
                backend,
                computation,
                tuple(devices.flat),
                options,
                keep_locations=jax.config.compilation_cache_include_metadata_in_key.value,
                ignore_partitioning_pointer=jax.config.remove_custom_partitioning_ptr_from_cache_key.value,
                callbacks_hold_pointers=jax.callbacks_hold_pointers,
                strip_kernels=jax.strip_kernels,
                extra_flags=jax.custom_key(),
                flag_prefixes=tuple(jax.flag_prefixes()),
            )
            return Request(
                key=keys.combine(parts),
                module_name=stablehlo.name(computation),
                platform=backend.platform,
                device_kind=devices.flat[0].device_kind,
                jaxlib_version=jax.jaxlib_version,
                program=parts["program"].content,
                details=lambda: describe.texts(parts),
                load=lambda raw: deserialize(backend, raw, executable_devices, compile_options, host_callbacks),
                serialize=lambda executable: serialize(backend, executable),
                # What has callbacks into the program cannot be loaded without them.
                ahead=None if host_callbacks else Ahead(options, tuple(device.id for device in executable_devices)),
                serialize_first=lambda: must_be_serialized_first(backend.platform, parts["program"].content),
                toolchain_files=lambda: surroundings.toolchain_files(backend.platform),
                # A compile on several processes at once may need all of them to be at it.
                may_wait=jax.distributed.client is None,
            )

        outcome = cache.get_or_compile(compile_now, request)
        if outcome.kind != "uncacheable":
            jax.record_event("/jax/compilation_cache/compile_requests_use_cache")
        if outcome.kind == "hit":
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


def _not_ours(jax: Jax, devices: Any, options: Any, pgle_profiler: Any) -> str | None:
    """Why a compile is jax's own business from beginning to end, or None."""
    config = jax.config
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
    if config.share_binary_between_hosts.value and jax.distributed.client is not None:
        processes = {device.process_index for device in devices.flat}
        if len(processes) > 1:
            return "binary shared between hosts"
    return None
