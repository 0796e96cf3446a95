"""Listen on a socket as another user, and keep every connection."""

import contextlib
import os
import socket
import sys

os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(50)
print("listens", flush=True)
kept = []
while True:
    connected, _ = listener.accept()
    # Somebody may only have looked whether anybody is there.
    with contextlib.suppress(BrokenPipeError):
        connected.sendall(b"give me all you have")
    kept.append(connected)
