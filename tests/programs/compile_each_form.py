"""Compile a program through jaxlib in each form that it may have."""

import io
import json

import jax
import numpy as np
from jax import export

import xcache

x = np.arange(4.0, dtype=np.float32)
lowered = jax.jit(lambda v: v * 2 + 1).lower(x)
module = lowered.compiler_ir("stablehlo")
bytecode = io.BytesIO()
module.operation.write_bytecode(file=bytecode)
portable = export.export(jax.jit(lambda v: v * 2 + 1))(x).mlir_module_serialized
device = jax.devices()[0]
for program in (module, str(module), bytecode.getvalue(), portable):
    executable = xcache.compile(device.client, program, [device])
    (result,) = executable.execute_sharded([jax.device_put(x)]).disassemble_into_single_device_arrays()
    assert np.asarray(result[0]).tolist() == [1, 3, 5, 7]
    xcache.stats()
print(json.dumps([xcache.stats().hits, xcache.stats().misses, xcache.stats().errors]))
