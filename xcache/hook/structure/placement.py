"""Devices, meshes and shardings: the parts that tell each from others of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from jax._src import mesh as meshes
from jax._src import sharding_impls
from jax._src.lib import xla_client
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from xcache.hook.structure.encoding import (
    Encoding,
    check_attributes,
    encodes,
    encodes_kinds_of,
    text,
    type_name,
)

# The attributes of each class that its parts hold, and those that follow from them.
_OF_MESH = frozenset((
    "axis_names", "axis_sizes", "axis_types", "_axis_types", "devices", "abstract_device", "size", "_size", "_hash",
    "_cached_device_list",
))  # fmt: skip
_OF_SPEC = frozenset(("_partitions", "unreduced", "reduced", "unreduced_kind", "UNCONSTRAINED"))
_OF_SHARDING = frozenset((
    "mesh", "spec", "_logical_device_ids", "_device", "_devices", "_hlo_sharding", "_memory_kind", "memory_kind",
    "_device_assignment", "_internal_device_list", "_is_concrete", "device_set", "num_devices", "_hash",
    "has_addressable_devices", "is_fully_addressable", "is_fully_replicated", "get_replicated",
))  # fmt: skip
_DEVICE_LIST = getattr(xla_client, "DeviceList", None) or getattr(getattr(xla_client, "_xla", None), "DeviceList", None)


def parts_of(value: Any) -> tuple[Any, ...]:
    """Return the parts; raise CannotSkipError if the object has an attribute that they do not tell."""
    parts, known = _PARTS[type(value)]
    if known:
        check_attributes(value, known)
    return tuple(parts(value))


def _those_of(value: Any, *names: str) -> list[Any]:
    """Return attributes that not all versions of jax have."""
    return [getattr(value, name, None) for name in names]


_PARTS: dict[Any, tuple[Callable[[Any], Iterable[Any]], frozenset[str]]] = {
    meshes.Mesh: (lambda it: (it.axis_names, it.axis_types, it.devices.shape, *it.devices.flat), _OF_MESH),
    meshes.AbstractMesh: (
        lambda it: (it.axis_sizes, it.axis_names, it.axis_types, *_those_of(it, "abstract_device")), _OF_MESH
    ),
    PartitionSpec: (
        # Older ones are tuples; newer ones cannot be unpacked if they have more than partitions.
        lambda it: (*_those_of(it, "unreduced", "reduced", "unreduced_kind"), *getattr(it, "_partitions", it)), _OF_SPEC
    ),
    type(PartitionSpec.UNCONSTRAINED): (lambda _: (), frozenset()),
    NamedSharding: (
        lambda it: (it.mesh, it.spec, it.memory_kind, *_those_of(it, "_logical_device_ids", "_manual_axes")),
        _OF_SHARDING,
    ),
    SingleDeviceSharding: (lambda it: (*it.device_set, it.memory_kind), _OF_SHARDING),
    getattr(sharding_impls, "GSPMDSharding", None): (
        attrgetter("_device_assignment", "_hlo_sharding", "memory_kind"), _OF_SHARDING
    ),
    xla_client.HloSharding: (lambda it: (it.to_proto().SerializeToString(),), frozenset()),
    xla_client.OpSharding: (lambda it: (it.SerializeToString(),), frozenset()),
    _DEVICE_LIST: (tuple, frozenset()),
}  # fmt: skip


@encodes(*_PARTS)
def _placement(encoding: Encoding, value: Any) -> None:
    encoding.write_token(value, _placed)


def _placed(encoding: Encoding, value: Any) -> None:
    encoding.write(text(type_name(type(value))))
    encoding.encode_all(parts_of(value))


@encodes_kinds_of(xla_client.Device)
def device(encoding: Encoding, value: Any) -> None:
    """Write a device: its place and its kind."""
    encoding.write(text(f"device {value.platform} {value.id} {value.process_index} {value.device_kind}"))
