"""Daemons that share entries by remote tiers, each as if it were on a machine of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

from support.conversation import key_of, talking
from support.places import Place, new_place, until
from support.program_files import program_path
from support.signing import OURS
from xcache.wire import protocol
from xcache.wire.signatures import PrivateKey

# Seconds that a program waits for the tiers: more than any busy machine takes, and less where a tier never answers.
_PATIENCE = 30.0
BOUND = 3.0
_TRAINING_SECONDS = 150
KEY, CONTENT = key_of("shared"), b"an executable"


@contextlib.contextmanager
def host(
    *tiers: str,
    signer: PrivateKey | None = OURS,
    trusts: tuple[object, ...] = (OURS.public,),
    under: tuple[str, ...] = (),
    **settings: str,
) -> Iterator[Place]:
    """Give a place whose daemon shares by these tiers."""
    with new_place() as place:
        keys = place.root / "config" / "xcache"
        keys.mkdir(parents=True, mode=0o700)
        if signer is not None:
            (keys / "signing-key").write_text(signer.line())
            (keys / "signing-key").chmod(0o600)
        trust(place, *trusts)
        place.env |= {"XCACHE_REMOTE": " ".join(tiers), "XCACHE_REMOTE_TIMEOUT": f"{_PATIENCE}s"} | settings
        place.start_daemon(*under)
        yield place


def trust(place: Place, *lines: object) -> None:
    """Have the daemon trust these keys."""
    path = place.root / "config" / "xcache" / "trusted-keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o644)


def train(place: Place) -> dict[str, object]:
    """Run the training program on a host, and return what it says."""
    done = subprocess.run(
        [sys.executable, program_path("train_a_little")],
        env=place.env | {"XCACHE": "1", "JAX_PLATFORMS": "cpu"},
        cwd=place.root,
        capture_output=True,
        text=True,
        timeout=_TRAINING_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said: dict[str, object] = json.loads(done.stdout)
    assert said.pop("errors") == {}
    return said


def remote_of(place: Place) -> dict[str, protocol.Scalar]:
    """Return the state of the one tier."""
    found: list[dict[str, protocol.Scalar]] = []

    def ask() -> list[dict[str, protocol.Scalar]]:
        with talking(place) as talk:
            status = talk.ask(protocol.AskStatus())
        assert isinstance(status, protocol.Status)
        found[:] = status.remotes
        return found

    # It is not there before its engine is imported.
    assert until(ask)
    (one,) = found
    return one


def put_and_upload(place: Place, key: str = KEY, content: bytes = CONTENT, **changes: object) -> None:
    """Store an entry, and wait until the tier has it."""
    with talking(place) as talk:
        assert talk.put(key, content, **changes) == protocol.Stored(True)
    assert until(lambda: not remote_of(place)["waiting"])


@contextlib.contextmanager
def silent_host() -> Iterator[Place]:
    """Give a place whose daemon has a tier that never answers."""
    with silent_server() as port, host(f"redis://127.0.0.1:{port}", XCACHE_REMOTE_TIMEOUT=f"{BOUND}s") as here:
        yield here


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """Accept connections, and never answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]
