"""Start a daemon while a thread waits for any child, and a handler of SIGCHLD does."""

import os
import signal
import threading

from xcache.client.launcher import Launcher
from xcache.config import config

heard, waited = [], []
signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(os.wait()))
reading, writing = os.pipe()
child = os.posix_spawn(
    "/bin/sh",
    ["sh", "-c", "read x; exit 7"],
    os.environ,
    file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_CLOSE, writing)],
)
thread = threading.Thread(target=lambda: waited.append(os.wait()))
thread.start()
launcher = Launcher(config.load())
assert launcher.start()
launcher.wait(30)
launcher.close()
print(heard, waited)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
os.close(writing)
thread.join()
print(waited == [(child, 7 << 8)])
