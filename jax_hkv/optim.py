"""Any optax transformation on the rows that a batch touched.

The functions here ask nothing of optax but the form of its transformations: a pair of functions
``init(params)`` and ``update(updates, state, params)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_hkv import _checks
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._keys import Keys
from jax_hkv.index import NO_SLOT
from jax_hkv.table import (
    InsertResult,
    OptimizerRows,
    Table,
    gather_optimizer,
    gather_values,
    scatter_optimizer,
    scatter_values,
)

_ROW, _SHARED = "row", "shared"


class Transformation(Protocol):
    """What is needed of an ``optax.GradientTransformation``."""

    @property
    def init(self) -> Any:
        """From parameters to state."""

    @property
    def update(self) -> Any:
        """From (updates, state, params) to (updates, state)."""


@dataclasses.dataclass(frozen=True)
class _Structure:
    """How a state is made up of row leaves and shared leaves, in the order of its flattening."""

    tree: Any
    kinds: tuple[str, ...]

    def join(self, row: tuple[jax.Array, ...], shared: tuple[jax.Array, ...]) -> Any:
        rows, others = iter(row), iter(leaf[0] for leaf in shared)
        leaves = [next(rows) if kind == _ROW else next(others) for kind in self.kinds]
        return jax.tree.unflatten(self.tree, leaves)

    def split(self, state: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        leaves = list(zip(self.kinds, jax.tree.leaves(state), strict=True))
        return (
            tuple(leaf for kind, leaf in leaves if kind == _ROW),
            tuple(leaf[None] for kind, leaf in leaves if kind == _SHARED),
        )


@dataclasses.dataclass(frozen=True)
class SparseOptimizer:
    """An optax transformation that updates the rows of a batch only. Made by :func:`sparse`."""

    transformation: Transformation

    def init(self, table: Table) -> Table:
        """The table with this optimizer's rows, fresh for every slot.

        Args:
          table: whose rows will be optimized; optimizer rows that it has are replaced.

        Raises:
          ValueError: if a leaf of the optimizer's state is neither one value a row nor a scalar, or
            if a row's first state depends on the row.
        """
        structure = self._structure(table)
        with jax.ensure_compile_time_eval():
            state = self.transformation.init(jnp.zeros((1, table.dim), table.dtype))
            other = self.transformation.init(jnp.ones((1, table.dim), table.dtype))
        fresh, shared = structure.split(state)
        for leaf, leaf_of_ones in zip(fresh, structure.split(other)[0], strict=True):
            if not np.array_equal(np.asarray(leaf), np.asarray(leaf_of_ones), equal_nan=True):
                raise ValueError(
                    "optim.sparse: this transformation starts from the parameters (a copy of them, "
                    "say), but rows come and go, and a new row's state must not depend on the row"
                )
        optimizer = OptimizerRows(
            rows=tuple(_rows.new(leaf, table.capacity) for leaf in fresh),
            # A buffer of its own for each leaf: donation refuses one twice.
            fresh=tuple(jnp.array(leaf, copy=True) for leaf in fresh),
            shared=tuple(jnp.array(leaf, copy=True) for leaf in shared),
            skipped=jnp.zeros((1,), jnp.uint32),
            structure=structure,
        )
        return dataclasses.replace(table, optimizer=optimizer)

    def _structure(self, table: Table) -> _Structure:
        """Which leaves of the state follow the number of rows, seen at two different numbers."""
        two, three = (
            jax.eval_shape(
                self.transformation.init, jax.ShapeDtypeStruct((count, table.dim), table.dtype)
            )
            for count in (2, 3)
        )
        leaves = jax.tree.leaves_with_path(two)
        kinds = [
            _kind(path, leaf, other)
            for (path, leaf), other in zip(leaves, jax.tree.leaves(three), strict=True)
        ]
        return _Structure(jax.tree.structure(two), tuple(kinds))

    def update(
        self,
        table: Table,
        result: InsertResult | Sequence[InsertResult],
        row_gradients: Float[Array, "*batch dim"] | Sequence[Float[Array, "*batch dim"]],
        **extra: Any,
    ) -> Table:
        """The table after one step of the optimizer on the rows of a batch.

        The gradients of equal keys are summed. A row whose slot holds another key by now (the
        result is stale) is skipped, and ``table.optimizer.skipped`` counts it; refused and masked
        positions are left out. Leaves that rows share (step counts) advance once a call.

        Args:
          table: after the :func:`jax_hkv.find_or_insert` that gave the result.
          result: of that call; or the results of several lookups, which make one step together.
          row_gradients: like ``result.values``; or as many of them as there are results.
          **extra: passed on to the transformation's update.

        Raises:
          ValueError: if the table has no optimizer rows of this transformation.
        """
        if table.optimizer is None or table.optimizer.structure != self._structure(table):
            raise ValueError(
                "optim.sparse.update: the table has no optimizer rows of this transformation. Call "
                "table = opt.init(table) once, before the first update"
            )
        results = [result] if isinstance(result, InsertResult) else list(result)
        gradients = [row_gradients] if isinstance(result, InsertResult) else list(row_gradients)
        _check_results(results, gradients)
        flat = [_flat_gradients(table, *pair) for pair in zip(results, gradients, strict=True)]
        index, batch = _verified(table.index, results)
        table = dataclasses.replace(table, index=index)
        return _update(self.transformation, table, batch, jnp.concatenate(flat), extra)


def sparse(transformation: Transformation) -> SparseOptimizer:
    """Makes an optax transformation update the rows that a batch touched, and no others.

    The transformation must treat rows alike and apart: its state is one leaf of row shape, or one
    value, for each row (moments, accumulators), or scalars (step counts). Norms over all rows
    (global clipping) belong before it.

    Args:
      transformation: any ``optax.GradientTransformation``.

    Example:
      >>> import optax
      >>> import jax_hkv as hkv
      >>> opt = sparse(optax.adagrad(0.1))
      >>> table = opt.init(hkv.create(128, dim=2))
      >>> table, result = hkv.find_or_insert(table, np.array([1, 2], np.int32))
      >>> table = opt.update(table, result, jnp.ones_like(result.values))
    """
    return SparseOptimizer(transformation)


def _kind(path: Any, two: Any, three: Any) -> str:
    if two.shape[:1] == (2,) and three.shape == (3, *two.shape[1:]):
        return _ROW
    if two.shape == three.shape == ():
        return _SHARED
    raise ValueError(
        f"optim.sparse: the optimizer's state{jax.tree_util.keystr(path)} has shape "
        f"{list(two.shape)} for rows of shape [2, dim]: neither a leaf with one entry a row nor a "
        "scalar, so it mixes rows. Use a transformation that treats each row by itself"
    )


def _check_results(results: list[Any], gradients: list[Any]) -> None:
    call = "optim.sparse.update"
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


def _flat_gradients(table: Table, result: InsertResult, gradients: Any) -> jax.Array:
    shape = (*result.keys.shape, table.dim)
    array = jnp.asarray(gradients)
    if array.dtype not in (jnp.float32, table.dtype):
        raise TypeError(
            f"optim.sparse.update: row_gradients must be float32 or {table.dtype} like the table, "
            f"got {array.dtype}: cast with .astype(table.dtype)"
        )
    rows = _checks.as_rows("optim.sparse.update", "row_gradients", array, shape, array.dtype)
    return rows.reshape(-1, table.dim)


class _Batch(NamedTuple):
    """The distinct keys of an update: who they are, where their rows lie, how many were stale."""

    groups: _index.Groups
    slots: jax.Array
    stale: jax.Array


def _verified(index: _index.Index, results: list[InsertResult]) -> tuple[_index.Index, _Batch]:
    """What the results say that still holds; the keys of several results are merged."""
    verified = []
    stale = jnp.zeros((), jnp.uint32)
    for result in results:
        index, slots = _index.verify(index, Keys(result.groups.keys), result.unique_slots)
        verified.append(slots)
        stale = stale + jnp.sum((result.unique_slots >= 0) & (slots < 0), dtype=jnp.uint32)
    if len(results) == 1:
        return index, _Batch(results[0].groups, verified[0], stale)
    pairs = zip(results, verified, strict=True)
    slots = jnp.concatenate([_index.by_position(r.groups, v, NO_SLOT) for r, v in pairs])
    words = jnp.concatenate([result.keys.words.reshape(-1, 2) for result in results])
    groups = _index.unique(Keys(words), slots >= 0)
    first = jnp.where(_index.all_of(groups), _index.take(slots, groups.first), NO_SLOT)
    return index, _Batch(groups, first, stale)


def _update(
    transformation: Transformation,
    table: Table,
    batch: _Batch,
    gradients: jax.Array,
    extra: dict[str, Any],
) -> Table:
    """Reads the rows of distinct keys, lets the transformation work on them, writes them back."""
    before = table.optimizer
    assert before is not None
    table, params = gather_values(table, batch.slots)
    table, state_rows = gather_optimizer(table, batch.slots)
    sums = _index.combine(batch.groups, _index.Terms(gradients)).astype(table.dtype)
    state = before.structure.join(state_rows, before.shared)
    updates, state = transformation.update(sums, state, params, **extra)
    new_rows, shared = before.structure.split(state)

    sources = _rows.positions(batch.slots.shape[0])
    new_params = (params + updates).astype(table.dtype)
    table = scatter_values(table, batch.slots, sources, new_params)
    table = scatter_optimizer(table, batch.slots, sources, new_rows)
    optimizer = table.optimizer
    assert optimizer is not None
    skipped = optimizer.skipped + batch.stale
    optimizer = dataclasses.replace(optimizer, shared=shared, skipped=skipped)
    return dataclasses.replace(table, optimizer=optimizer)
