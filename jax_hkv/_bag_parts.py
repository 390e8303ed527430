"""Bags of each of several micro-batches, one after the other: apart, and as those of one batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jax_hkv._checks import as_integer
from jax_hkv._compat import is_traced
from jax_hkv._keys import Keys
from jax_hkv.features import Jagged, Padded, is_jagged, known_splits


def are_bags(node: Any) -> bool:
    """Whether a node is a Jagged, or one with a mask."""
    return is_jagged(node) or (isinstance(node, Padded) and is_jagged(node.ids))


def as_count(call: str, count: Any) -> int:
    """A number of micro-batches."""
    return as_integer(call, "micro_batches", count, 1, 2**31 - 1)


def cut_bags(call: str, where: str, bags: Any, count: int, examples: list[int]) -> Any:
    """The bags of each micro-batch, stacked; `examples`: how many other arrays have, if any."""
    _check_sizes(call, where, bags, count, examples)
    return jax.tree.map(lambda leaf: leaf.reshape(count, len(leaf) // count, *leaf.shape[1:]), bags)


def _check_sizes(call: str, where: str, bags: Any, count: int, examples: list[int]) -> None:
    own = _jagged_of(bags)
    splits, positions = np.shape(own.row_splits)[0], own.ids.shape[0]
    size = splits - count  # bags, of as many Jagged: each has one more split than bags
    if splits % count or positions % count or (examples and size != examples[0]):
        beside = f" beside arrays of {examples} examples" if examples else ""
        raise ValueError(
            f"{call}: {where} must be a Jagged of each of the {count} micro-batches, one after "
            f"the other, got {splits} row_splits of {positions} positions{beside}: of one of all "
            f"bags make it by bags.for_parts({count}, capacity=), or make one of the bags of each "
            "part, with the same capacity=, and give jax_hkv.sharding.concatenate([...]) of them"
        )
    mask = None if own is bags else bags.valid
    if mask is not None and np.shape(mask) != (positions,):
        raise TypeError(
            f"{call}: {where}.valid must be bool[{positions}] like the ids of its Jagged, got "
            f"shape {list(np.shape(mask))}: mask the positions of the Jagged that is given"
        )


def check_bags_of_parts(call: str, where: str, bags: Any, count: int) -> None:
    """Raises for splits, where they are known, that are not those of each micro-batch."""
    _check_sizes(call, where, bags, count, [])
    own = _jagged_of(bags)
    if not is_traced(own.row_splits):
        for splits in np.asarray(own.row_splits).reshape(count, -1):
            known_splits(call, f"row_splits of {where}", splits, own.ids.shape[0] // count)


def whole_bags(call: str, where: str, bags: Any, count: int) -> Any:
    """Bags of each micro-batch as those of one batch, of which what is padding is masked.

    Splits that are known are checked; see :func:`are_amiss` for others. What has no such form is
    left as it is, for those who take it to say so.
    """
    if count == 1 or not are_bags(bags) or not has_axes(bags):
        return bags
    check_bags_of_parts(call, where, bags, count)
    given, mask = _jagged_of(bags), bags.valid if isinstance(bags, Padded) else None
    room = given.ids.shape[0] // count
    splits = jnp.clip(jnp.asarray(given.row_splits).reshape(count, -1), 0, room).astype(jnp.int32)
    valid = (jnp.arange(room, dtype=jnp.int32)[None] < splits[:, -1:]).reshape(-1)
    ends = splits[:, 1:] + room * jnp.arange(count, dtype=jnp.int32)[:, None]
    splits = jnp.concatenate([jnp.zeros(1, jnp.int32), ends.reshape(-1)])
    return Padded(Jagged(given.ids, splits, given.weights), valid if mask is None else valid & mask)


def has_axes(bags: Any) -> bool:
    """Whether all that a Jagged has, and its mask, are arrays that can be cut."""
    own = _jagged_of(bags)
    mask = [] if own is bags or bags.valid is None else [bags.valid]
    parts = [own.ids, own.row_splits, *mask]
    return all(hasattr(part, "dtype") or isinstance(part, Keys) for part in parts) and all(
        part.ndim == 1 for part in parts
    )


def are_amiss(bags: Any, count: int) -> Bool[Array, ""]:
    """Whether splits, in a program, are not those of a Jagged of each micro-batch."""
    own = _jagged_of(bags)
    splits = own.row_splits.reshape(count, -1)
    is_wrong = splits[:, -1] > own.ids.shape[0] // count
    if count > 1:  # positions before the first split are padding, too
        is_wrong |= splits[:, 0] != 0
    return jnp.any(is_wrong) | jnp.any(splits[:, 1:] < splits[:, :-1])


def _jagged_of(bags: Any) -> Jagged:
    return bags.ids if isinstance(bags, Padded) else bags
