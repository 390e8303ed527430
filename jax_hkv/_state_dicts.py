"""What `flax.serialization` does with nodes: to_bytes, from_bytes, to_state_dict, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization


def register(*kinds: type) -> None:
    """Classes of pytrees, whose leaves are written by their paths."""
    for kind in kinds:
        serialization.register_serialization_state(kind, lambda node: _named(node)[0], _restored)


def _named(node: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by their paths, and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(node)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}, structure


def _restored(target: Any, state: Mapping[str, Any]) -> Any:
    expected, structure = _named(target)
    if expected.keys() != state.keys():
        raise ValueError(
            f"flax.serialization: the state of a {type(target).__name__} must have the leaves of "
            f"the target; missing: {sorted(expected.keys() - state.keys())}, unknown: "
            f"{sorted(state.keys() - expected.keys())}: make the target with the same arguments"
        )
    for name, leaf in expected.items():
        kinds = [
            (np.shape(array), getattr(array, "dtype", None) or jnp.result_type(array))
            for array in (leaf, state[name])
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"flax.serialization: {type(target).__name__}{name} must be {kinds[0][1]}"
                f"{list(kinds[0][0])} as in the target, got {kinds[1][1]}{list(kinds[1][0])}: "
                "make the target with the same arguments"
            )
    return structure.unflatten([state[name] for name in expected])
