"""Compile the same program in five threads at once."""

import json
import threading

import jax
import jax.numpy as jnp

import xcache


def lowered():
    def f(x):
        for i in range(60):
            x = jnp.tanh(x @ x) * (i + 1)
        return x

    return jax.jit(f).lower(jnp.ones((16, 16)))


# One each: jax itself would compile the same one once.
programs = [lowered() for _ in range(5)]
before = xcache.stats()
barrier = threading.Barrier(5)


def work(program):
    barrier.wait()
    done.append(program.compile())


done = []
threads = [threading.Thread(target=work, args=(program,)) for program in programs]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stats = xcache.stats()
results = {float(compiled(jnp.ones((16, 16))).sum()) for compiled in done}
print(json.dumps([len(done), len(results), stats.misses - before.misses, stats.hits - before.hits]))
