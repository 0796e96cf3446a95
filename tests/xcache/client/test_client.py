"""The client and a real daemon: entries that were put are got, through restarts, threads and forks."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path

import pytest
from support.marks import thorough
from support.places import digest, get_message, put_message, until

from xcache.client.client import Client
from xcache.client.launcher import Launcher
from xcache.errors import ConnectionLostError, DamagedError, RefusedError, UnavailableError, XcacheError
from xcache.wire import protocol
from xcache.wire.envelope import open_sealed, seal


def key_of(name: str) -> str:
    return digest(name.encode())


def noise(size: int) -> bytes:
    """Bytes that do not compress, the same each time."""
    return b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(size // 32 + 1))[:size]


def put(client: Client, name: str, size: int, program: bytes = b"program") -> bytes:
    sealed = noise(size)
    assert client.put(put_message(key_of(name), sealed, program, payload=None, program=None), sealed, program)
    return sealed


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def client(place):
    place.start_daemon()
    made = Client(place.config(timeout=20), "test")
    yield made
    made.close()


LIMIT = protocol.INLINE_LIMIT
# Makes the request of a program that runs in a process of its own.
WANTED = f"from xcache.wire import protocol; wanted = protocol.Get('{key_of('a')}', 0.0, 'm', 'p')"


@pytest.mark.parametrize(
    "program", thorough([1, LIMIT, LIMIT + 1], usual=[LIMIT + 1]), ids=lambda size: f"program {size}"
)
@pytest.mark.parametrize("size", [0, 1, LIMIT, LIMIT + 1, 2_000_000], ids=lambda size: f"executable {size}")
def test_an_entry_that_was_put_is_got(client, place, size, program):
    before = descriptors()
    sealed = put(client, "a", size, noise(program)[::-1])
    assert client.put(put_message(key_of("a"), sealed, b"", payload=None, program=None), sealed, b"") is False
    entry = client.get(get_message(key_of("a")))
    assert (entry.digest, entry.sealed) == (digest(sealed), sealed)
    assert entry.compile_seconds == 1.0
    del entry
    # The connection that is kept, and nothing else.
    assert descriptors() == before + 1
    files = [path for path in (place.dir / "blobs").rglob("*") if path.is_file()]
    assert len(files) == (size > LIMIT) + (program > LIMIT)


def test_a_kept_entry_outlives_its_file_and_its_daemon(client, place):
    sealed = put(client, "a", LIMIT + 1)
    entry = client.get(get_message(key_of("a")))
    for path in (place.dir / "blobs").glob("??/*"):
        path.unlink()
    place.stop()
    assert entry.sealed == sealed


def test_a_refused_put_says_why(client):
    message = put_message(key_of("a"), b"", b"", payload=None, program=None)
    with pytest.raises(RefusedError, match="do not have the announced digest") as caught:
        client.put(message._replace(stored_size=100_000, digest=digest(b"else")), noise(100_000), b"")
    assert caught.value.kind == "wrong digest"
    assert client.get(get_message(key_of("a"))).lease == 0


def test_a_restarted_daemon_is_found_by_connections_from_before(client, place):
    """Eight of them are in the pool, all dead: not one request fails, and none of the dead ones stays."""
    before = descriptors()
    gate = threading.Barrier(8)

    def load() -> None:
        with client.loading("a", "A"):
            gate.wait(20)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert descriptors() == before + 8
    sealed = put(client, "a", 100)
    place.stop()
    place.start_daemon()
    for _ in range(10):
        assert client.get(get_message(key_of("a"))).sealed == sealed
    assert descriptors() <= before + 8
    client.close()
    assert descriptors() == before


def test_a_killed_daemon_is_a_lost_connection_and_the_next_is_found(client, place):
    put(client, "a", 100)
    pid = place.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not place.answers())
    with pytest.raises(ConnectionLostError):
        client.get(get_message(key_of("a")))


def test_threads_share_a_client(client):
    before = descriptors()
    sealed = [put(client, f"k{n}", 1000 * n * n) for n in range(8)]
    right = []

    def get_all() -> None:
        for n in [*range(8)] * 5:
            right.append(client.get(get_message(key_of(f"k{n}"))).sealed == sealed[n])
            right.append(client.get(get_message(key_of("none"))).lease == 0)

    threads = [threading.Thread(target=get_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8 * 80
    assert descriptors() <= before + 8


def test_a_closed_client_still_asks_and_keeps_no_connection(client):
    """A thread that has not ended when its program leaves, or switches the cache off, may ask once more."""
    before = descriptors()
    client.get(get_message(key_of("a")))
    client.close()
    assert client.get(get_message(key_of("a"))).lease == 0
    with client.loading("a", "A"):
        pass
    client.release("a", 1)
    assert descriptors() == before
    client.close()


def test_a_closed_client_starts_no_daemon(place):
    """The program is leaving: the daemon would be nobody's, and the store's folder may be gone by then."""
    config = place.config()
    client = Client(config, "test", Launcher(config))
    client.close()
    with pytest.raises(UnavailableError):
        client.fetch(key_of("a"))
    assert not place.dir.exists()


def test_a_connection_that_comes_free_after_the_end_is_closed(client):
    before = descriptors()
    with client.loading("a", "A"):
        client.close()
    assert descriptors() == before


def test_a_forked_child_with_a_client_of_its_own_leaves_its_parents_alone(place):
    """A forked child makes a new client and drops the old one; the parent's connection goes on."""
    place.start_daemon()
    said = place.run(f"""
import os
from xcache.config import config
from xcache.client.client import Client
from xcache.client.contents import Absent
{WANTED}
def sockets():
    links = set()
    for name in os.listdir("/proc/self/fd"):
        try: links.add(os.readlink(f"/proc/self/fd/{{name}}"))
        except FileNotFoundError: pass
    return {{link for link in links if link.startswith("socket:")}}
client = Client(config.load(), "test")
assert client.get(wanted).lease == 0
(mine,) = sockets()
if (child := os.fork()) == 0:
    client = Client(config.load(), "test")
    for _ in range(100):
        assert client.get(wanted).lease == 0
    assert len(sockets() - {{mine}}) == 1
    os._exit(7)
for _ in range(100):
    assert client.get(wanted).lease == 0
assert sockets() == {{mine}}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client.close()
""")
    assert (said.stdout, said.stderr) == ("7\n", "")


def test_a_forked_child_warns_of_nothing(place):
    """The same warnings as without xcache: none of sockets and pipes that nobody closed."""
    place.start_daemon()
    said = place.run(
        f"""
import os
from xcache.config import config
from xcache.cache import Cache
from xcache.client.contents import Absent
{WANTED}
cache = Cache(config.load(), "on", "test")
assert cache.client.get(wanted).lease == 0
if (child := os.fork()) == 0:
    assert cache.client.get(wanted).lease == 0
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert cache.client.get(wanted).lease == 0
cache.close()
""",
        PYTHONWARNINGS="always",
    )
    assert (said.returncode, said.stderr) == (0, "")


def test_a_program_whose_name_is_no_text_is_served(place):
    place.start_daemon()
    said = place.run(f"""
import sys
from xcache.config import config
from xcache.client.client import Client
from xcache.client.contents import Absent
sys.argv = ["/tmp/caf\\udce9.py"]
{WANTED}
client = Client(config.load(), "test")
print(client.get(wanted).lease)
client.close()
""")
    assert said.stdout == "0\n", said.stderr


def test_a_store_in_a_folder_whose_name_is_no_text_is_served(place):
    place.dir = Path(os.fsdecode(os.fsencode(place.root) + b"/caf\xe9"))
    place.env["XCACHE_DIR"] = str(place.dir)
    place.start_daemon()
    client = Client(place.config(timeout=1), "test")
    try:
        assert client.get(get_message(key_of("a"))).lease == 0
    finally:
        client.close()
        place.stop()


def test_without_a_free_descriptor_the_client_says_so_in_its_own_words(place):
    place.start_daemon()
    said = place.run(f"""
import os, resource
from xcache.config import config
from xcache.client.client import Client
from xcache.client.contents import Absent
from xcache.errors import UnavailableError
{WANTED}
client = Client(config.load(), "test")
used = sorted(int(name) for name in os.listdir("/proc/self/fd"))[-1]
resource.setrlimit(resource.RLIMIT_NOFILE, (used, used + 100))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
try:
    client.get(wanted)
except UnavailableError:
    print("unavailable")
""")
    assert said.stdout == "unavailable\n", said.stderr


@pytest.mark.parametrize("length", [0, 5, LIMIT + 2, 2**43], ids=["empty", "short", "longer", "huge"])
def test_a_file_of_another_length_is_damaged_and_nothing_worse(client, place, length):
    """A torn file may be of any length; reading it must not ask for terabytes of memory."""
    sealed = seal(key_of("a"), noise(LIMIT))
    message = put_message(key_of("a"), sealed, b"p", payload=None, program=None)
    assert client.put(message, sealed, b"p")
    (path,) = [path for path in (place.dir / "blobs").glob("??/*") if path.is_file()]
    os.truncate(path, length)
    with pytest.raises(XcacheError) as caught:
        entry = client.get(get_message(key_of("a")))
        open_sealed(key_of("a"), entry.digest, entry.sealed)
    assert isinstance(caught.value, DamagedError)


def test_a_timeout_of_a_year_is_one(place):
    """Longer than poll() can count."""
    place.start_daemon()
    client = Client(place.config(timeout=365 * 86400.0), "test")
    sealed = put(client, "a", 10)
    assert client.get(get_message(key_of("a"))).sealed == sealed
    client.close()
