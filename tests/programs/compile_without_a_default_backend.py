"""Compile for a client of the program's own; jax never makes a backend."""

import jax  # noqa: F401  # xcache finds it there when it is enabled
import numpy as np

import xcache
from xcache.prefetch import prefetcher

prefetcher._ON_TRUST_SECONDS = 1000.0
xcache.enable()
from jax._src import compiler, xla_bridge
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jaxlib import xla_client

own = xla_client.make_cpu_client()


def compiled(k):
    text = f"""
    module @m{k} {{
      func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {{
        %c = stablehlo.constant dense<{k}.0> : tensor<3xf32>
        %y = stablehlo.add %x, %c : tensor<3xf32>
        return %y : tensor<3xf32>
      }}
    }}"""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        options = compiler.get_compile_options(1, 1, device_assignment=np.array([[0]]))
        devices = np.array(own.local_devices()[:1])
        return compiler.compile_or_get_cached(own, module, devices, options, [], xla_client.DeviceList(tuple(devices)))


for k in range(4):
    compiled(k)
assert not xla_bridge._backends
s = xcache.stats()
print(s.hits, s.misses, s.prefetched)
