"""Sizes and times of codecs on executables for a CPU, a TPU and a CUDA device; the latter two need not be there.

Prints a table for each. What is compiled is the demo's model; what is timed is a codec alone, in memory, beside the
time that loading the executable takes where it can be loaded.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import zlib
from collections.abc import Callable

os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_LOG_DIR="disabled",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TF_CPP_MIN_LOG_LEVEL="3",
)

import demo_model as model
import jax
import lz4.frame
import numpy as np
import zstandard
from jax.experimental import topologies

from xcache import payload

# An H100, as far as the compiler asks.
GPU = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  device_memory_size: 85899345920
  memory_bandwidth: 3352000000000
  l2_cache_size: 52428800
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "H100"
"""
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]
ROUNDS, SECONDS, BATCH = 5, 3.0, 16


def zstd(level: int, **parameters: int) -> Codec:
    """With what each frame has to have, whatever its level."""
    chosen = zstandard.ZstdCompressionParameters(
        compression_level=level, write_checksum=True, write_content_size=True, **parameters
    )
    return (
        lambda raw: zstandard.ZstdCompressor(compression_params=chosen).compress(raw),
        zstandard.ZstdDecompressor().decompress,
    )


CODECS: dict[str, Codec] = {
    "xcache's own": (payload.compress, zstandard.ZstdDecompressor().decompress),
    "none": (lambda raw: bytes(memoryview(raw)), lambda raw: bytes(memoryview(raw))),
    "lz4": (lambda raw: lz4.frame.compress(raw, content_checksum=True), lz4.frame.decompress),
    "zlib 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress),
    **{f"zstd {level}": zstd(level) for level in (-5, -1, 1, 2, 3, 6, 9)},
    **{f"zstd {level}, wide": zstd(level, window_log=24) for level in (1, 2, 3)},
    "zstd 2, wide, far": zstd(2, window_log=24, enable_ldm=1),
}


def executables(device: jax.Device) -> dict[str, jax.stages.Compiled]:
    """From a sum to a whole training step, compiled for this device."""
    # More than the demo has: what takes long to load is large.
    model.LAYERS = 36
    placed = jax.sharding.SingleDeviceSharding(device)

    def shaped(tree: object) -> object:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), tree)

    parameters = jax.eval_shape(model.initialize, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((BATCH, model.LENGTH + 1), np.int32)
    state = parameters, parameters, parameters, jax.ShapeDtypeStruct((), int)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return {
        "a sum": jax.jit(lambda x: (x * 2 + 1).sum()).lower(shaped(tokens)).compile(),
        "a loss": jax.jit(model.loss_of).lower(*shaped((parameters, tokens, key))).compile(),
        "a training step": model.train_step.lower(*shaped((state, tokens))).compile(),
    }


def measured(raw: bytes) -> dict[str, tuple[int, float, float]]:
    """For each codec its size, and the seconds to compress and to decompress: medians of turns that alternate."""
    packed = {name: compress(raw) for name, (compress, _) in CODECS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    turns, order = list(CODECS), random.Random(0)
    end = time.perf_counter() + SECONDS
    while len(taken[turns[0]]) < ROUNDS or time.perf_counter() < end:
        # What one leaves behind in memory is not always for the same one to find.
        order.shuffle(turns)
        for name in turns:
            compress, decompress = CODECS[name]
            begun = time.perf_counter()
            compress(raw)
            half = time.perf_counter()
            content = decompress(packed[name])
            taken[name].append((half - begun, time.perf_counter() - half))
            assert content == raw
    return {
        name: (len(packed[name]), *(statistics.median(column) for column in zip(*taken[name], strict=True)))
        for name in CODECS
    }


def main() -> None:
    """Table after table."""
    devices = {
        "CPU": jax.devices()[0],
        "TPU v5e": topologies.get_topology_desc("v5e:2x2", "tpu").devices[0],
        "CUDA, H100": topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=GPU).devices[0],
    }
    for place, device in devices.items():
        for name, compiled in executables(device).items():
            executable = compiled.runtime_executable()
            raw = executable.serialize()
            print(f"\n**{place}, {name}**: {len(raw):,} bytes", end="", flush=True)
            if place == "CPU":
                begun = time.perf_counter()
                device.client.deserialize_executable(raw, executable.local_devices(), None)
                print(f", loaded in {(time.perf_counter() - begun) * 1e3:,.1f} ms", end="")
            print("\n\n| codec | of its size | compress, ms | decompress, ms |\n|---|---|---|---|")
            for codec, (size, compress, decompress) in measured(raw).items():
                print(
                    f"| {codec} | {size / len(raw):.3f} | {compress * 1e3:,.2f} | {decompress * 1e3:,.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
