"""Where a model's arrays lie: on one device, or cut over the devices of a mesh, which may span processes.

On a mesh, every array that `sharding.py` cuts consists of its devices' shares, stacked along the first axis
whichever axis it was cut along, so that all such arrays are laid out and passed on in one way. The host holds
only the shares of this process's own devices, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from levserve.model.sharding import AXIS, UNSHARED, Shards

HostArray = NDArray[np.generic] | jax.Array
WHOLE = PartitionSpec()
"""Every device has all of an array."""
STACKED = PartitionSpec(AXIS)
BY_HEADS = PartitionSpec(None, None, AXIS)
"""The KV pool: every device has the keys and values of its own heads."""


def make_mesh(devices: Sequence[jax.Device]) -> Mesh | None:
    """The mesh of a model that these devices share; None for one device."""
    return None if len(devices) == 1 else Mesh(np.array(devices), (AXIS,))


def mesh_of(array: jax.Array | jax.ShapeDtypeStruct) -> Mesh | None:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def devices_of(array: jax.Array | jax.ShapeDtypeStruct) -> list[jax.Device]:
    """The devices that an array lies on, in the order of their mesh."""
    mesh = mesh_of(array)
    return list(array.sharding.device_set) if mesh is None else list(mesh.devices.flat)


def shards_of(mesh: Mesh | None) -> Shards:
    if mesh is None:
        return UNSHARED
    here = [index for index, device in enumerate(mesh.devices.flat) if _is_here(device)]
    return Shards(mesh.size, tuple(here))


def place(host: NDArray[np.generic], mesh: Mesh | None, *, is_cut: bool) -> jax.Array:
    """Puts an array on the device; on a mesh, puts this process's shares of it on its devices."""
    if mesh is None:
        return jax.device_put(host)
    return put_like(host, NamedSharding(mesh, STACKED if is_cut else WHOLE))


def put_like(host: HostArray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array where another one with this sharding lies."""
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(host, sharding)
    devices = [device for device in sharding.mesh.devices.flat if _is_here(device)]
    if sharding.spec == WHOLE:
        parts, shape = [host] * len(devices), host.shape
    else:
        parts = np.split(np.asarray(host), len(devices))
        shape = (len(parts[0]) * sharding.mesh.size, *host.shape[1:])
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def host_shape(array: jax.Array) -> tuple[int, ...]:
    """The shape of the host array with which `put_like` would replace this one."""
    if array.is_fully_replicated:
        return tuple(array.shape)
    rows = array.sharding.shard_shape(array.shape)[0]
    return (rows * len(array.addressable_shards), *array.shape[1:])


def device_bytes(array: jax.Array) -> int:
    """Bytes of an array on each of its devices."""
    shape = array.sharding.shard_shape(array.shape)
    return int(np.prod(shape, dtype=np.int64)) * array.dtype.itemsize


def _is_here(device: jax.Device) -> bool:
    return bool(device.process_index == jax.process_index())
