"""Start a daemon by a shell while a handler of SIGCHLD waits for any child."""

import os
import signal

from xcache.client import launcher
from xcache.config import config


def cannot(*arguments):
    raise OSError


launcher.spawn = cannot
heard = []


def reap(number, frame):
    heard.append(number)
    os.wait()


signal.signal(signal.SIGCHLD, reap)
# A handler that waits would wait for this one, which goes on.
child = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
starting = launcher.Launcher(config.load())
assert starting.start()
starting.wait(30)
starting.close()
print(heard)
os.kill(child, signal.SIGKILL)
while not heard:
    signal.pause()
print(len(heard))
