"""Spawn shells while other threads allocate, fork and wait for children, and signals keep coming."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import warnings

from xcache.client import spawning

warnings.simplefilter("ignore")
rounds, threads = int(sys.argv[1]), 4
stop = threading.Event()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def allocates():
    while not stop.is_set():
        for block in [libc.malloc(37 * n + 1) for n in range(200)]:
            libc.free(block)


def has_children():
    while not stop.is_set():
        assert subprocess.run(["/bin/true"]).returncode == 0
        pid = os.fork()
        if not pid:
            os._exit(7)
        assert os.waitpid(pid, 0) == (pid, 7 << 8)
        stop.wait(0.01)


signal.signal(signal.SIGALRM, lambda number, frame: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0017)
others = [threading.Thread(target=target) for target in (allocates, allocates, has_children)]


def spawns():
    for n in range(rounds // threads):
        reading, writing = os.pipe()
        ready = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(writing)
        lock = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10)
        spawning.spawn(["/bin/sh", "-c", f"echo {n} >&4"], {}, lock, ready)
        os.close(lock)
        os.close(ready)
        with open(reading) as said:
            assert said.read() == f"{n}\n"
        done.append(n)


done = []
spawning_ones = [threading.Thread(target=spawns) for _ in range(threads)]
for thread in [*others, *spawning_ones]:
    thread.start()
for thread in spawning_ones:
    thread.join()
stop.set()
for thread in others:
    thread.join()
signal.setitimer(signal.ITIMER_REAL, 0)
try:
    os.wait()
except ChildProcessError:
    print(len(done), len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
