"""What the layers for linen and for nnx have in common."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_hkv import metrics
from jax_hkv._gradients import LossScale, all_finite, clip_by_global_norm
from jax_hkv.table import Counts, Table

Unseen = Literal["initial", "zeros", "learned"]


class StepInfo(NamedTuple):
    """What a training step reports.

    Attributes:
      loss: of the batch, not scaled.
      aux: what the loss function returned beside it.
      tables: the metrics of each physical table, by its path.
      counts: what became of the ids of each table of a collection, by the collection's path and the
        table's name; see :meth:`jax_hkv.collection.Group.counts`.
      finite: whether the gradients were finite, so that the step was taken; None without a loss
        scale, when nobody looks.
    """

    loss: Float[Array, ""]
    aux: Any
    tables: dict[str, metrics.Metrics]
    counts: dict[str, Counts]
    finite: Bool[Array, ""] | None


def check_unseen(call: str, unseen: Unseen) -> None:
    """Raises unless `unseen` says what ids without a row get."""
    if unseen not in get_args(Unseen):
        raise ValueError(f"{call}: unseen must be one of {list(get_args(Unseen))}, got {unseen!r}")


def fill_of(unseen: Unseen) -> float | str:
    """What a lookup gives ids without a row; a learned row is added later."""
    return "initial" if unseen == "initial" else 0.0


def with_unseen(rows: jax.Array, slots: jax.Array, valid: Any, unseen: Any) -> jax.Array:
    """Rows, where ids have none: the given row (None: their own); zeros where masked."""
    if unseen is None:
        return rows
    absent = slots < 0
    own = absent if valid is None else absent & jnp.asarray(valid)
    replaced = jnp.where(own[..., None], jnp.asarray(unseen, rows.dtype), 0)
    return jnp.where(absent[..., None], replaced, rows)


def cast(rows: jax.Array, dtype: Any) -> jax.Array:
    """In the dtype of the output; None: as they are."""
    return rows if dtype is None else rows.astype(dtype)


def scaled(loss: jax.Array, scale: LossScale | None) -> jax.Array:
    """The loss that is differentiated."""
    return loss if scale is None else loss * scale.scale.astype(loss.dtype)


def prepared(
    dense: Any,
    rows: dict[Any, list[jax.Array]],
    results: dict[Any, list[Any]],
    scale: LossScale | None,
    max_norm: float | None,
) -> tuple[Any, dict[Any, list[jax.Array]], Bool[Array, ""] | None, LossScale | None]:
    """Gradients without the loss scale, clipped; whether they are finite; the next loss scale."""
    finite = None
    if scale is not None:
        finite = all_finite(dense, rows)
        inverse = 1.0 / scale.scale
        dense, rows = jax.tree.map(
            lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) * inverse,
            (dense, rows),
        )
        scale = scale.adjust(finite)
    if max_norm is not None:
        order = list(results)
        dense, clipped, _ = clip_by_global_norm(
            max_norm, dense, [results[name] for name in order], [rows[name] for name in order]
        )
        rows = dict(zip(order, clipped, strict=True))
    return dense, rows, finite, scale


def dense_update(
    tx: Any, gradients: Any, opt_state: Any, params: Any, finite: Bool[Array, ""] | None
) -> tuple[Any, Any]:
    """Parameters and state after a step of an optax transformation; before it where not finite."""
    gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, params)
    updates, state = tx.update(gradients, opt_state, params)
    moved = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    if finite is None:
        return moved, state
    return jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (moved, state), (params, opt_state)
    )


def updated(
    where: str, table: Table, optimizer: Any, results: list[Any], gradients: list[Any], extra: Any
) -> Table:
    """A table after its optimizer's step on all lookups of a training step."""
    if optimizer is None:
        raise ValueError(
            f"update_tables: {where} was looked up in training, but has no optimizer: give its "
            "layer one (optimizer=jax_hkv.optim.adam(1e-3)), or call it with train=False"
        )
    if len(results) == 1:
        return optimizer.update(table, results[0], gradients[0], **extra)
    return optimizer.update(table, results, gradients, **extra)


def summed(parts: list[dict[str, Counts]], scope: str) -> dict[str, Counts]:
    """The counts of all lookups of a training step, by path; a scan may have stacked them."""
    totals: dict[str, Counts] = {}
    for part in parts:
        for name, counts in part.items():
            where = f"{scope}/{name}" if scope else name
            own = jax.tree.map(jnp.sum, counts)
            before = totals.get(where)
            totals[where] = own if before is None else jax.tree.map(jnp.add, before, own)
    return totals
