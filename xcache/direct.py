"""The cache for programs that call jaxlib directly. It needs jaxlib, but not jax.

    import jax
    import xcache

    program = '''
    func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %y = stablehlo.add %x, %x : tensor<3xf32>
      return %y : tensor<3xf32>
    }'''
    devices = jax.devices()[:1]
    executable = xcache.compile(devices[0].client, program, devices)
    results = executable.execute_sharded([jax.numpy.arange(3.0)])
    print(results.disassemble_into_single_device_arrays()[0][0])  # [0. 2. 4.]

(The example uses jax for the arrays, because jaxlib 0.10 and newer cannot make one without it.)

Calling this turns the cache on, unless ``XCACHE`` says otherwise or ``disable()`` was called. ``enable()`` gives it
other settings.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcache import cache, keys, logs, process_cache
from xcache._version import __version__
from xcache.config import config
from xcache.errors import UncacheableError, XcacheError
from xcache.executables import deserialize, must_be_serialized_first, serialize
from xcache.keys import describe, stablehlo
from xcache.keys.options import asks_for_dumps
from xcache.keys.platform import GPU
from xcache.recording import place_of
from xcache.request import Request


def compile(  # noqa: A001 - it does what jaxlib's own method of this name does
    client: Any, program: Any, devices: Sequence[Any], options: Any = None
) -> Any:
    """Return a loaded executable of ``program`` on ``devices``, from the cache if possible.

    ``program`` is StableHLO: an ``ir.Module``, MLIR text, MLIR bytecode or a portable artifact. ``options`` are
    jaxlib's ``CompileOptions``; without any, the program is compiled for one replica on each device (SPMD). Only
    jaxlib's own exceptions leave, as from ``client.compile_and_load``.
    """
    from jaxlib import xla_client

    options = _default_options(devices) if options is None else options
    placed = xla_client.DeviceList(tuple(devices))
    module = stablehlo.parse(program)
    bytecode = stablehlo.bytecode(module)

    def compile_now() -> Any:
        return client.compile_and_load(bytecode, placed, options)

    used = _cache()
    if used is None:
        return compile_now()
    site = place_of(sys._getframe(1))

    def request() -> Request:
        surroundings = _surroundings(used.config.own_dir)
        serialized = options.SerializeAsString()
        if asks_for_dumps(serialized):
            raise UncacheableError("dumps are asked for")
        parts = surroundings.components(client, module, tuple(devices), serialized, callbacks_hold_pointers=True)
        return Request(
            key=keys.combine(parts),
            module_name=stablehlo.name(module),
            platform=client.platform,
            device_kind=devices[0].device_kind,
            jaxlib_version=_jaxlib()[1],
            program=parts["program"].content,
            details=lambda: describe.texts(parts),
            load=lambda raw: deserialize(client, raw, placed, options),
            serialize=lambda executable: serialize(client, executable),
            serialize_first=lambda: must_be_serialized_first(client.platform, parts["program"].content),
            toolchain_files=lambda: surroundings.toolchain_files(client.platform, serialized),
            # The processes of one job may all have to compile at once.
            may_wait=not describe.span_processes(client.devices()),
        )

    with used.ledger.asking() as asked:
        asked.module_name, asked.site = stablehlo.name(module), site
        if client.platform in GPU and describe.span_processes(devices):
            # As in the jax hook: a process that compiles would wait for others that do not.
            used.count_uncacheable("GPU program of several processes")
            used.check_guard()
            with used.ledger.stage("compile"):
                return compile_now()
        return used.get_or_compile(compile_now, request).executable


def _cache() -> cache.Cache | None:
    """Return the process's cache, made here if need be; None if ``XCACHE`` or the program's code turned it off."""
    if process_cache.current() is None and process_cache.may_be_made():
        with process_cache.switching:
            # Another thread may have made one meanwhile, or switched it off.
            if process_cache.current() is None and process_cache.may_be_made():
                return _own_cache()
    return process_cache.current()


def _own_cache() -> cache.Cache | None:
    try:
        mode = config.mode() if "XCACHE" in os.environ else "on"
        if mode == "off":
            return None
        settings = config.load()
        used = cache.Cache(settings, mode, __version__)
    except XcacheError as error:
        _complain(str(error))
        return None
    process_cache.use(used)
    used.at_close.enter_context(logs.shown(settings))
    used.warm_up()
    return used


@functools.cache
def _complain(error: str) -> None:
    """Warn once per error."""
    logs.complain("%s; xcache is off", error)


def _default_options(devices: Sequence[Any]) -> Any:
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    options.executable_build_options.use_spmd_partitioning = len(devices) > 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return options


def _jaxlib() -> tuple[Path, str]:
    import jaxlib

    return Path(jaxlib.__file__).parent, jaxlib.__version__


@functools.lru_cache(maxsize=4)
def _surroundings(memo: Path) -> describe.Surroundings:
    return describe.Surroundings(*_jaxlib(), memo)
