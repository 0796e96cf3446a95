"""Enable xcache in two threads at once, and disable it."""

import threading

from jax._src import compiler

import xcache

original = compiler.compile_or_get_cached
for attempt in range(5):
    together = threading.Barrier(2)

    def switch_on(together=together):
        together.wait(20)
        xcache.enable()

    threads = [threading.Thread(target=switch_on) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    xcache.disable()
    assert compiler.compile_or_get_cached is original, attempt
