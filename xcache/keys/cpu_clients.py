"""Find the number of threads a CPU client was made with: XLA:CPU splits loops into as many parts.

XLA fixes the number when it makes the client, from the processors the thread may use at that moment, ``PJRT_NPROC`` or
``NPROC``, and the client's devices. All of these may have changed when a key is made. The hook therefore watches how
clients are made and counts the threads that appear. For any other client it asks XLA: a serialized executable holds the
number in its configuration. Asking takes a small compile, once for each client.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xcache.errors import UncacheableError
from xcache.keys.protobuf import field_at, varint
from xcache.signals import reraise_if_the_programs

# XLA's upper bound on the threads for the loops of one client, however many processors there are.
_MAX_THREADS = 256
_THREAD_NAME = "tf_XLAEigen"
# serialized executable > module with its configuration > configuration > intra_op_parallelism_threads
_THREADS_FIELD = (1, 1, 2, 12)
_NOTHING = "func.func public @main(%x: tensor<i1>) -> tensor<i1> { return %x : tensor<i1> }"

_known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def threads_of(client: Any) -> int:
    """Return the number of threads ``client`` was made with; raise UncacheableError if XLA does not tell."""
    threads = _known.get(client)
    if threads is None:
        threads = _ask_xla(client)
        if threads is None:
            raise UncacheableError("a CPU client with an unknown number of threads")
        _known[client] = threads
    return threads


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Count the threads of each CPU client that is made while this is open."""
    from jaxlib import xla_client

    # jax and programs of any kind make CPU clients through this function.
    owner, name = xla_client._xla, "get_tfrt_cpu_client"
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    watching = _watching(original)
    setattr(owner, name, watching)
    try:
        yield
    finally:
        if getattr(owner, name) is watching:
            setattr(owner, name, original)


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_tfrt_cpu_client(*arguments: Any, **options: Any) -> Any:
        before = _thread_numbers()
        wanted = _wanted_threads()
        client = original(*arguments, **options)
        try:
            expected = min(max(wanted, client.local_device_count()), _MAX_THREADS)
            # The numbers differ if two clients are made at the same time, or a later XLA has another rule.
            if _count_named(_thread_numbers() - before) == expected:
                _known[client] = expected
        except BaseException as error:  # noqa: BLE001 - the program gets its client in any case
            reraise_if_the_programs(error)
        return client

    return get_tfrt_cpu_client


def _wanted_threads() -> int:
    """Return how many threads XLA would make, called from this thread now, for a client with one device."""
    for name in ("PJRT_NPROC", "NPROC"):
        text = os.environ.get(name, "")
        if re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text):
            return max(0, int(text))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0


def _thread_numbers() -> set[str]:
    """Return the ids of this process's threads, or nothing without /proc."""
    try:
        return {path.name for path in Path("/proc/self/task").iterdir()}
    except OSError:
        return set()


def _count_named(threads: set[str]) -> int:
    """Return how many of these threads bear the name of XLA's threads for loops."""
    count = 0
    for thread in threads:
        # Other threads may end at any moment.
        with contextlib.suppress(OSError):
            count += Path(f"/proc/self/task/{thread}/comm").read_text().strip() == _THREAD_NAME
    return count


def _ask_xla(client: Any) -> int | None:
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    debug = options.executable_build_options.debug_options
    for name in dir(debug):
        # A program that dumps its modules must not find this one among them.
        if name.startswith("xla_dump_") and isinstance(getattr(debug, name), bool):
            setattr(debug, name, False)
    debug.xla_dump_to = ""
    try:
        executable = client.compile_and_load(_NOTHING, xla_client.DeviceList((client.local_devices()[0],)), options)
        raw = executable.serialize() if hasattr(executable, "serialize") else client.serialize_executable(executable)
        return _threads_in(bytes(raw))
    except BaseException as error:  # noqa: BLE001 - whatever XLA throws, the program's own compile may still work
        reraise_if_the_programs(error)
        return None


def _threads_in(raw: bytes) -> int | None:
    """Return the number of threads in a serialized executable, or None if its format is unknown."""
    for starts_with_length in (False, True):
        # Parsing fails for an executable that is cut short or has another format.
        with contextlib.suppress(IndexError, ValueError):
            content = raw
            if starts_with_length:
                # Newer jaxlibs put another message, preceded by its length, before the executable.
                length, after = varint(raw, 0)
                content = raw[after + length :]
            threads = field_at(content, _THREADS_FIELD)
            if isinstance(threads, int) and 0 < threads <= _MAX_THREADS:
                return threads
    return None
