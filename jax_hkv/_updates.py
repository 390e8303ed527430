"""What every optimizer does before and after its arithmetic: who is updated, by which gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Num, UInt32

from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._checks import as_rows
from jax_hkv._keys import Keys
from jax_hkv.index import NO_SLOT
from jax_hkv.table import InsertResult, OptimizerRows, Table

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


class Batch(NamedTuple):
    """The distinct keys of an update.

    Attributes:
      groups: who they are.
      slots: where their rows lie, -1 for those that are not updated.
      terms: what their gradients are sums of.
      stale: how many have lost their slot since the lookup.
    """

    groups: _index.Groups
    slots: Int32[Array, " n"]
    terms: _index.Terms
    stale: UInt32[Array, ""]


def optimizer_rows(
    fresh: Sequence[Num[Array, "1 ..."]],
    shared: Sequence[Num[Array, "1 ..."]],
    structure: Any,
    slots: int,
) -> OptimizerRows:
    """Optimizer rows for a table of so many slots, all of them fresh."""
    return OptimizerRows(
        rows=tuple(_rows.new(leaf, slots) for leaf in fresh),
        # A buffer of its own for each leaf: donation refuses one twice.
        fresh=tuple(jnp.array(leaf, copy=True) for leaf in fresh),
        shared=tuple(jnp.array(leaf, copy=True) for leaf in shared),
        skipped=jnp.zeros((1,), jnp.uint32),
        structure=structure,
    )


def rows_of(table: Table, structure: Any) -> OptimizerRows:
    """The table's optimizer rows; raises unless they are of this structure."""
    if table.optimizer is None or table.optimizer.structure != structure:
        raise ValueError(
            "optim.update: the table has no optimizer rows of this optimizer. Call "
            "table = opt.init(table) once, before the first update"
        )
    return table.optimizer


def batch_of(
    table: Table, result: Any, row_gradients: Any, apply: Bool[Array, ""] | None
) -> tuple[Table, Batch]:
    """Checks the arguments of an update; several results are merged into one batch."""
    results = [result] if isinstance(result, InsertResult) else list(result)
    gradients = [row_gradients] if isinstance(result, InsertResult) else list(row_gradients)
    _check_results(results, gradients)
    terms = terms_of(results, gradients)
    index, groups, slots, stale = _verified(table.index, results)
    if apply is not None:
        slots = jnp.where(apply, slots, NO_SLOT)
        stale = jnp.where(apply, stale, 0)
    return dataclasses.replace(table, index=index), Batch(groups, slots, terms, stale)


def merged_groups(results: list[InsertResult]) -> tuple[_index.Groups, Int32[Array, " n"]]:
    """The distinct keys of all results, and their slots as the results have them."""
    index_slots = [result.unique_slots for result in results]
    if len(results) == 1:
        return results[0].groups, index_slots[0]
    return _merge(results, index_slots)


def terms_of(results: list[InsertResult], gradients: list[Any]) -> _index.Terms:
    """The gradients of all results as terms of sums over their positions, in order."""
    flat = [_flat(*pair) for pair in zip(results, gradients, strict=True)]
    kind = jnp.result_type(*flat)
    rows = jnp.concatenate([rows.astype(kind) for rows in flat]) if len(flat) > 1 else flat[0]
    if all(result.bags is None for result in results):
        return _index.Terms(rows)
    sources, first = [], 0
    for result, own in zip(results, flat, strict=True):
        bags = result.bags
        own_sources = _rows.positions(_positions(result)) if bags is None else bags.sources
        sources.append(own_sources + jnp.int32(first))
        first += own.shape[0]
    weights = None
    if any(result.bags is not None and result.bags.weights is not None for result in results):
        weights = jnp.concatenate([_weights(result) for result in results])
    return _index.Terms(rows, jnp.concatenate(sources), weights)


def _positions(result: InsertResult) -> int:
    return result.groups.inverse.shape[0]


def _weights(result: InsertResult) -> jax.Array:
    if result.bags is None or result.bags.weights is None:
        return jnp.ones((_positions(result),), jnp.float32)
    return result.bags.weights


def _check_results(results: list[Any], gradients: list[Any]) -> None:
    call = "optim.update"
    for result in results:
        if not isinstance(result, InsertResult):
            raise TypeError(
                f"{call}: result must be what find_or_insert returned (or a sequence of such), got "
                f"{type(result).__name__}"
            )
        if result.unique_slots.ndim != 1:
            raise ValueError(
                f"{call}: result has a leading axis {list(result.unique_slots.shape[:-1])}, as "
                "jax.lax.scan stacks them; update inside the scan, or give a list of results"
            )
    if not results or len(results) != len(gradients):
        raise ValueError(
            f"{call}: row_gradients must be one for each result, got {len(gradients)} for "
            f"{len(results)} results"
        )


def _flat(result: InsertResult, gradients: Any) -> jax.Array:
    array = jnp.asarray(gradients)
    if array.dtype not in _FLOATS:
        raise TypeError(
            f"optim.update: row_gradients must be float32, bfloat16 or float16, got {array.dtype}: "
            "cast with .astype(jnp.float32)"
        )
    shape = np.shape(result.values)
    rows = as_rows("optim.update", "row_gradients", array, shape, array.dtype)
    return rows.reshape(-1, shape[-1])


def _verified(
    index: _index.Index, results: list[InsertResult]
) -> tuple[_index.Index, _index.Groups, jax.Array, jax.Array]:
    """What the results say that still holds."""
    verified = []
    stale = jnp.zeros((), jnp.uint32)
    for result in results:
        index, slots = _index.verify(index, Keys(result.groups.keys), result.unique_slots)
        verified.append(slots)
        stale = stale + jnp.sum((result.unique_slots >= 0) & (slots < 0), dtype=jnp.uint32)
    if len(results) == 1:
        return index, results[0].groups, verified[0], stale
    return index, *_merge(results, verified), stale


def _merge(
    results: list[InsertResult], unique_slots: list[jax.Array]
) -> tuple[_index.Groups, jax.Array]:
    pairs = zip(results, unique_slots, strict=True)
    slots = jnp.concatenate([_index.by_position(r.groups, own, NO_SLOT) for r, own in pairs])
    words = jnp.concatenate([result.keys.words.reshape(-1, 2) for result in results])
    groups = _index.unique(Keys(words), slots >= 0)
    first = jnp.where(_index.all_of(groups), _index.take(slots, groups.first), NO_SLOT)
    return groups, first
