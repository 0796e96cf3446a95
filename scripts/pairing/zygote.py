"""Has imported jax, and forks a process for each request: an import costs more than most programs.

jax has no backend here and xcache is not switched on, so that a child is as a process of its own. A program that must
run before the import of jax, or whose jax is another, gets a process of its own instead.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import warnings


def main() -> None:
    """Read requests from stdin, one a line, and say how each child ended."""
    import jax
    import jax.numpy
    import numpy as np  # noqa: F401
    from pairing import child

    import xcache  # noqa: F401 - it imports nothing else yet

    warnings.simplefilter("ignore")
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be in the children"  # noqa: PTH208
    assert not jax._src.xla_bridge.backends_are_initialized()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                null = os.open(os.devnull, os.O_RDONLY)
                os.dup2(null, 0)
                said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                os.environ.update(request["environment"])
                signal.alarm(request["seconds"])
                child.run(request)
                atexit._run_exitfuncs()
                code = 0
            except BaseException:  # noqa: BLE001 - the child ends here, whatever it is
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
