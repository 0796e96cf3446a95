"""The platform component: the devices, and the facts of the client that XLA compiles in."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from xcache.errors import UncacheableError
from xcache.keys import cpu_clients, lines
from xcache.wire.hashing import digest

GPU = ("gpu", "cuda", "rocm")
# Their keys were compared with code. Another platform's compiler may read flags, variables, libraries and files that no
# key holds: Neuron's reads NEURON_CC_FLAGS.
_COMPARED = frozenset({"cpu", "gpu", "cuda", "tpu"})
# In older jaxlibs the topology of a GPU says hardly more than its name.
_GPU_FACTS = ("compute_capability", "core_count", "shared_memory_per_block_optin")

_Facts = tuple[tuple[str, object], ...]
# By client, as long as it lives, and by the ids of its devices.
_described: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Facts]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[Any, tuple[tuple[int, object, object], ...]] = weakref.WeakKeyDictionary()


def describe(client: Any, devices: Sequence[Any]) -> bytes:
    """Return the facts about ``client`` and ``devices`` that decide the code made for them, as sorted lines."""
    known = _described.get(client)
    if known is None:
        known = _described.setdefault(client, {})
    numbers = tuple(device.id for device in devices)
    facts = known.get(numbers)
    if facts is None:
        facts = known[numbers] = _facts(client, devices)
    if client.platform == "cpu":
        return _lines(facts)
    # jaxlib, too, looks the limit up at each compile.
    return _lines((*facts, ("memory", _memory_limits(client))))


def is_rocm(client: Any) -> bool:
    """Return whether the client is for AMD GPUs; jaxlib may call its platform ``gpu``, too."""
    names = (client.platform, getattr(client, "_raw_platform", ""), client.platform_version)
    return any("rocm" in str(name).lower() for name in names)


def places(client: Any) -> tuple[tuple[int, object, object], ...]:
    """Return each device's id, process and slice: the network between devices decides what XLA makes."""
    found = _places.get(client)
    if found is None:
        found = _places[client] = tuple(
            (device.id, device.process_index, getattr(device, "slice_index", None)) for device in client.devices()
        )
    return found


@functools.lru_cache(maxsize=64)
def _lines(facts: _Facts) -> bytes:
    return lines(dict(facts))


def without_key(client: Any) -> str | None:
    """Return why nothing of this client's platform has a key, or None."""
    if is_rocm(client):
        # An executable names a BLASLt kernel by its index in a list that another process may order differently
        # (openxla/xla#47659).
        return "ROCm"
    if str(getattr(client, "runtime_type", "")).startswith("proxy/"):
        # The compiler and the processor are those of another machine, though the platform looks like one of here.
        return "proxy backend"
    return None if client.platform in _COMPARED else f"platform {client.platform}"


def _facts(client: Any, devices: Sequence[Any]) -> _Facts:
    if reason := without_key(client):
        raise UncacheableError(reason)
    facts: dict[str, object] = {
        "platform": client.platform,
        "version": client.platform_version,
        "kinds": tuple(device.device_kind for device in devices),
        "processes": len({device.process_index for device in devices}),
    }
    if client.platform == "cpu":
        facts["threads"] = cpu_clients.threads_of(client)
        facts["devices"] = (client.device_count(), client.local_device_count())
        facts["host"] = _host_cpu(client)
    else:
        if client.platform == "tpu" and min(d.id for d in client.devices()) not in {d.id for d in devices}:
            # Such an executable halts the TPU if it was loaded instead of compiled (jax#38004).
            raise UncacheableError("TPU devices without the first")
        topology = _topology(devices)
        facts["topology"] = _fingerprint(topology)
        if client.platform in GPU:
            facts["target"] = str(getattr(topology, "target_config", ""))
            facts |= {name: tuple(str(getattr(device, name, "")) for device in devices) for name in _GPU_FACTS}
    return tuple(facts.items())


def _memory_limits(client: Any) -> tuple[object, ...]:
    """Return the memory limit of each device's allocator, to which XLA schedules and rematerializes."""
    limits = [_memory_limit(device) for device in client.local_devices()]
    return tuple(limits[:1] if len(set(limits)) == 1 else limits)


def _memory_limit(device: Any) -> object:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, NotImplementedError, AttributeError):
        # Some platforms have no such statistics.
        return None


def _host_cpu(client: Any) -> str:
    """Return the processor's name and features as LLVM sees them, from the topology of a client with one device."""
    devices = client.devices()
    return _fingerprint(_topology(devices)) if len(devices) == 1 else _host_of_one_device()


@functools.cache
def _host_of_one_device() -> str:
    """Do so with a client made for it: a topology of several devices differs between the processes of a job."""
    from jaxlib import xla_client

    return _fingerprint(_topology(xla_client.make_cpu_client(num_devices=1).devices()))


def _topology(devices: Sequence[Any]) -> Any:
    """Return the devices' topology, or None for a platform that does not describe it."""
    from jaxlib import xla_client

    try:
        return xla_client.get_topology_for_devices(list(devices))
    except RuntimeError:
        return None


def _fingerprint(topology: Any) -> str:
    if topology is None:
        return "none"
    try:
        # jaxlib up to 0.9 and from 0.12 can serialize it; 0.10 has only a 64-bit fingerprint of the same bytes.
        if hasattr(topology, "serialize"):
            return digest(topology.serialize())
        return f"fingerprint {topology.fingerprint()}"
    except RuntimeError:
        return "none"
