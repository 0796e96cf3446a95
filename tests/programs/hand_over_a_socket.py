"""Become a daemon that was handed descriptor 3: a socket of some kind, or a file."""

import os
import socket
import sys

kind, count, names = sys.argv[1:4]
made = socket.socket(
    socket.AF_INET if kind == "internet" else socket.AF_UNIX,
    socket.SOCK_DGRAM if kind == "datagrams" else socket.SOCK_STREAM,
)
if kind != "internet":
    made.bind(os.environ["XCACHE_SOCKET"] if kind != "abstract" else f"\0xcache-test-{os.getpid()}")
if kind in ("good", "abstract"):
    made.listen()
if kind == "file":
    os.dup2(os.open("/dev/null", os.O_RDONLY), 3)
elif kind != "none":
    os.dup2(made.fileno(), 3) if made.fileno() != 3 else made.detach()
    os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": count, "LISTEN_FDNAMES": names, "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-P", "-m", "xcached"])  # noqa: S606
