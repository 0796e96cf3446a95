"""The cache that ``xcache.compile`` makes for a process whose code has not switched one on."""

from __future__ import annotations

import contextlib
import threading

from xcache import cache, direct, process_cache


def test_two_threads_that_compile_first_share_one_cache(monkeypatch):
    """A second cache would close the first, and take away the change to jaxlib that it made itself."""
    both = threading.Barrier(2)
    made: list[cache.Cache] = []

    class Made:
        def __init__(self, *arguments):
            # If two threads get here, both do before either cache is in use.
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            self.at_close = contextlib.ExitStack()
            made.append(self)

        def warm_up(self):
            pass

        def close(self):
            self.at_close.close()

    monkeypatch.setattr(cache, "Cache", Made)
    monkeypatch.setattr(process_cache, "_current", None)
    monkeypatch.setattr(process_cache, "_may_be_made", True)
    monkeypatch.setenv("XCACHE", "1")
    used: list[object] = []
    threads = [threading.Thread(target=lambda: used.append(direct._cache())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    process_cache.use_none()
    assert used == made * 2
