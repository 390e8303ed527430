"""What the processes of a run tell each other outside of steps, so that they do the same."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_hkv._processes import PROCESSES


@functools.lru_cache
def spans_processes(mesh: Any) -> bool:
    """Whether devices of a mesh belong to several processes."""
    if jax.process_count() == 1 or not hasattr(mesh, "devices"):
        return False
    return len({device.process_index for device in mesh.devices.flat}) > 1


def told(placement: Any, numbers: Sequence[int]) -> np.ndarray:
    """Numbers of each device's process, ``uint64[devices, n]``; all processes have to call this."""
    words = np.array([numbers], np.uint64).view(np.uint32)
    every = _telling(placement)((), placement.put(np.tile(words, (len(placement.local_parts), 1))))
    return np.asarray(placement.shards(every)[0]).reshape(placement.devices, -1).view(np.uint64)


@functools.lru_cache(maxsize=16)
def _telling(placement: Any) -> Any:
    def tell(nothing: Any, words: jax.Array) -> jax.Array:
        return jax.lax.all_gather(words, placement.axes, tiled=True)[None]

    return placement.run(tell)


def check_same(call: str, placement: Any, what: str, number: int, got: str, remedy: str) -> None:
    """Raises in every process if a number differs among them."""
    if not spans_processes(placement.mesh):
        return
    others = np.flatnonzero(told(placement, [number])[:, 0] != number)
    if len(others):
        raise ValueError(
            f"{call}: {what} must be the same in every process, got {got} in process "
            f"{jax.process_index()}, and another for the parts {others.tolist()} of the mesh: "
            f"{remedy}"
        )


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
            stacklevel=5,
        )
