"""Sizes and times of codecs on executables for a CPU, a TPU and a CUDA device; the latter two need not be there.

Prints a table for each. It compiles the demo's model and times each codec alone, in memory. Beside that stands the
time to load the executable, where it can be loaded.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path

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

from xcache.wire import envelope

GPU = (Path(__file__).parent / "h100.textproto").read_text()
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]
ROUNDS, SECONDS, BATCH = 5, 3.0, 16


def zstd(level: int, **parameters: int) -> Codec:
    """Return zstd at a level, with the checksum and size that each frame must have."""
    chosen = zstandard.ZstdCompressionParameters(
        compression_level=level, write_checksum=True, write_content_size=True, **parameters
    )
    return (
        lambda raw: zstandard.ZstdCompressor(compression_params=chosen).compress(raw),
        zstandard.ZstdDecompressor().decompress,
    )


CODECS: dict[str, Codec] = {
    "xcache's own": (envelope.compress, zstandard.ZstdDecompressor().decompress),
    "none": (lambda raw: bytes(memoryview(raw)), lambda raw: bytes(memoryview(raw))),
    "lz4": (lambda raw: lz4.frame.compress(raw, content_checksum=True), lz4.frame.decompress),
    "zlib 1": (lambda raw: zlib.compress(raw, 1), zlib.decompress),
    **{f"zstd {level}": zstd(level) for level in (-5, -1, 1, 2, 3, 6, 9)},
    **{f"zstd {level}, wide": zstd(level, window_log=24) for level in (1, 2, 3)},
    "zstd 2, wide, far": zstd(2, window_log=24, enable_ldm=1),
}


def executables(device: jax.Device) -> dict[str, jax.stages.Compiled]:
    """Compile, for this device, programs from a sum to a whole training step."""
    # More layers than the demo has, for a large executable: those take long to load.
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
    """Return for each codec the size, and the median seconds to compress and to decompress, in turns that alternate."""
    packed = {name: compress(raw) for name, (compress, _) in CODECS.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    turns, order = list(CODECS), random.Random(0)
    end = time.perf_counter() + SECONDS
    while len(taken[turns[0]]) < ROUNDS or time.perf_counter() < end:
        # The order changes, so that no codec always runs on the memory that the same other one left.
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
    """Print the tables, one for each device."""
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
