"""Compile in another thread wherever jax may iterate over a list of devices for the first time."""

import faulthandler
import gc
import linecache
import sys
import threading

import jax
import numpy as np

faulthandler.enable()
x = np.arange(8.0, dtype=np.float32)
programs = [jax.jit(lambda v, k=k: (v * k + 1).sum()).lower(x) for k in range(12)]
done, others = [], []


def work(program):
    done.append(float(program.compile()(x)))


# The garbage collector runs wherever a list of devices may be iterated over for the first time.
def collecting(phase, info):
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    iterates = "iter(devices)" in line or "in executable_devices" in line or "in device_list" in line
    # Not current_thread(), which would make an object for each of XLA's own threads.
    if threading.get_ident() == first.ident and iterates and phase == "start" and len(programs) > 1:
        others.append(threading.Thread(target=work, args=(programs.pop(),)))
        others[-1].start()
        # It may have to wait for this one.
        others[-1].join(0.2)


first = threading.Thread(target=work, args=(programs[0],))
gc.callbacks.append(collecting)
# A collection takes a moment only: while another thread collects, none begins here.
gc.freeze()
gc.set_threshold(1)
first.start()
first.join()
gc.callbacks.remove(collecting)
gc.set_threshold(700)
for thread in others:
    thread.join()
for program in programs[1:]:
    work(program)
# From 3.12 on it never runs in the middle of a call to jaxlib.
assert others or sys.version_info >= (3, 12)
print(sorted(done))
