"""Lower a program for meshes of devices, other layouts and other kinds of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

# Layout of 0.6 is called Format later, and its own Layout has this name there.
_Layout = getattr(layout, "DeviceLocalLayout", None) or layout.Layout


def lowered(function: Callable[..., Any], shapes: tuple[Any, ...], devices: Any, question: dict[str, Any]) -> Any:
    """Lower ``function`` as asked."""
    jit = question.get("jit", {})
    if "layouts" in question:
        placed = SingleDeviceSharding(devices[0])
        given, wanted = question["layouts"]
        results = jax.eval_shape(function, *shapes)
        jit = jit | {
            "in_shardings": tuple(_format(shape, given, placed) for shape in shapes),
            "out_shardings": jax.tree.map(lambda shape: _format(shape, wanted, placed), results),
        }
        return jax.jit(function, **jit).lower(*shapes)
    if "mesh" in question:
        mesh = _mesh(devices, **question["mesh"])
        way = question.get("spread", "first")
        placements = [NamedSharding(mesh, _spec(shape.shape, mesh, way)) for shape in shapes]
        if "results_spread" in question:
            results = jax.eval_shape(function, *shapes)
            out = question["results_spread"]
            jit = jit | {
                "out_shardings": jax.tree.map(lambda shape: NamedSharding(mesh, _spec(shape.shape, mesh, out)), results)
            }
    else:
        device = devices[question.get("device", 0)]
        kind = question.get("memory")
        placements = [SingleDeviceSharding(device, **({"memory_kind": kind} if kind else {}))] * len(shapes)
    given = (
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=placed)
        for shape, placed in zip(shapes, placements, strict=True)
    )
    return jax.jit(function, **jit).lower(*given)


def _format(shape: Any, order: int | str | None, placed: Any) -> Any:
    """Return a format whose dimensions are in the given one of all orders."""
    if order is None:
        return placed
    if order == "auto":
        return layout.Format(_Layout.AUTO, placed)
    orders = list(itertools.permutations(range(len(shape.shape))))
    return layout.Format(_Layout(major_to_minor=orders[order % len(orders)]), placed)


def _mesh(devices: Any, shape: list[int], order: list[int], explicit: bool = False) -> Mesh:
    """Return a mesh of the devices with these numbers."""
    names = tuple("xyz"[: len(shape)])
    kinds: dict[str, Any] = {}
    if explicit:
        kinds = {"axis_types": (jax.sharding.AxisType.Explicit,) * len(shape)}
    return Mesh(np.array([devices[number] for number in order]).reshape(shape), names, **kinds)


def _spec(shape: tuple[int, ...], mesh: Mesh, way: str) -> PartitionSpec:
    """Spread an array's first or last dimensions over the mesh's axes, or one dimension over all, or none."""
    axes: list[tuple[Any, int]] = list(mesh.shape.items())
    if way == "joined":
        axes = [(mesh.axis_names, mesh.size)]
    elif way == "none":
        axes = []
    parts: list[Any] = [None] * len(shape)
    for at in sorted(range(len(shape)), reverse=way == "last"):
        for axis in axes:
            if shape[at] and shape[at] % axis[1] == 0:
                parts[at] = axis[0]
                axes.remove(axis)
                break
    return PartitionSpec(*parts)
