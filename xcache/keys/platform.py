"""The platform component: what kind of device, and of host where the host is the device."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from xcache.keys import digest, lines


def describe(client: Any, devices: Sequence[Any]) -> bytes:
    """The facts about ``devices`` that decide what code is made for them, as sorted lines."""
    more: tuple[tuple[str, str], ...]
    if client.platform == "cpu":
        more = (("host", _host_cpu()), ("threads", _cpu_threads()))
    else:
        more = (("topology", _topology(tuple(devices))),)
    kinds = tuple(device.device_kind for device in devices)
    processes = len({device.process_index for device in devices})
    return _lines(client.platform, client.platform_version, kinds, processes, more)


@functools.lru_cache(maxsize=64)
def _lines(
    platform: str, version: str, kinds: tuple[str, ...], processes: int, more: tuple[tuple[str, str], ...]
) -> bytes:
    return lines({"platform": platform, "version": version, "kinds": list(kinds), "processes": processes, **dict(more)})


def _cpu_threads() -> str:
    """XLA:CPU cuts loops into as many parts as there are processors to run them: other code on another count."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # PJRT lets these two override the count.
    return "/".join([str(usable), os.environ.get("PJRT_NPROC", ""), os.environ.get("NPROC", "")])


@functools.cache
def _host_cpu() -> str:
    """The processor's name and features as LLVM sees them: the topology of a client with one device.

    The topology of the program's own client would do, were it not for the number of its virtual devices, which changes
    no code. Making a client takes about 5 ms, once.
    """
    from jaxlib import xla_client

    return _fingerprint(xla_client.make_cpu_client(num_devices=1).devices())


@functools.lru_cache(maxsize=64)
def _topology(devices: tuple[Any, ...]) -> str:
    return _fingerprint(devices)


def _fingerprint(devices: Sequence[Any]) -> str:
    from jaxlib import xla_client

    topology = xla_client.get_topology_for_devices(list(devices))
    # Up to 0.9 and again in 0.12 it can be serialized; 0.10 has only a 64-bit fingerprint of the same bytes.
    if hasattr(topology, "serialize"):
        return digest(topology.serialize())
    return f"fingerprint {topology.fingerprint()}"
