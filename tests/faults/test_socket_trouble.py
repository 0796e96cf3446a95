"""A program with many small compiles is right, and loses one allowance at most, whatever happens to the socket."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.marks import thorough
from support.program_files import program_text
from support.small_programs import Running, hardly_noticed

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")


@contextlib.contextmanager
def replaced_by_a_file(path: Path) -> Iterator[None]:
    path.write_text("not a socket")
    yield
    path.unlink()


@contextlib.contextmanager
def replaced_by_a_directory(path: Path) -> Iterator[None]:
    path.mkdir()
    yield
    path.rmdir()


@contextlib.contextmanager
def replaced_by_a_pipe(path: Path) -> Iterator[None]:
    os.mkfifo(path)
    yield
    path.unlink()


@contextlib.contextmanager
def replaced_by_a_link_to_nowhere(path: Path) -> Iterator[None]:
    path.symlink_to(path.parent / "nowhere")
    yield
    path.unlink()


@contextlib.contextmanager
def replaced_by_a_link_to_itself(path: Path) -> Iterator[None]:
    path.symlink_to(path)
    yield
    path.unlink()


@contextlib.contextmanager
def replaced_by_a_socket_that_nobody_accepts_on(path: Path) -> Iterator[None]:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        listener.listen(0)
        # One client fills the queue: the next one is not even connected.
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as first:
            first.connect(str(path))
            yield
    path.unlink()


REPLACEMENTS = [
    replaced_by_a_file,
    replaced_by_a_directory,
    replaced_by_a_pipe,
    replaced_by_a_link_to_nowhere,
    replaced_by_a_link_to_itself,
    replaced_by_a_socket_that_nobody_accepts_on,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "replaced",
    thorough(REPLACEMENTS, usual=(replaced_by_a_socket_that_nobody_accepts_on,)),
    ids=lambda replaced: replaced.__name__,
)
def test_a_socket_that_is(warm, reference, replaced):
    with replaced(warm.socket):
        errors = hardly_noticed(Running(warm).ended(), reference)
    assert errors


REPLACE = """if k == 20:
        os.unlink(os.environ["XCACHE_SOCKET"])
        open(os.environ["XCACHE_SOCKET"], "w").close()
        current().client.abandon()"""


@pytest.mark.slow
def test_a_socket_that_is_replaced_by_a_file_while_the_daemon_runs(warm, reference):
    warm.start_daemon()
    ran = Running(warm, before="from xcache.process_cache import current", between=REPLACE).ended()
    assert hardly_noticed(ran, reference)
    assert ran.stats["hits"] >= 20


@pytest.mark.slow
def test_a_socket_that_is_removed_again_and_again(warm, reference):
    remove = """try: os.unlink(os.environ["XCACHE_SOCKET"])
    except FileNotFoundError: pass
    current().client.abandon()"""
    ran = Running(warm, before="from xcache.process_cache import current", between=remove).ended()
    hardly_noticed(ran, reference)
    assert ran.stats["hits"] >= 1


@as_root
@pytest.mark.slow
def test_a_socket_of_another_user_is_told_nothing(warm, reference):
    # Where anybody may make a file, as in /tmp, a stranger can be there first.
    public = warm.root / "public"
    public.mkdir()
    public.chmod(0o1777)
    warm.root.chmod(0o755)
    warm.socket = path = public / "s"
    command = [sys.executable, "-c", program_text("listen_as_another_user"), str(path), "12345"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=warm.env) as stranger:
        try:
            assert stranger.stdout.readline() == b"listens\n"
            errors = hardly_noticed(Running(warm, XCACHE_SOCKET=str(path)).ended(), reference)
        finally:
            stranger.kill()
    assert set(errors) == {"untrusted socket"}, (warm.dir / "daemon.log").read_text()[-2000:]
