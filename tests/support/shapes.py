"""Programs of all shapes, and ways to run them; the campaign runs each without xcache and with it.

At its end a program switches xcache off, and reports its open descriptors, threads and unreaped children.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.places import Place
from support.program_files import program_text
from xcache.config import config

STRANGER = 54321

_HEAD = program_text("report_what_is_left")
_TAIL = "\nif __name__ == '__main__':\n    main()\n    report()\n"

# The body of main().
PROGRAMS: dict[str, str] = {
    "is plain": """
    mine = open(__file__)
    warnings.warn("a warning of the program's own")
    print([work(k) for k in range(4)], mine.readline() != "x")
""",
    "has threads": """
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(6) as pool:
        print(list(pool.map(work, range(8))))
""",
    "runs a loop": """
    import asyncio
    async def loop():
        process = await asyncio.create_subprocess_exec("/bin/sh", "-c", "exit 4")
        return await asyncio.gather(*(asyncio.to_thread(work, k) for k in range(4))), await process.wait()
    print(asyncio.run(loop()))
""",
    "is alarmed": """
    alarms = []
    signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    print([work(k) for k in range(6)], bool(alarms))
    signal.setitimer(signal.ITIMER_REAL, 0)
""",
    "waits for any child": """
    heard = []
    signal.signal(signal.SIGCHLD, lambda *_: heard.append(os.wait()[1]))
    print(work(1), heard)
    os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], os.environ)
    while not heard:
        time.sleep(0.01)
    print(work(2), heard)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
""",
    "waits for any child in a thread": """
    child = os.posix_spawn("/bin/sh", ["sh", "-c", "sleep 1; exit 3"], os.environ)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(os.wait()))
    thread.start()
    print([work(k) for k in range(3)])
    thread.join()
    print(waited == [(child, 3 << 8)])
""",
    "forks before it compiles": """
    warnings.simplefilter("ignore")
    pid = os.fork()
    mine = work(1 if pid else 2)
    if not pid:
        print(mine, flush=True)
        os._exit(5)
    print(os.waitpid(pid, 0)[1], mine)
""",
    "has workers by spawn": """
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, range(4)))
        pool.close()
        pool.join()
    multiprocessing.resource_tracker._resource_tracker._stop()
""",
    "has workers by forkserver": """
    import multiprocessing, multiprocessing.forkserver
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        print(pool.map(work, range(4)))
        pool.close()
        pool.join()
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()
""",
    "becomes another by exec": """
    print(work(1), flush=True)
    os.execv("/bin/sh", ["sh", "-c", "ls -l /proc/$$/fd | grep -c -e socket -e xcache; exit 6"])
""",
    "leaves at once": """
    print(work(1), flush=True)
    os._exit(7)
""",
    "is aborted": """
    print(work(1), flush=True)
    os.abort()
""",
    "raises": """
    print(work(1), flush=True)
    raise ValueError("of the program's own")
""",
    "compiles at exit": """
    import atexit
    atexit.register(lambda: print(work(3)))
    print(work(1))
""",
    "has a client of its own": """
    from jaxlib import xla_client
    client = xla_client.make_cpu_client()
    for device in (client.local_devices()[0], jax.devices()[0]):
        y = jax.device_put(x, device)
        print(float(jax.jit(lambda v: (v * 3 + 1).sum())(y)))
""",
    "has several clients": """
    # There is but one platform here, so several clients of it stand for several backends.
    from jaxlib import xla_client
    clients = [xla_client.make_cpu_client() for _ in range(3)]
    for k in range(3):
        for client in clients:
            y = jax.device_put(x, client.local_devices()[0])
            print(float(jax.jit(lambda v: (v * k + 1).sum())(y)), work(k))
""",
    "clears its backends": """
    from jax.extend.backend import clear_backends
    print(jax.devices(), work(1))
    clear_backends()
    print(jax.devices(), work(1), work(2))
""",
    "uses some of its devices": """
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    jax.config.update("jax_num_cpu_devices", 4)
    y = jax.device_put(x, jax.devices()[2])
    print(jax.jit(lambda v: (v * 3).sum())(y).device)
    mesh = Mesh(np.array(jax.devices()[1:3]), ("a",))
    z = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))
    print(jax.jit(lambda v: (v * 5).sum())(z), jax.jit(lambda v: v + 1)(z).sharding)
""",
    "loses its connections": """
    print(work(1))
    # A program that makes itself a service does this.
    os.closerange(3, 1024)
    print(work(2), work(3))
""",
    "is a notebook": """
    import nbclient, nbformat
    head = open(__file__).read().partition("def report")[0]
    cells = [head + "print(work(1))", "import asyncio; print(await asyncio.to_thread(work, 2))", "work(3)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for output in (output for cell in notebook.cells for output in cell.outputs):
        aside = output.get("name") == "stderr"
        print(output.get("text") or output.get("data"), end="", file=sys.stderr if aside else sys.stdout)
    sys.stdout.flush()
    os._exit(0)
""",
    "is run by pytest-xdist": """
    import pytest
    print(pytest.main(["-q", "-n", "2", "-p", "no:cacheprovider", __file__]))
    sys.stdout.flush()
    os._exit(0)
def test_one():
    assert work(1) == 36.0
def test_two():
    assert work(2) == 64.0
""",
}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a program: its command, flags, variables and first statements."""

    # A line of shell that ends in running "$@"; {root} is the place.
    under: str = ""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    first: str = ""
    # One line that it may cost with xcache on.
    says: str = ""
    # The store and the socket are in their default places.
    default_places: bool = False
    stranger_in_tmp: bool = False
    # The folder for temporary files, if not the place's.
    temporary: str = ""
    stored: bool = True
    # The kernel makes every orphan a child of this program, the daemon among them.
    adopts: bool = False
    # Where the place is.
    base: str = "/tmp"
    # The program is run as a user that no other program has.
    other_user: bool = False


def _limit(letters: str) -> str:
    return f'ulimit {letters}; exec "$@"'


def _cgroup(controller: str, **limits: str) -> str:
    """Return a command that runs the program in a new cgroup; each controller has a hierarchy (version 1)."""
    set_all = "".join(f" && echo {value} >$g/{controller}.{name}" for name, value in limits.items())
    make = f"g={_CGROUPS}/{controller}/{{name}}; {{ [ -d $g ] || mkdir $g; }}"
    return f'{make}{set_all} && echo $$ >$g/cgroup.procs && exec "$@"'


_CGROUPS = "/sys/fs/cgroup"
# It reads what only root may, as the interpreter may be, but the kernel holds it to the limits of a user.
_AS_ANOTHER = (
    "setpriv --reuid={uid} --regid={uid} --clear-groups --inh-caps=+dac_override,+dac_read_search"
    " --ambient-caps=+dac_override,+dac_read_search"
)
# All folders of / but one, in a new root.
_WITHOUT_TMP = """
cd / && mount -t tmpfs none /mnt && for each in *; do
  case $each in
    tmp | mnt) continue ;;
  esac
  if [ -L "$each" ]; then
    cp -P "$each" /mnt
  elif [ -d "$each" ]; then
    mkdir "/mnt/$each" && mount --rbind "/$each" "/mnt/$each" || exit
  fi
done
exec chroot /mnt /bin/sh -c 'cd {root}; exec "$@"' sh "$@"
"""

_MOUNTS = "unshare -m sh -c {} sh"
WAYS: dict[str, Way] = {
    "as it is": Way(),
    "isolated": Way(flags=("-I",)),
    "without the environment": Way(flags=("-E", "-s")),
    "without assertions": Way(flags=("-OO",)),
    "without bytecode": Way(flags=("-B",)),
    "for developers": Way(flags=("-X", "dev")),
    "with faulthandler": Way(flags=("-X", "faulthandler", "-u")),
    "frozen": Way(
        first="sys.frozen = True", environment={"PATH": "/none"}, says="no Python interpreter is known", stored=False
    ),
    "without an executable": Way(first="sys.executable = None"),
    "with few descriptors": Way(under=_limit("-S -n 60")),
    "with fewer than a daemon can do with": Way(under=_limit("-n 44"), says="its hard limit, ulimit -n", stored=False),
    "with small files": Way(under=_limit("-S -f 20000")),
    "with small files for good": Way(under=_limit("-f 20000"), says="its hard limit, ulimit -f", stored=False),
    "with some seconds": Way(under=_limit("-S -t 300")),
    "with some seconds for good": Way(under=_limit("-t 300"), says="its hard limit, ulimit -t", stored=False),
    "with little memory": Way(under=_limit("-S -v 16000000")),
    "with little memory for good": Way(under=_limit("-v 16000000")),
    "with little data": Way(under=_limit("-S -d 4000000")),
    "with little data for good": Way(under=_limit("-d 4000000")),
    "with a small stack": Way(under=_limit("-S -s 1024")),
    "with a small stack for good": Way(under=_limit("-s 1024")),
    "with no locked memory": Way(under=_limit("-l 0")),
    "with no queues, locks and signals": Way(
        under='exec prlimit --sigpending=1 --msgqueue=0 --locks=0 --rtprio=0 --core=0 "$@"'
    ),
    # Root may have any number. Where only root can reach the interpreter, another user has no daemon.
    "with few processes": Way(
        under=f'exec prlimit --nproc=150 {_AS_ANOTHER} "$@"',
        environment={"HOME": "{root}"},
        says="no Python interpreter is known",
        stored=False,
        other_user=True,
    ),
    "on one processor, nicely": Way(
        under='exec nice -n 9 "$@"', first="os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    ),
    "with signals blocked": Way(first="signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})"),
    "under a service manager": Way(
        environment={"NOTIFY_SOCKET": "{root}/n", "WATCHDOG_USEC": "100000", "LISTEN_FDS": "1", "LISTEN_PID": "1"}
    ),
    "with the usual places": Way(default_places=True),
    "with a stranger in /tmp": Way(default_places=True, stranger_in_tmp=True),
    "with /tmp read-only": Way(
        under=_MOUNTS.format(
            shlex.quote(
                "mkdir -p {root}/home; mount --bind {root} {root} && mount --rbind /tmp /tmp &&"
                ' mount -o remount,ro,bind /tmp && exec "$@"'
            )
        )
        + ' "$@"',
        environment={"TMPDIR": "/tmp"},
        default_places=True,
        temporary="/var/tmp",
    ),
    "without a home": Way(under='unset HOME; exec "$@"'),
    "with a home that is not there": Way(default_places=True, environment={"HOME": "{root}/none/at/all"}),
    "with a home that is read-only": Way(
        under=_MOUNTS.format(
            shlex.quote(
                "mkdir -p {root}/home; mount --bind {root}/home {root}/home && mount -o remount,ro,bind {root}/home &&"
                ' exec "$@"'
            )
        )
        + ' "$@"',
        default_places=True,
        says="cannot be made",
        stored=False,
    ),
    "without /proc": Way(under=_MOUNTS.format(shlex.quote('mount -t tmpfs none /proc && exec "$@"')) + ' "$@"'),
    "as nobody in a user namespace": Way(under='exec unshare -U "$@"', says="the kernel also reports", stored=False),
    "as root of a user namespace": Way(under='exec unshare -Ur "$@"'),
    "as process 1": Way(under='exec unshare -fp --kill-child --mount-proc "$@"', stored=False, adopts=True),
    "without /tmp": Way(
        under=_MOUNTS.format(shlex.quote(_WITHOUT_TMP)) + ' "$@"',
        environment={"TMPDIR": "/tmp"},
        default_places=True,
        temporary="/var/tmp",
        base="/var/tmp",
    ),
    "in a cgroup of few processes": Way(under=_cgroup("pids", max="80")),
    "in a cgroup of little memory": Way(under=_cgroup("memory", limit_in_bytes="1500M")),
    "in a cgroup of one processor": Way(under=_cgroup("cpu", cfs_quota_us="100000")),
    "with an audit hook": Way(first="seen = []; sys.addaudithook(lambda *a: None)"),
    "traced": Way(first="sys.settrace(lambda *a: None); threading.settrace(lambda *a: None)"),
}
STOPPED, SLOW = "with a daemon that is stopped", "with a slow daemon"
STATES = ("cold", "warm", "after a killed run", STOPPED, SLOW)
# In a namespace of its own a program's children end with it, its daemon among them.
_NOT_TOGETHER = {
    # There is no interpreter to make workers with, with or without xcache.
    ("has workers", "without an executable"),
    ("has workers", "frozen"),
    ("has workers", "with fewer"),
    ("notebook", "without an executable"),
    ("notebook", "frozen"),
    # The notebook needs psutil, and psutil needs /proc.
    ("notebook", "without /proc"),
    # psutil also fails with so few descriptors.
    ("notebook", "with few"),
    ("pytest-xdist", "without an executable"),
    ("pytest-xdist", "frozen"),
    ("pytest-xdist", "with fewer"),
    ("pytest-xdist", "traced"),
    # jax's warnings under a trace function vary.
    ("aborted", "traced"),
    # All processes of the user count, and each has some twenty threads.
    ("has workers", "few processes"),
    ("pytest-xdist", "few processes"),
    ("notebook", "few processes"),
}


def fit(program: str, way: str, state: str) -> bool:
    """Return whether it makes sense to run this program in this way and state."""
    if state == SLOW and (not WAYS[way].stored or WAYS[way].other_user):
        # The proxy before the daemon is root's.
        return False
    return not any(one in program and other in way for one, other in _NOT_TOGETHER)


@functools.cache
def impossible(way_name: str) -> str:
    """Return why this machine cannot run a program in this way, or "" if it can."""
    way = WAYS[way_name]
    if not way.under:
        return ""
    root = Path(tempfile.mkdtemp(prefix="xcache-tried", dir=way.base))
    tried = ["/bin/sh", "-c", _filled(way.under, root), "sh", "true"]
    try:
        done = subprocess.run(tried, capture_output=True, text=True, timeout=30, check=False)
        return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""
    finally:
        _forget_cgroups(root.name)
        shutil.rmtree(root, ignore_errors=True)


def _filled(under: str, root: Path) -> str:
    return under.replace("{root}", str(root)).replace("{name}", root.name).replace("{uid}", str(_user_of(root)))


def _user_of(root: Path) -> int:
    """Return a user id that hardly another place has."""
    return 100_000 + zlib.crc32(root.name.encode()) % 100_000


def source(program: str, way: Way) -> str:
    """Return the program without the head that every program has."""
    return f"{_HEAD}\n{way.first}\ndef main():{PROGRAMS[program]}{_TAIL}"


@contextlib.contextmanager
def surroundings(place: Place, way: Way) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Return the beginning of the command and the variables of a way, in a place made for it."""
    environment = {key: value.format(root=place.root) for key, value in way.environment.items()}
    if way.default_places:
        for variable in ("XCACHE_DIR", "XCACHE_SOCKET"):
            del place.env[variable]
        place.env.pop("XDG_RUNTIME_DIR", None)
        place.env.pop("XDG_CACHE_HOME", None)
        (place.root / "tmp").mkdir()
        place.env |= {"HOME": str(place.root / "home"), "TMPDIR": str(place.root / "tmp")}
        usual = Path(way.temporary or place.root / "tmp", f"xcache-{os.getuid()}")
        place.dir = Path(environment.get("HOME", place.env["HOME"]), ".cache", "xcache")
        digest = config.hashlib.sha256(os.fsencode(place.dir)).hexdigest()[:12]
        place.socket = usual / f"xcached-{digest}.sock"
        if way.stranger_in_tmp:
            usual.mkdir()
            os.chown(usual, STRANGER, STRANGER)
            place.socket = place.dir / "xcached.sock"
    if way.other_user:
        for path in (place.root, *place.root.iterdir()):
            os.chown(path, _user_of(place.root), _user_of(place.root))
    under = _filled(way.under, place.root)
    try:
        yield ["/bin/sh", "-c", under, "sh"] if under else [], environment
    finally:
        place.stop()
        _forget_cgroups(place.root.name)


def _forget_cgroups(name: str) -> None:
    for group in Path(_CGROUPS).glob(f"*/{name}"):
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(process)
        group.rmdir()


def comparable(text: str, way: Way) -> str:
    """Remove pytest's times, and children that process 1 inherited."""
    text = re.sub(r"in \d+\.\d+s", "in some time", text)
    return text.replace("(0, 0)\n", "no child\n") if way.adopts else text


def interpreter(way: Way) -> list[str]:
    """Return the interpreter with its flags."""
    return [sys.executable, *way.flags]
