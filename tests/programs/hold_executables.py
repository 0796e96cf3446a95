"""Hold many large executables, count the descriptors they take, and serialize them."""

import json
import os

import jax
import numpy as np

import xcache

x = np.arange(16, dtype=np.float32)
# A constant too large to travel in a frame, so each executable comes as a file.
big = np.random.RandomState(0).bytes(16 * 4096)


def compiled(k):
    table = np.frombuffer(big, np.uint8).reshape(16, -1) + np.uint8(k)
    return jax.jit(lambda v: (v[:, None] * table).sum() + k).lower(x).compile()


held = [compiled(0)]
before = len(os.listdir("/proc/self/fd"))
held += [compiled(k) for k in range(1, 12)]
after = len(os.listdir("/proc/self/fd"))
s = xcache.stats()
print(json.dumps([s.hits, s.bytes_read // max(s.hits, 1) > 32 * 1024, after - before]))


# Each executable serializes to the bytes it was loaded from.
def serialized(executable):
    # Up to jaxlib 0.7 the client serializes executables.
    own = getattr(executable, "serialize", None)
    return own() if own else jax.devices()[0].client.serialize_executable(executable)


assert all(len(serialized(each.runtime_executable())) > 32 * 1024 for each in held)
