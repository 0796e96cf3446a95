"""Records: what jax makes of a call beside the program, written without pickling.

A record holds all attributes of a ``MeshComputation`` except its module, and the tree of the results. A device is
written as its id. A computation with a value of a type that is not in the tables below gets no record.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import msgpack
import numpy as np
from jax._src import core, layout, sharding_impls, xla_bridge
from jax._src import mesh as meshes
from jax._src.interpreters import mlir, pxla
from jax._src.lib import xla_client
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from xcache.hook.calls import trees
from xcache.hook.structure.encoding import CannotSkipError, type_name
from xcache.hook.structure.placement import parts_of
from xcache.wire import bounded

try:
    from jax._src.random import prng
except ImportError:  # before jax 0.10
    from jax._src import prng

_FORMAT = 4
# Not part of a record: the module, which nobody lowers, and the executable.
_LEFT_OUT = ("_hlo", "_executable")
# A record has 50 bytes and four lists for each array of its call, and the daemon takes those of 13,000 arrays.
_MOST_BYTES = 1024 * 1024
# A tree of results has dictionaries with numbers as keys.
_SHAPE = bounded.Shape(_MOST_BYTES, _MOST_BYTES, containers=65_536, only_text_keys=False)
_PLAIN = (type(None), bool, int, float, str, bytes)
_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
_Parts = Callable[[Any], Sequence[Any]]


class Record(NamedTuple):
    """The attributes of a ``MeshComputation``, and the tree of the results as it was written."""

    attributes: dict[str, Any]
    results: Any
    # Modules of jax's that tracing imported. Later calls may depend on them, so a process that skips it imports them.
    imported: list[str]

    def tree(self, arguments: Sequence[Any]) -> Any:
        """Return the tree of the results of a call with these trees of arguments, whose objects it holds."""
        return trees.decode(self.results, arguments)


def encode(computation: Any, results: Any, parts: Sequence[trees.Part], imported: Sequence[str] = ()) -> bytes:
    """Return the record of a computation; raise CannotSkipError if it holds anything that cannot be written.

    ``parts`` are those of the trees of the call's arguments; tracing ``imported`` these modules.
    """
    writer = _Writer()
    attributes = {name: value for name, value in vars(computation).items() if name not in _LEFT_OUT}
    if attributes.get("const_args"):
        raise CannotSkipError("hoisted constants")
    form = [_FORMAT, trees.encode(results, parts), writer.write(attributes), writer.shared, list(imported)]
    record = zlib.compress(msgpack.packb(form))
    try:
        _unpacked(record)
    except ValueError:
        raise CannotSkipError("large record") from None
    return record


def decode(record: bytes) -> Record:
    """Return what was written; raise ValueError if this process cannot read it."""
    version, results, attributes, shared, imported = _unpacked(record)
    if version != _FORMAT:
        raise ValueError("the record has another format")
    return Record(_Reader(shared).read(attributes), results, imported)


def are_same(one: bytes, other: bytes) -> bool:
    """Return whether two records are of the same computation; only the first trace in a process imports modules."""
    return bool(_unpacked(one)[:-1] == _unpacked(other)[:-1])


def _unpacked(record: bytes) -> Any:
    return bounded.unpacked(bounded.inflated(record, _MOST_BYTES), _SHAPE)


def make_computation(record: Record, module: Any) -> Any:
    """Return jax's computation of a record, with this module."""
    made = object.__new__(pxla.MeshComputation)
    vars(made).update(record.attributes, _hlo=module, _executable=None)
    return made


class _Writer:
    """Writes values as lists that begin with the name of their type; those of the types in ``_SHARED`` only once."""

    def __init__(self) -> None:
        self.shared: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def write(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        name, parts, make = _row_of(value)
        if name not in _SHARED:
            return [name, *map(self.write, parts(value))]
        key = type(value), value
        if key not in self._numbers:
            form = [name, *map(self.write, parts(value))]
            if make(*map(_Reader(self.shared).read, form[1:])) != value:
                raise CannotSkipError(f"a computation's {type(value).__name__} cannot be written")
            self.shared.append(form)
            self._numbers[key] = len(self.shared) - 1
        return ["#", self._numbers[key]]


def _row_of(value: Any) -> tuple[str, _Parts, Callable[..., Any]]:
    for name, kind, parts, make in _TYPES:
        if type(value) is kind or (kind in _BASES and isinstance(value, kind)):
            return name, parts, make
    raise CannotSkipError(f"unknown type in a computation: {type_name(type(value))}")


class _Reader:
    """Makes values of what was written; equal ones of the types in ``_SHARED`` become one object."""

    def __init__(self, shared: list[Any]) -> None:
        self._shared = shared
        self._made: dict[int, Any] = {}

    def read(self, form: Any) -> Any:
        if type(form) is not list:
            return form
        name, *parts = form
        if name != "#":
            return _MAKERS[name](*map(self.read, parts))
        (number,) = parts
        if number not in self._made:
            self._made[number] = self.read(self._shared[number])
        return self._made[number]


def _refuse(reason: str, value: Any) -> Any:
    if value:
        raise CannotSkipError(reason)
    return value


def _device(platform: str, number: int) -> Any:
    for device in xla_bridge.get_backend(platform).devices():
        if device.id == number:
            return device
    raise ValueError(f"there is no device {number} of {platform}")


def _aval(value: Any) -> tuple[Any, ...]:
    _refuse("varying axes", getattr(value, "vma", None))
    sharding = getattr(value, "sharding", None)
    return value.shape, value.dtype, value.weak_type, None if sharding is None or sharding.mesh.empty else sharding


def _make_aval(shape: Any, dtype: Any, weak_type: bool, sharding: Any) -> Any:
    more = {} if sharding is None else {"sharding": sharding}
    return core.ShapedArray(shape, dtype, weak_type=weak_type, **more)


def _make_named(mesh: Any, spec: Any, memory_kind: Any, device_ids: Any, manual_axes: Any) -> Any:
    _refuse("manual axes", manual_axes)
    return NamedSharding(mesh, spec, memory_kind=memory_kind, _logical_device_ids=device_ids)


def _make_mesh(names: Any, types: Any, shape: Any, *devices: Any) -> Any:
    held = np.empty(len(devices), dtype=object)
    held[:] = devices
    return meshes.Mesh(held.reshape(shape), names, axis_types=types)


def _make_abstract_mesh(sizes: Any, names: Any, types: Any, device: Any) -> Any:
    return meshes.AbstractMesh(sizes, names, axis_types=types, abstract_device=device)


def _make_spec(unreduced: Any, reduced: Any, kind: Any, *partitions: Any) -> Any:
    more = {"unreduced": unreduced, "reduced": reduced, "unreduced_kind": kind}
    return PartitionSpec(*partitions, **{name: value for name, value in more.items() if value})


def _make_hlo_sharding(proto: bytes) -> Any:
    sharding = xla_client.OpSharding()
    sharding.ParseFromString(proto)
    return xla_client.HloSharding.from_proto(sharding)


def _polymorphism(value: Any) -> tuple[Any, ...]:
    _refuse("symbolic shapes", value.uses_dim_vars or value.dim_vars)
    return ()


_TYPES: list[tuple[str, Any, _Parts, Callable[..., Any]]] = [
    ("tuple", tuple, tuple, lambda *items: items),
    ("list", list, list, lambda *items: list(items)),
    ("set", set, sorted, lambda *items: set(items)),
    ("frozenset", frozenset, sorted, lambda *items: frozenset(items)),
    ("dict", dict, lambda value: [part for item in value.items() for part in item],
     lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True))),
    ("dtype", np.dtype, lambda value: (value.name,), jax.numpy.dtype),
    ("key", prng.KeyTy, lambda value: (value._impl.name,), lambda name: prng.KeyTy(prng.prngs[name])),
    ("unspecified", type(sharding_impls.UNSPECIFIED), lambda _: (), lambda: sharding_impls.UNSPECIFIED),
    ("unconstrained", type(_UNCONSTRAINED), parts_of, lambda: _UNCONSTRAINED),
    ("device", xla_client.Device, lambda value: (value.platform, value.id), _device),
    ("devices", xla_client.DeviceList, parts_of, lambda *devices: xla_client.DeviceList(devices)),
    ("client", xla_client.Client, lambda value: (value.platform,), xla_bridge.get_backend),
    ("polymorphism", mlir.ShapePolyLoweringState, _polymorphism,
     lambda: mlir.ShapePolyLoweringState((), None)),
    # jax uses it only in messages of ahead-of-time calls, so a record leaves it out.
    ("arguments", pxla.AllArgsInfo, lambda _: (), lambda: None),
    ("axis type", meshes.AxisType, lambda value: (value.name,), lambda name: meshes.AxisType[name]),
    ("spec", PartitionSpec, parts_of, _make_spec),
    ("abstract device", meshes.AbstractDevice, dataclasses.astuple, meshes.AbstractDevice),
    ("aval", core.ShapedArray, _aval, _make_aval),
    ("single", SingleDeviceSharding, parts_of, lambda device, kind: SingleDeviceSharding(device, memory_kind=kind)),
    ("named", NamedSharding, parts_of, _make_named),
    ("mesh", meshes.Mesh, parts_of, _make_mesh),
    ("abstract mesh", meshes.AbstractMesh, parts_of, _make_abstract_mesh),
    ("hlo sharding", xla_client.HloSharding, parts_of, _make_hlo_sharding),
    ("gspmd", getattr(sharding_impls, "GSPMDSharding", None), parts_of,
     lambda devices, sharding, kind: sharding_impls.GSPMDSharding(devices, sharding, memory_kind=kind)),
    ("layout", layout.Layout, attrgetter("major_to_minor", "tiling", "sub_byte_element_size_in_bits"), layout.Layout),
]  # fmt: skip
# Types of which a computation holds many equal values. Each is compared with what is made of it.
_SHARED = ("aval", "single", "named", "mesh", "abstract mesh", "gspmd", "layout")
_BASES = (np.dtype, xla_client.Device, xla_client.Client)
_MAKERS = {name: make for name, _, _, make in _TYPES}
