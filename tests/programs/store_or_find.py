"""Store an entry, or find it; print which, and the daemon's process."""

import contextlib
import sys

from support.command_line import made_up
from support.places import get_message

from xcache._version import __version__
from xcache.client.client import Client
from xcache.client.connector import Connector
from xcache.client.contents import Absent
from xcache.client.launcher import Launcher
from xcache.clock import own_time
from xcache.config import config

settings = config.load()
key = sys.argv[1] * 64
launcher = None if settings.daemon_user else Launcher(settings)
with contextlib.closing(Client(settings, __version__, launcher)) as client:
    if isinstance(client.get(get_message(key)), Absent):
        message, sealed, program = made_up("jit_f", key=key)
        assert client.put(message, sealed, program)
        print("stored", end=" ")
    else:
        print("found", end=" ")
with contextlib.closing(Connector(settings, __version__, None).connect(own_time() + 20.0)) as connection:
    print(connection.welcome.pid)
