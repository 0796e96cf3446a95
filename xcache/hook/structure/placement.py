"""Devices, meshes and shardings."""

from __future__ import annotations

from typing import Any

from jax._src import mesh as meshes
from jax._src import sharding_impls
from jax._src.lib import xla_client
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from xcache.hook.structure.encoding import HANDLERS, Encoding, by_content, check_attributes, encodes, tagged, text

# The attributes of each class that are written here, and those that follow from them.
_OF_MESH = frozenset(("axis_names", "axis_types", "_axis_types", "devices", "size", "_size", "_hash",
                      "_cached_device_list"))  # fmt: skip
_OF_ABSTRACT_MESH = frozenset(("axis_names", "axis_sizes", "axis_types", "_axis_types", "abstract_device", "size",
                               "_size", "_hash"))  # fmt: skip
_OF_SPEC = frozenset(("_partitions", "unreduced", "reduced", "unreduced_kind", "UNCONSTRAINED"))
_OF_SHARDING = frozenset((
    "mesh", "spec", "_logical_device_ids", "_device", "_devices", "_hlo_sharding", "_memory_kind", "memory_kind",
    "_device_assignment", "_internal_device_list", "_is_concrete", "device_set", "num_devices", "_hash",
    "has_addressable_devices", "is_fully_addressable", "is_fully_replicated", "get_replicated",
))  # fmt: skip


def device(encoding: Encoding, value: Any) -> None:
    """Write a device: its place and its kind."""
    encoding.write(text(f"device {value.platform} {value.id} {value.process_index} {value.device_kind}"))


@encodes(meshes.Mesh)
@by_content
def _mesh(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_MESH)
    encoding.write(b"mesh")
    types = value._axis_types if hasattr(value, "_axis_types") else value.axis_types
    encoding.encode_all((value.axis_names, types, value.devices.shape))
    encoding.encode_all(value.devices.flat)


@encodes(meshes.AbstractMesh)
@by_content
def _abstract_mesh(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_ABSTRACT_MESH)
    encoding.write(b"abstract mesh")
    encoding.encode_all((value.axis_names, value.axis_sizes, value.axis_types, getattr(value, "abstract_device", None)))


@encodes(PartitionSpec)
def _partition_spec(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_SPEC)
    encoding.write(b"P")
    partitions = value._partitions if hasattr(value, "_partitions") else tuple(value)
    others = (getattr(value, name, None) for name in ("unreduced", "reduced", "unreduced_kind"))
    encoding.encode_all((partitions, *others))


@encodes(type(PartitionSpec.UNCONSTRAINED))
def _unconstrained(encoding: Encoding, _: Any) -> None:
    encoding.write(b"UC")


@encodes(NamedSharding)
@by_content
def _named_sharding(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_SHARDING)
    encoding.write(b"NS")
    kind = value._memory_kind if hasattr(value, "_memory_kind") else value.memory_kind
    others = (getattr(value, name, None) for name in ("_logical_device_ids", "_manual_axes"))
    encoding.encode_all((value.mesh, value.spec, kind, *others))


@encodes(SingleDeviceSharding)
def _single_device(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_SHARDING)
    encoding.write(b"SDS")
    encoding.encode_all((next(iter(value.device_set)), getattr(value, "_memory_kind", None)))


def _gspmd_sharding(encoding: Encoding, value: Any) -> None:
    check_attributes(value, _OF_SHARDING)
    encoding.write(b"GS")
    devices = value._devices if hasattr(value, "_devices") else value._device_assignment
    encoding.encode_all((devices, value._hlo_sharding, getattr(value, "_memory_kind", None)))


if hasattr(sharding_impls, "GSPMDSharding"):
    HANDLERS[sharding_impls.GSPMDSharding] = _gspmd_sharding


@encodes(xla_client.HloSharding)
def _hlo_sharding(encoding: Encoding, value: Any) -> None:
    encoding.write(tagged(b"HS", value.to_proto().SerializeToString()))


@encodes(xla_client.OpSharding)
def _op_sharding(encoding: Encoding, value: Any) -> None:
    encoding.write(tagged(b"OS", value.SerializeToString()))


def _device_list(encoding: Encoding, value: Any) -> None:
    encoding.write(b"DL")
    encoding.encode_all(value)


_DEVICE_LIST = getattr(xla_client, "DeviceList", None) or getattr(getattr(xla_client, "_xla", None), "DeviceList", None)
if _DEVICE_LIST is not None:
    HANDLERS[_DEVICE_LIST] = _device_list


def encoder_for(value: Any) -> Any:
    """Return the function for values of a type that is not in the table, or None."""
    return device if isinstance(value, xla_client.Device) else None
