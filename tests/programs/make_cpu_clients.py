"""Make CPU clients with different numbers of threads, and report the numbers that xcache knows."""

import json
import os

from jaxlib import xla_client

from xcache.keys import cpu_clients, platform


def made(**variables):
    os.environ.update(variables)
    client = xla_client.make_cpu_client(num_devices=DEVICES.pop(0))
    for name in variables:
        del os.environ[name]
    return client


DEVICES = [1, 1, 7, 1, 1, 1, 3]
os.environ.pop("PJRT_NPROC", None)
os.environ.pop("NPROC", None)
with cpu_clients.watched():
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(pinned)})
    clients = [made()]
    os.sched_setaffinity(0, pinned)
    clients += [made(PJRT_NPROC="5"), made(PJRT_NPROC="5"), made(PJRT_NPROC="x", NPROC="3")]
    clients += [made(PJRT_NPROC="0"), made(PJRT_NPROC="300")]
# As a program's own that was made before the cache was switched on.
clients.append(made(PJRT_NPROC="4"))
watched = [cpu_clients._known.get(client) for client in clients]
os.environ["PJRT_NPROC"] = "11"
print(
    json.dumps(
        {
            "watched": watched,
            "known": [cpu_clients.threads_of(client) for client in clients],
            "asked": [cpu_clients._ask_xla(client) for client in clients],
            "described": len({platform.describe(client, client.devices()[:1]) for client in clients}),
        }
    )
)
