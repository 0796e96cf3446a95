"""In a user namespace, the kernel gives strangers and unmapped users one number: nobody with that number is trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.places import Place

from xcache.wire.ownership import overflow_uids

STRANGER = 54321
UNMAPPED = ["unshare", "--user"]
ROOT_ALONE = ["unshare", "--user", "--map-root-user"]

# A stranger listens in the place of the socket: it notes each client that connects, and answers none.
PLANTED = """
import os, socket, sys
os.setgid(54321)
os.setuid(54321)
listener = socket.socket(socket.AF_UNIX)
os.umask(0)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
while True:
    listener.accept()[0].close()
    print("somebody came", flush=True)
"""
PROGRAM = """
import os, jax
print(os.getuid(), float(jax.jit(lambda v: v * 3 + 1)(2.0)))
"""


@pytest.fixture
def stranger(place) -> Iterator[subprocess.Popen[str]]:
    """Another user's daemon, where the program looks for its own."""
    tried = subprocess.run([*UNMAPPED, "true"], capture_output=True, text=True)
    if os.getuid() != 0 or tried.returncode:
        pytest.skip(f"needs root and user namespaces: {tried.stderr}")
    place.root.chmod(0o755)
    planted = place.root / "planted"
    planted.mkdir()
    os.chown(planted, STRANGER, STRANGER)
    place.env["XCACHE_SOCKET"] = str(planted / "s")
    with subprocess.Popen(
        [sys.executable, "-c", PLANTED, str(planted / "s")], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


def run_in(namespace: list[str], place: Place, program: str) -> tuple[str, str]:
    result = subprocess.run(
        [*namespace, sys.executable, "-c", program],
        env=place.env | {"XCACHE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def nobody_came(process: subprocess.Popen[str]) -> bool:
    process.kill()
    return process.stdout.read() == ""


def test_a_program_that_has_the_number_of_strangers_gets_no_cache(place, stranger):
    (nobody,) = overflow_uids()
    said, warned = run_in(UNMAPPED, place, PROGRAM)
    assert said == f"{nobody} 7.0\n"
    assert f"runs as uid {nobody}, which the kernel also reports" in warned
    assert warned.endswith("; xcache is off\n")
    assert warned.count("\n") == 1
    assert nobody_came(stranger)
    assert not place.dir.exists()


def test_strangers_are_not_trusted_where_oneself_has_a_number(place, stranger):
    (nobody,) = overflow_uids()
    said, warned = run_in(ROOT_ALONE, place, PROGRAM)
    assert said == "0 7.0\n"
    assert f"belongs to another user (uid {nobody})" in warned
    assert nobody_came(stranger)


def test_no_daemon_serves_strangers_as_oneself(place, stranger):
    result = subprocess.run(
        [*UNMAPPED, sys.executable, "-m", "xcached"], env=place.env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "the kernel also reports for every user" in result.stderr
