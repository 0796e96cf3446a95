"""Compile one program for three CPU clients, the first and the last of which are alike."""

import os

from jaxlib import xla_client

import xcache

program = """
func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %y = stablehlo.add %x, %x : tensor<3xf32>
  return %y : tensor<3xf32>
}"""
for threads in ("2", "3", "2"):
    os.environ["PJRT_NPROC"] = threads
    client = xla_client.make_cpu_client()
    # It is the client that counts.
    del os.environ["PJRT_NPROC"]
    xcache.compile(client, program, client.devices()[:1])
print(xcache.stats().hits)
