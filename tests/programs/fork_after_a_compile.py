"""Fork after a compile, and use the cache in the child and in the parent."""

import os
import warnings

import jax
import numpy as np

x = np.arange(4.0, dtype=np.float32)
jax.jit(lambda v: v * 2 + 1)(x).block_until_ready()

import xcache

warnings.simplefilter("ignore")
print(xcache.stats().requests, flush=True)
pid = os.fork()
if pid == 0:
    from xcache.process_cache import current
    from xcache.wire.protocol import Get

    # The child has connections of its own; what the parent counted stays known.
    found = current().client.get(Get("ab" * 32, 0.0, "m", "p"))
    print("child", found.lease, flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
jax.jit(lambda v: v - 3)(x).block_until_ready()
print(xcache.stats().requests, xcache.stats().errors)
