"""Fork while another thread starts a daemon; the child lives on."""

import os
import sys
import threading
import time

from xcache.client import launcher as launching
from xcache.client.launcher import Launcher
from xcache.config import config

starting = threading.Event()
by_shell, spawn = sys.argv[1] == "by a shell", launching.spawn


def slow_spawn(*arguments):
    # The store's lock and the pipe are open by now, and the process that becomes the daemon is not yet there.
    starting.set()
    time.sleep(0.3)
    if by_shell:
        raise OSError
    spawn(*arguments)


launching.spawn = slow_spawn
launcher = Launcher(config.load())
thread = threading.Thread(target=launcher.start)
thread.start()
starting.wait()
pid = os.fork()
if not pid:
    os.close(1)
    # It can start daemons like anybody.
    assert not launcher.start()
    time.sleep(30)
    os._exit(0)
thread.join()
print(pid, flush=True)
os._exit(0)
