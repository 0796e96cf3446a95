"""Compile functions over a mesh of four devices; with CHANGED=1, each over another mesh or sharding."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

IS_CHANGED = os.environ.get("CHANGED") == "1"


def either(before, changed):
    return changed if IS_CHANGED else before


def placed(sizes, *axes):
    """Return an array on a mesh of these sizes, with these axes of it for its dimensions."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.device_put(jnp.ones((8, 8)), NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*axes)))


@jax.jit
def device_count(a):
    return a @ a.T


device_count(placed(either((2, 1), (4, 1)), "x", None))


@jax.jit
def mesh_shape(a):
    return a @ a.T


mesh_shape(placed(either((4, 1), (2, 2)), "x", None))


@jax.jit
def sharding(a):
    return a @ a.T


sharding(placed((2, 2), *either(("x", None), ("x", "y"))))
