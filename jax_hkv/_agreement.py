"""What the processes of a run tell each other outside of steps, so that they do the same."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hkv._processes import PROCESSES


@functools.lru_cache
def spans_processes(mesh: Any) -> bool:
    """Whether devices of a mesh belong to several processes."""
    if jax.process_count() == 1 or not isinstance(mesh, Mesh):
        return False
    return len({device.process_index for device in mesh.devices.flat}) > 1


def agreed(
    call: str,
    placement: Any,
    what: str,
    number: int,
    others: Sequence[int] = (),
    *,
    got: str,
    remedy: str,
) -> np.ndarray:
    """Raises in every process if a number differs among them, so that all have to call this.

    Args:
      call: for errors.
      placement: of whose mesh's devices the processes are meant.
      what: the number is.
      number: from 0 to 2**64 - 1.
      others: which may differ.
      got: the number, for errors.
      remedy: for errors.

    Returns:
      What each device's process says, ``uint64[devices, 1 + others]``.
    """
    told = np.array([[number, *others]], np.uint64)
    if not spans_processes(placement.mesh):
        return told
    every = _gathered(placement, told.view(np.uint32)).view(np.uint64)
    differ = np.flatnonzero(every[:, 0] != told[0, 0])
    if len(differ):
        raise ValueError(
            f"{call}: {what} must be the same in every process, got {got} in process "
            f"{jax.process_index()}, and another for the devices {differ.tolist()} of the mesh: "
            f"{remedy}"
        )
    return every


def _gathered(placement: Any, words: np.ndarray) -> np.ndarray:
    """The words of all devices of a mesh, along whichever axes they lie."""
    mesh = placement.mesh
    own = np.repeat(words, len(placement.local_devices), axis=0)
    where = NamedSharding(mesh, P(mesh.axis_names))
    given = jax.make_array_from_process_local_data(where, own, (mesh.size, words.shape[1]))
    return np.asarray(_gathering(placement)(given).addressable_shards[0].data)


@functools.lru_cache(maxsize=16)
def _gathering(placement: Any) -> Any:
    every = placement.mesh.axis_names

    def gather(words: jax.Array) -> jax.Array:
        return jax.lax.all_gather(words, every, tiled=True)

    return jax.jit(placement._mapped(gather, (P(every),), P(), axes=every))


def check_has_parts(call: str, placement: Any) -> None:
    """Raises in a process of which a mesh has no device."""
    if not placement.local_parts:
        raise ValueError(
            f"{call}: the placement must have devices of this process, {jax.process_index()} of "
            f"{jax.process_count()}, got a mesh of those of others: call it in the processes whose "
            "devices the mesh has, or make the mesh of devices of all"
        )


def warn_if_alone() -> None:
    """Of a launched process that has not joined the others."""
    launched = os.environ.get(PROCESSES, "1")
    if launched != "1" and jax.process_count() == 1:
        warnings.warn(
            f"sharding.Placement: this is one of {launched} processes that jax_hkv.launch has "
            "started, but it has not joined the others, and trains alone: call "
            "jax_hkv.launch.initialize() before anything else of JAX",
            stacklevel=4,
        )
