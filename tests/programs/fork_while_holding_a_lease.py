"""Fork in the middle of a compile, and die; the child lives on."""

import os
import time

from support.caching import Asking, Gate

from xcache.cache import Cache
from xcache.config import config

cache = Cache(config.load(), "on", "test")
gate = Gate()
holder = Asking(cache, gate)
assert gate.begun.wait(20)
print("holding", flush=True)
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
os.kill(os.getpid(), 9)
