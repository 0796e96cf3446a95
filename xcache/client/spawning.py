"""Start a process that is no child of this program, so that the program's waits and SIGCHLD handler never meet it.

The daemon needs a parent that ends at once. A shell would do, but the shell is a child of the program: another thread's
``os.wait()`` returns it, and its end raises SIGCHLD. A child that ``clone()`` makes with an exit signal of zero does
neither, and only ``waitpid(..., __WALL)`` sees it. Such a child becomes an ordinary one when it calls exec, so the
daemon's parent must not. It runs in the program's memory, as a child of ``vfork()`` does, calls ``posix_spawn()`` and
exits. It runs no Python and takes no lock that another thread could hold.

* ``clone(CLONE_VM | CLONE_VFORK)`` suspends the calling thread until the child has exited. Other threads go on.
* ``clone()`` calls one function with one argument, and ``setcontext()`` is such a function. It continues with the calls
  that ``makecontext()`` has prepared, which may have more arguments: ``posix_spawn()``, then ``_exit()``.
* All memory for these calls is allocated beforehand.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
from collections.abc import Mapping, Sequence

_CLONE_VM, _CLONE_VFORK, _WAIT_ALL = 0x100, 0x4000, 0x40000000
_SETSIGDEF, _SETSIGMASK, _SETSID = 0x04, 0x08, 0x80
# Far more than these functions use.
_STACK_BYTES, _STRUCTURE_BYTES = 256 * 1024, 16 * 1024
# The daemon gets the store's lock and the pipe for its readiness as these descriptors; all from _FIRST_CLOSED_FD close.
LOCK_FD, READY_FD, _FIRST_CLOSED_FD = 3, 4, 5


class _Context(ctypes.Structure):
    """The first fields of glibc's ucontext_t; the others depend on the processor."""

    _fields_ = (
        ("flags", ctypes.c_ulong),
        ("link", ctypes.c_void_p),
        ("stack", ctypes.c_void_p),
        ("stack_flags", ctypes.c_int),
        ("stack_size", ctypes.c_size_t),
        ("rest", ctypes.c_char * _STRUCTURE_BYTES),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return glibc from 2.34 on, on x86-64 Linux, where this was seen to work; else None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        library = ctypes.CDLL(None)
        # Other C libraries lack the first function; glibc has the second since 2.34.
        library.gnu_get_libc_version, library.posix_spawn_file_actions_addclosefrom_np  # noqa: B018
    except (OSError, AttributeError):
        return None
    return library


def can_spawn() -> bool:
    """Return whether ``spawn`` works here."""
    return _library() is not None


def spawn(command: Sequence[str], environment: Mapping[str, str], lock: int, ready: int) -> None:
    """Start a command in its own session and in ``/``, with ``lock`` as 3 and ``ready`` as 4 and stderr.

    The command has no other open descriptor but /dev/null as 0 and 1, and no signal is blocked or ignored. Both given
    descriptors must be above 4. Raise OSError if the process could not be started.
    """
    library = _library()
    if library is None:
        raise OSError(0, "needs glibc")
    actions, attributes, masked = (ctypes.create_string_buffer(_STRUCTURE_BYTES) for _ in range(3))
    spawned = ctypes.c_int(0)
    arguments = _strings(command)
    variables = _strings([f"{name}={value}" for name, value in environment.items()])
    path = os.fsencode(command[0])

    def call(function: str, *given: object) -> None:
        if code := getattr(library, function)(*given):
            raise OSError(code, os.strerror(code))

    call("posix_spawn_file_actions_init", actions)
    call("posix_spawnattr_init", attributes)
    try:
        call("posix_spawn_file_actions_addopen", actions, 0, b"/dev/null", os.O_RDWR, 0)
        for source, target in ((0, 1), (ready, 2), (lock, LOCK_FD), (ready, READY_FD)):
            call("posix_spawn_file_actions_adddup2", actions, source, target)
        call("posix_spawn_file_actions_addclosefrom_np", actions, _FIRST_CLOSED_FD)
        call("posix_spawn_file_actions_addchdir_np", actions, b"/")
        library.sigemptyset(masked)
        call("posix_spawnattr_setsigmask", attributes, masked)
        library.sigfillset(masked)
        call("posix_spawnattr_setsigdefault", attributes, masked)
        call("posix_spawnattr_setflags", attributes, ctypes.c_short(_SETSIGDEF | _SETSIGMASK | _SETSID))
        _spawn_from_clone(library, (ctypes.byref(spawned), path, actions, attributes, arguments, variables))
    finally:
        library.posix_spawn_file_actions_destroy(actions)
        library.posix_spawnattr_destroy(attributes)
    if not spawned.value:
        raise OSError(0, f"{command[0]} cannot be run")


def _spawn_from_clone(library: ctypes.CDLL, arguments: tuple[object, ...]) -> None:
    """Call ``posix_spawn`` with these arguments in a child that no other wait sees, and reap that child."""
    leaves, spawns = _Context(), _Context()
    stacks = [ctypes.create_string_buffer(_STACK_BYTES) for _ in range(3)]
    child = 0
    # No signal handler of this process may run in the child, which inherits this thread's mask and gets the contexts'.
    # The mask is read before it is changed, because a handler's exception surfaces in the call that changes it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for context, stack, link in ((leaves, stacks[0], None), (spawns, stacks[1], ctypes.addressof(leaves))):
            library.getcontext(ctypes.byref(context))
            context.link, context.stack, context.stack_size = link, ctypes.addressof(stack), _STACK_BYTES
        library.makecontext(ctypes.byref(leaves), library._exit, 1, 0)
        library.makecontext(ctypes.byref(spawns), library.posix_spawn, len(arguments), *arguments)
        top = ctypes.c_void_p(ctypes.addressof(stacks[2]) + _STACK_BYTES)
        child = library.clone(library.setcontext, top, _CLONE_VM | _CLONE_VFORK, ctypes.byref(spawns))
    finally:
        if child > 0:
            os.waitpid(child, _WAIT_ALL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _strings(words: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)
