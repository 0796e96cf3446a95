"""A small machine with a real systemd, in namespaces and a root of its own, which is gone after the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.places import TESTS, until

BOOT = TESTS / "service" / "boot"
NAMESPACES = ["unshare", "--fork", "--pid", "--mount", "--ipc", "--uts", "--net", "--cgroup", "--kill-child"]
NEEDED = ("unshare", "nsenter", "setpriv", "systemctl", "journalctl", "useradd")
SYSTEMD = Path("/lib/systemd/systemd")
# The boot script leaves a file here, which must not be visible outside.
_PROBED = "/ /etc /home /media /mnt /opt /root /run /srv /tmp /usr /usr/local /var /var/tmp /var/cache /var/lib /work"
_LONG = 120


class Machine:
    """A machine that runs; ``shown`` are folders of the host that it sees, read-only."""

    def __init__(self, shown: dict[Path, str]) -> None:
        self._probe = f".xcache-probe-{uuid.uuid4().hex}"
        self._canary = Path(tempfile.mkdtemp(prefix="xcache-canary-", dir="/tmp")) / "canary"
        self._canary.touch()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._cgroup = _own_cgroup() / f"xcache-test-{uuid.uuid4().hex[:12]}"
        self._pid = 0
        try:
            self._cgroup.mkdir()
            self._boot([f"{source}:{target}" for source, target in shown.items()])
        except BaseException:
            self.stop()
            raise

    def run(
        self, *command: str, user: int | None = None, check: bool = True, timeout: float = _LONG, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end."""
        with self.begin(*command, user=user, **environment) as process:
            try:
                said, complaints = process.communicate(timeout=timeout)
            finally:
                process.kill()
        assert not check or process.returncode == 0, f"{command}: {process.returncode}: {said}{complaints}{self.log()}"
        return subprocess.CompletedProcess(command, process.returncode, said, complaints)

    def begin(self, *command: str, user: int | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a command in the machine, as root or as another user."""
        path = "/opt/xcache/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env = {"PATH": path, "HOME": "/root" if user is None else self.home(user), "LANG": "C.UTF-8"} | environment
        become: list[str] = []
        if user is not None:
            env.setdefault("XDG_RUNTIME_DIR", f"/run/user/{user}")
            become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return subprocess.Popen(
            ["nsenter", "-t", str(self._pid), "-a", *become, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def home(self, user: int) -> str:
        """Return a user's home."""
        return f"/home/u{user}"

    def add_user(self, user: int) -> None:
        """Add an account, with a service manager of its own."""
        self.run("useradd", "--create-home", "--uid", str(user), "--user-group", f"u{user}")
        # Every account that was ever used has these folders.
        folders = [f"/run/user/{user}", *(f"{self.home(user)}/{name}" for name in (".cache", ".config"))]
        self.run("install", "-d", "-m", "700", "-o", str(user), "-g", str(user), *folders)
        self.run("systemctl", "start", f"user@{user}.service")

    def read(self, path: str) -> str:
        """Read a file in the machine."""
        return self.run("cat", path).stdout

    def write(self, path: str, text: str, user: int | None = None) -> None:
        """Write a file in the machine, atomically."""
        script = 'mkdir -p "$(dirname "$0")" && printf %s "$1" >"$0.new" && mv "$0.new" "$0"'
        self.run("sh", "-c", script, path, text, user=user)

    def log(self) -> str:
        """Return the end of its journal."""
        command = [
            "nsenter",
            "-t",
            str(self._pid),
            "-a",
            "journalctl",
            "--no-pager",
            "-n",
            "60",
            "-o",
            "short-monotonic",
        ]
        said = subprocess.run(command, capture_output=True, text=True, timeout=_LONG, check=False)
        return f"\n{said.stdout}{said.stderr}"

    def stop(self) -> None:
        """End all its processes, and with them its files and mounts; then remove its folders and cgroup on the host."""
        process = getattr(self, "_process", None)
        if process is not None:
            # The end of the first process ends all others. unshare itself ignores SIGTERM.
            if self._pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, 9)
            else:
                process.kill()
            process.wait(_LONG)
            process.stdin.close()
            process.stdout.close()
        assert until(lambda: _remove_cgroup(self._cgroup)), f"{self._cgroup} is still in use"
        shutil.rmtree(self._canary.parent)
        self._log.close()
        assert not self._leaked(), "a machine for tests has written where it must not"

    def _boot(self, shown: Sequence[str]) -> None:
        # The cgroup first, so that the namespace begins there; and with this process's end it is all over.
        script = 'echo $$ >"$0/cgroup.procs" && exec setpriv --pdeathsig KILL "$@"'
        command = [
            "sh",
            "-c",
            script,
            str(self._cgroup),
            *NAMESPACES,
            "bash",
            str(BOOT),
            str(self._canary),
            self._probe,
        ]
        self._process = subprocess.Popen(
            [*command, *shown],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        said = self._process.stdout.readline().strip()
        if said != "probed":
            self._log.seek(0)
            raise RuntimeError(f"no machine for tests: {said} {self._log.read().decode()}")
        assert not self._leaked(), "what is written in there can be seen here; it was not booted"
        assert self._canary.exists()
        self._process.stdin.write("boot\n")
        self._process.stdin.flush()
        (child,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._pid = int(child)
        deadline = time.monotonic() + 30
        state = ""
        while state not in ("running", "degraded"):
            assert time.monotonic() < deadline, f"it did not boot: {state}{self.log()}"
            assert self._process.poll() is None, "it ended while it was booting"
            time.sleep(0.05)
            state = self.run("systemctl", "is-system-running", check=False).stdout.strip()

    def _leaked(self) -> list[Path]:
        places = [Path(folder) / self._probe for folder in _PROBED.split()]
        return [place for place in places if place.exists()]


def why_not() -> str:
    """Return why no such machine can run here, or None."""
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        return f"there is no {', '.join(missing)}"
    if not SYSTEMD.exists():
        return "there is no systemd"
    if os.getuid() != 0:
        return "only root may make namespaces with mounts of their own that systemd can use"
    try:
        probe = _own_cgroup() / f"xcache-test-{uuid.uuid4().hex[:12]}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"no cgroup can be made: {error}"
    # The beginning of the boot script, and nothing else.
    mounts = (
        "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && mkdir /mnt/u /mnt/w /mnt/r && mount -t overlay overlay"
        " -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r && mount -t proc proc /mnt/r/proc"
        " && mount -t cgroup2 cgroup2 /mnt/r/sys"
    )
    tried = subprocess.run([*NAMESPACES, "sh", "-c", mounts], capture_output=True, text=True, timeout=30, check=False)
    return "" if tried.returncode == 0 else f"namespaces and mounts are not permitted: {tried.stderr.strip()}"


@contextlib.contextmanager
def booted(shown: dict[Path, str]) -> Iterator[Machine]:
    """Boot a machine for the length of the block; call why_not() first."""
    made = Machine(shown)
    try:
        yield made
    finally:
        made.stop()


def _own_cgroup() -> Path:
    """Return the folder of this process's cgroup in the one hierarchy that systemd uses."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [fields[4] for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    if not roots:
        raise FileNotFoundError("cgroup2 is not mounted")
    mine = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    return Path(roots[0] + mine.removeprefix("0::"))


def _remove_cgroup(folder: Path) -> bool:
    """Remove a cgroup and all within; return whether they are gone."""
    try:
        for inner, _, _ in os.walk(folder, topdown=False):
            os.rmdir(inner)  # noqa: PTH106 - a path as text
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not folder.exists()
