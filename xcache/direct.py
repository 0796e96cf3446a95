"""The same cache for people who call jaxlib directly. Needs jaxlib, and not jax.

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

(jax is there for the arrays; jaxlib 0.10 and newer has no other way to make one.)

A program that calls this wants the cache: unless ``XCACHE`` says otherwise, or ``enable()`` was called with other
settings, it is on.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcache import cache, config, keys
from xcache._version import __version__
from xcache.errors import UncacheableError
from xcache.executables import deserialize, serialize
from xcache.keys import describe

_PORTABLE = b"ML\xefR\rStableHLO_v"


def compile(  # noqa: A001 - it does what jaxlib's own method of this name does
    client: Any, program: Any, devices: Sequence[Any], options: Any = None
) -> Any:
    """A loaded executable of ``program`` on ``devices``, from the cache when it can be had there.

    ``program`` is StableHLO: an ``ir.Module``, MLIR text, MLIR bytecode or a portable artifact. ``options`` are
    jaxlib's ``CompileOptions``; without any, the program is compiled for one replica on each device (SPMD). Only
    jaxlib's own exceptions leave, as from ``client.compile_and_load``.
    """
    from jaxlib import xla_client

    options = _default_options(devices) if options is None else options
    placed = xla_client.DeviceList(tuple(devices))
    module = _module(program)
    bytecode = _bytecode(module)

    def compile_now() -> Any:
        return client.compile_and_load(bytecode, placed, options)

    used = _cache()
    if used is None:
        return compile_now()
    try:
        parts = _surroundings(used.config.dir).components(
            client, module, tuple(devices), options.SerializeAsString(), callbacks_hold_pointers=True
        )
    except UncacheableError as reason:
        used.count_uncacheable(str(reason))
        return compile_now()
    request = cache.Request(
        key=keys.combine({name: part.digest for name, part in parts.items()}),
        module_name=_name(module),
        platform=client.platform,
        device_kind=devices[0].device_kind,
        jaxlib_version=_jaxlib()[1],
        program=parts["program"].content,
        details=lambda: describe.texts(parts),
        compile=compile_now,
        load=lambda raw: deserialize(client, raw, placed, options),
        serialize=lambda executable: serialize(client, executable),
    )
    return used.get_or_compile(request).executable


def _cache() -> cache.Cache | None:
    """The process's cache: the one that is in use, else one of its own, unless ``XCACHE`` is off."""
    used = cache.current()
    if used is None:
        mode = config.mode() if "XCACHE" in os.environ else "on"
        if mode == "off":
            return None
        used = cache.Cache(config.load(), mode, __version__)
        cache.use(used)
        used.warm_up()
    return used


def _module(program: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    if isinstance(program, ir.Module):
        return program
    context = ir.Context()
    registry = ir.DialectRegistry()
    _extension().register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    if isinstance(program, bytes) and program.startswith(_PORTABLE):
        return stablehlo.deserialize_portable_artifact(context, program)
    return ir.Module.parse(program, context)


def _extension() -> Any:
    """The module that registers func, arith and what else jax lowers to; it was renamed in jaxlib 0.7."""
    try:
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext

        return _jax_mlir_ext
    except ImportError:
        from jaxlib.mlir._mlir_libs import register_jax_dialects

        return register_jax_dialects


def _bytecode(module: Any) -> bytes:
    output = io.BytesIO()
    module.operation.write_bytecode(file=output)
    return output.getvalue()


def _name(module: Any) -> str:
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    return str(ir.StringAttr(attributes["sym_name"]).value) if "sym_name" in attributes else "module"


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
    return describe.Surroundings(*_jaxlib(), memo, None)
