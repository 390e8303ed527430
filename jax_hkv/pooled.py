"""Pooled lookups: the rows of each bag of ids come back as one.

The sum of a bag is taken natively while rows are read, by the fixed tree of docs/semantics.md,
section 8, so that no row of a single id is written. Everything that adds floating-point numbers of
several positions, here and in the derivatives, goes through that tree: the same bits on every run
and backend.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_hkv import _checks, _ffi, features
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._bags import Bagged, Given, Layout, counts_in, joined_bags
from jax_hkv._compat import match_varying
from jax_hkv._inserts import insert_result, insert_rows
from jax_hkv._keys import Keys, check_fixed, form_of
from jax_hkv._options import Combiner, Fill
from jax_hkv._pins import pinned_slots
from jax_hkv._warnings import warn_of_part
from jax_hkv.index import NO_SLOT
from jax_hkv.initializers import Initializer
from jax_hkv.operations import ROWS_NAME, after_read
from jax_hkv.table import (
    Bags,
    InsertResult,
    Table,
    check_one_device,
    gather_values,
    jitted,
    with_clock,
)

COMBINERS = ("sum", "mean", "sqrtn")


class PooledFindResult(NamedTuple):
    """A row for each bag, and whether each id is present (masked ones and padding are not)."""

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*ids"]


def find_pooled(
    table: Table,
    ids: Any,
    *,
    combiner: Combiner = "sum",
    weights: Any = None,
    valid: Any = None,
    fill: Fill = "initial",
    dtype: Any = None,
) -> tuple[Table, PooledFindResult]:
    """Looks up bags of ids; the rows of a bag come back combined. Absent ids stay absent.

    Args:
      table: to look in.
      ids: ``[*batch, hotness]``, Keys or an integer array (one axis is one bag); or a
        :class:`Padded` or :class:`Jagged`, which bring their own weights and padding.
      combiner: what becomes of the rows of a bag, with a weight ``w`` each (1 without weights):
        "sum": sum(w * row); "mean": that divided by sum(w); "sqrtn": that divided by
        sqrt(sum(w**2)). A bag without ids, or whose divisor is 0, gets zeros.
      weights: ``float32`` of the shape of `ids`. Differentiable.
      valid: ``bool`` of the shape of `ids` (of a Jagged, of its flat ones); masked ids are not in
        their bag.
      fill: what absent ids add: "initial" for the rows that they would start with, or 0 for
        nothing; they count in the divisor either way. The default is "initial" here, and 0.0 in
        :func:`jax_hkv.find`.
      dtype: float32, bfloat16 or float16: to which the sums, which are made in float32, are
        rounded. None: float32.

    Returns:
      The table, and rows ``[*batch, dim]`` with `found` of the shape of the ids.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=2)
      >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float32)
      >>> table, _ = hkv.insert_or_assign(table, np.array([5, 6], np.int32), rows)
      >>> bags = hkv.Jagged.from_lists([[5, 6], []])
      >>> hkv.find_pooled(table, bags, combiner="mean")[1].values.tolist()
      [[2.0, 3.0], [0.0, 0.0]]
    """
    check_one_device("find_pooled", table)
    if table.replicas is not True:
        warn_of_part("find_pooled")
    initial = is_initial("find_pooled", fill)
    kind = _checks.as_row_dtype("find_pooled", dtype)
    batch, layout = as_batch("find_pooled", combiner, ids, weights, valid, table.index.namespace)
    clock, result = _find_bags(table, batch, initial=initial, dtype=kind, layout=layout)
    return after_read(table, clock), result


@jitted("initial", "dtype", "layout")
def _find_bags(table: Table, batch: Bagged, initial: bool, dtype: Any, layout: Layout) -> Any:
    clock, values, slots = _find(table, batch, initial=initial, dtype=dtype)
    rows = values.reshape(*layout.batch, table.dim)
    return clock, PooledFindResult(rows, (slots >= 0).reshape(layout.ids))


@jitted("initial", "dtype")
def _find(table: Table, batch: Bagged, initial: bool, dtype: Any) -> Any:
    index, slots = _index.find(table.index, batch.keys, batch.valid)
    table, values = _rows_of(with_clock(table, index.clock), batch, slots, initial, dtype)
    return table.index.clock, values, slots


def find_or_insert_pooled(
    table: Table,
    ids: Any,
    *,
    combiner: Combiner = "sum",
    weights: Any = None,
    valid: Any = None,
    scores: Any = None,
    admit: Any = None,
    pinned: Any = None,
    dtype: Any = None,
    return_evicted: bool = False,
) -> tuple[Table, InsertResult]:
    """As :func:`find_or_insert` for bags of ids; the rows of a bag come back combined.

    Args:
      table: to change.
      ids: see :func:`find_pooled`.
      combiner: see :func:`find_pooled`.
      weights: see :func:`find_pooled`.
      valid: see :func:`find_pooled`.
      scores: of the shape of `ids`, or one number; see :func:`find_or_insert`.
      admit: ``bool`` of the shape of `ids`; see :func:`find_or_insert`.
      pinned: see :func:`find_or_insert`.
      dtype: of the rows that come back; see :func:`find_pooled`.
      return_evicted: whether the result carries the evicted entries.

    Returns:
      The table, and an :class:`InsertResult` whose values are ``[*batch, dim]`` and whose
      `bags` say what each id added. The gradient by ``values`` goes to
      ``jax_hkv.optim.sparse(...).update`` with that result. Ids that got no row add their
      initial ones.

    Raises:
      TypeError, ValueError, RuntimeError: naming the argument; the last of a used-up table.

    Example:
      >>> import jax_hkv as hkv
      >>> bags = hkv.Jagged.from_lists([[5, 6, 5], []])
      >>> table, result = hkv.find_or_insert_pooled(hkv.create(128, dim=2), bags)
      >>> result.values.shape, int(hkv.size(table))
      ((2, 2), 2)
    """
    call = "find_or_insert_pooled"
    check_one_device(call, table)
    warn_of_part(call)
    batch, layout = as_batch(call, combiner, ids, weights, valid, table.index.namespace)
    check_fixed(call, "ids", layout.ids)
    pairs = _checks.as_scores(call, table.policy, scores, layout.ids)
    own = _checks.as_mask(call, "admit", admit, layout.ids)
    kind = _checks.as_row_dtype(call, dtype)
    evicted = _checks.as_bool(call, "return_evicted", return_evicted)
    options = {"dtype": kind, "evicted": evicted, "layout": layout}
    held = pinned_slots(call, pinned)
    return _find_or_insert_bags(table, batch, pairs, own, held, **options)


@jitted("dtype", "evicted", "layout")
def _find_or_insert_bags(
    table: Table,
    batch: Bagged,
    scores: Keys | None,
    admit: jax.Array | None,
    pinned: jax.Array | None,
    dtype: Any,
    evicted: bool,
    layout: Layout,
) -> Any:
    options = {"initial": True, "dtype": dtype, "evicted": evicted}
    table, result = _find_or_insert(table, batch, scores, admit, pinned, **options)
    return table, result._replace(
        values=result.values.reshape(*layout.batch, table.dim),
        keys=result.keys.reshape(*layout.ids),
        slots=result.slots.reshape(layout.ids),
        status=result.status.reshape(layout.ids),
    )


@jitted("initial", "dtype", "evicted")
def _find_or_insert(
    table: Table,
    batch: Bagged,
    scores: Keys | None,
    admit: jax.Array | None,
    pinned: jax.Array | None,
    initial: bool,
    dtype: Any,
    evicted: bool,
) -> Any:
    table, inserted = insert_rows(
        *(table, batch.keys, batch.valid, scores, None, evicted),
        admit=admit,
        pinned=pinned,
        reads=initial and batch.bags is None,
        dtype=dtype or jnp.float32,
    )
    slots, rows = inserted.upserted.slots, inserted.values
    table, values = _rows_of(table, batch, slots, initial, dtype, rows)
    return table, insert_result(values, batch.keys, inserted, batch.bags)


def _rows_of(
    table: Table,
    batch: Bagged,
    slots: Int32[Array, " n"],
    initial: bool,
    dtype: Any,
    rows: Float[Array, "n dim"] | None = None,
) -> tuple[Table, Float[Array, "b dim"]]:
    """A row for each bag, of one id the given ones; see :func:`pool_stored`."""
    keys, valid, bags = batch
    if bags is not None:
        return pool_stored(table, keys, slots, bags, valid, initial, dtype=dtype)
    if rows is None:
        of_absent = (table.initializer, table.seed, keys, valid) if initial else None
        kind = dtype or jnp.float32
        table, rows = gather_values(table, slots, initial=of_absent, dtype=kind)
    return table, checkpoint_name(rows, ROWS_NAME)


def is_initial(call: str, fill: Any) -> bool:
    """Whether a fill is the rows that absent ids would start with; else they add nothing."""
    if not (_checks.is_number(fill) or isinstance(fill, str)) or fill not in ("initial", 0):
        raise ValueError(
            f'{call}: fill must be "initial" or 0, got {fill!r}: another row of absent ids is one '
            "of find, then pool"
        )
    return fill == "initial"


class BagRows(NamedTuple):
    """What a lookup of a batch of bags found.

    Attributes:
      values: a row for each bag.
      slots: of each id, -1 where it has no row; over several devices 0 where it has one.
      result: of a training lookup, for the optimizer; its `values` are these. None otherwise.
    """

    values: Float[Array, "b dim"]
    slots: Int32[Array, " n"]
    result: Any


def of_batch(
    call: str,
    table: Table,
    batch: Bagged,
    *,
    train: bool,
    fill: Fill,
    dtype: Any = None,
    scores: Any = None,
    admit: jax.Array | None = None,
    pinned: Int32[Array, " p"] | None = None,
    evicted: bool = False,
) -> tuple[Table, BagRows]:
    """The rows of a batch of bags, whose weights are those of its combiner: for layers.

    Args:
      call: for errors.
      table: to look in.
      batch: of :func:`as_batch`, or several put together.
      train: whether absent ids are inserted.
      fill: what ids without a row add; see :func:`find_pooled`.
      dtype: of the rows; None: float32.
      scores: of training lookups, one for each id.
      admit: of training lookups, a mask of the ids, of any shape; None: all.
      pinned: of training lookups, slots that are not evicted.
      evicted: whether the result of a training lookup carries the evicted entries.
    """
    initial = is_initial(call, fill)
    if not train:
        clock, values, slots = _find(table, batch, initial=initial, dtype=dtype)
        return after_read(table, clock), BagRows(values, slots, None)
    check_fixed(call, "ids", batch.keys.shape)
    pairs = _checks.as_flat_scores(call, table.policy, scores, batch.keys.shape)
    options = {"initial": initial, "dtype": dtype, "evicted": evicted}
    table, result = _find_or_insert(table, batch, pairs, admit, pinned, **options)
    return table, BagRows(result.values, result.slots, result)


def with_unseen(
    rows: Float[Array, "b dim"], batch: Bagged, slots: Int32[Array, " n"], unseen: Any
) -> Float[Array, "b dim"]:
    """Rows of bags to which every id without a row adds the given one, by its weight.

    Args:
      rows: to which such ids have added nothing.
      batch: that was looked up.
      slots: of its ids.
      unseen: a row, or a number; None or 0: nothing is added.
    """
    if unseen is None or (isinstance(unseen, float) and unseen == 0.0):
        return rows
    row = jnp.broadcast_to(jnp.asarray(unseen, jnp.float32), rows.shape)
    return rows + unseen_shares(batch, slots) * row


def unseen_shares(batch: Bagged, slots: Int32[Array, " n"]) -> Float32[Array, "b 1"]:
    """The sum of the weights of each bag's ids that have no row."""
    is_absent = slots < 0 if batch.valid is None else batch.valid & (slots < 0)
    shares = is_absent.astype(jnp.float32)[:, None]
    return shares if batch.bags is None else _pool_given(shares, batch.bags, batch.valid)


def pool(
    rows: Any,
    *,
    row_splits: Any = None,
    weights: Any = None,
    valid: Any = None,
    combiner: Combiner = "sum",
) -> Float32[Array, "*batch dim"]:
    """Combines the rows of each bag, as :func:`find_pooled` does; differentiable.

    Args:
      rows: float32, bfloat16 or float16: ``[*batch, hotness, dim]``, or ``[n, dim]`` where
        `row_splits` are given. Differentiable.
      row_splits: ``int32[batch + 1]`` or ``int64``; see :class:`Jagged`.
      weights: ``float32``, one for each row. Differentiable.
      valid: ``bool``, one for each row; masked rows are not in their bag.
      combiner: see :func:`find_pooled`.

    Returns:
      ``float32[*batch, dim]``.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> pool(jnp.array([[[1.0], [3.0]]], jnp.float32), combiner="mean").tolist()
      [[2.0]]
    """
    check_combiner("pool", combiner)
    array = _checks.as_array("pool", "rows", rows, "an array [batch, hotness, dim]")
    rank = 2 if row_splits is not None else 3
    is_form = array.ndim >= 2 and array.shape[-1] and (rank == 3 or array.ndim == 2)
    if array.dtype not in _ffi.FLOATS or not is_form:
        raise TypeError(
            "pool: rows must be float32, bfloat16 or float16 of shape [batch, hotness, dim], dim "
            f"from 1 on, or [n, dim] with row_splits, got {form_of(array)}: cast or reshape them"
        )
    shape = array.shape[:-1]
    mask = _checks.as_mask("pool", "valid", valid, shape)
    factors = features.as_weights("pool", weights, shape)
    splits = None
    if row_splits is not None:
        splits = features.as_splits("pool", "row_splits", row_splits, shape[0])
    return _pool(array, splits, factors, mask, combiner=combiner)


@jitted("combiner")
def _pool(
    rows: jax.Array,
    splits: jax.Array | None,
    weights: jax.Array | None,
    valid: jax.Array | None,
    combiner: Combiner,
) -> jax.Array:
    *shape, dim = rows.shape
    mask = None if valid is None else valid.reshape(-1)
    batch = shape[:-1] if splits is None else [splits.shape[0] - 1]
    layout = Layout(tuple(shape), tuple(batch), weights is not None)
    bags, counted = joined_bags([Given(None, mask, weights, splits)], [layout])
    bags = effective(bags, counted, combiner=combiner, is_masked=mask is not None)
    return _pool_given(rows.reshape(-1, dim), bags, counted).reshape(*batch, dim)


def check_combiner(call: str, combiner: Any) -> None:
    """Raises unless rows can be combined so."""
    if combiner not in COMBINERS:
        raise ValueError(
            f"{call}: combiner must be one of {', '.join(map(repr, COMBINERS))}, got {combiner!r}; "
            "rows that are not combined come from find_or_insert and find"
        )


# --- Weights -------------------------------------------------------------------------------------


def as_batch(
    call: str, combiner: Combiner, ids: Any, weights: Any, valid: Any, namespace: Any = None
) -> tuple[Bagged, Layout]:
    """Bags of ids as a caller gave them, checked, with the weights of the combiner."""
    check_combiner(call, combiner)
    features.check_whose_bags(call, "ids", ids, namespace)
    given, layout = features.as_given(call, ids, weights, valid)
    batch = features.as_bagged(given, layout)
    assert batch.bags is not None
    options = {"combiner": combiner, "is_masked": given.valid is not None}
    return batch._replace(bags=effective(batch.bags, batch.valid, **options)), layout


@jitted("combiner", "is_masked")
def effective(
    bags: Bags, valid: jax.Array | None, combiner: Combiner, is_masked: bool = True
) -> Bags:
    """Bags whose weighted sum is what the combiner says: weights over the bag's divisor.

    Without a mask `valid` is False for padding alone.
    """
    given = bags.weights
    if given is not None and valid is not None:
        given = jnp.where(valid, given, 0.0)
    if combiner == "sum":
        return bags._replace(weights=given)
    if given is None:
        divisors = _valid_ids(bags, valid if is_masked else None).astype(jnp.float32)
    else:
        # Squares are taken natively as well: XLA's may drop subnormal ones.
        factors = None if combiner == "mean" else given
        divisors = _pool_given(given[:, None], bags._replace(weights=factors), valid)[:, 0]
    divisors, numerators = _of_bags(divisors[:, None], bags)[:, 0], given
    if numerators is None:
        numerators = jnp.ones_like(divisors) if valid is None else valid.astype(jnp.float32)
    if valid is not None:
        divisors = jnp.where(valid, divisors, 1.0)
    return bags._replace(weights=_quotients(numerators, divisors, combiner == "sqrtn"))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _quotients(weights: jax.Array, divisors: jax.Array, root: bool) -> Float32[Array, " n"]:
    """Weights over divisors, or over their square roots; zero where the divisor is."""
    return _ffi.call("divide_weights", weights, divisors, root=int(root))[0]


@_quotients.defjvp
def _quotients_jvp(root: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    weights, divisors = primals
    quotients = _quotients(weights, divisors, root)
    finite = jnp.where(divisors == 0, jnp.inf, divisors)  # there it is constant
    slope = 1.0 / (jnp.sqrt(finite) if root else finite)
    by_divisor = quotients / (2.0 * finite if root else finite)
    return quotients, tangents[0] * slope - tangents[1] * by_divisor


def _valid_ids(bags: Bags, valid: jax.Array | None) -> jax.Array:
    """How many valid ids each bag has."""
    if valid is None:
        return jnp.diff(bags.splits) if bags.ends is None else bags.ends - bags.splits[:-1]
    return counts_in(bags, valid)


# --- Sums over bags, and their derivatives -------------------------------------------------------


def _aligned(*tree: Any) -> tuple[Any, ...]:
    """Leaves that vary over the same axes of a shard_map: derivatives come back as they went in."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, match_varying(tuple(leaves)))


def _pool_given(rows: jax.Array, bags: Bags, valid: jax.Array | None) -> jax.Array:
    """The weighted sum of each bag's valid rows."""
    weights, layout = bags.weights, bags._replace(weights=None)
    return _sum_rows(*_aligned(rows, weights, layout, valid))


@jax.custom_vjp
def _sum_rows(
    rows: Float[Array, "n dim"],
    weights: Float32[Array, " n"] | None,
    bags: Bags,
    valid: Bool[Array, " n"] | None,
) -> Float32[Array, "b dim"]:
    slots = _rows.positions(rows.shape[0])
    slots = slots if valid is None else jnp.where(valid, slots, NO_SLOT)
    clock = jnp.zeros((2,), jnp.uint32)
    options = {"ends": bags.ends, "weights": weights, "name": "rows"}
    return _rows.pool(clock, rows, slots, bags.splits, **options)[1]


def _sum_rows_forward(rows: Any, weights: Any, bags: Bags, valid: Any) -> Any:
    return _sum_rows(rows, weights, bags, valid), (rows, weights, bags, valid)


def _sum_rows_backward(saved: Any, of_bags: jax.Array) -> Any:
    rows, weights, bags, valid = saved
    by_position = _of_bags(of_bags, bags)
    if valid is not None:
        by_position = jnp.where(valid[:, None], by_position, 0.0)
    if weights is None:
        return by_position.astype(rows.dtype), None, None, None
    of_rows = (weights[:, None] * by_position).astype(rows.dtype)
    of_weights = jnp.sum(rows.astype(jnp.float32) * by_position, axis=-1)
    return of_rows, of_weights, None, None


_sum_rows.defvjp(_sum_rows_forward, _sum_rows_backward)


def _of_bags(per_bag: Float32[Array, "b dim"], bags: Bags) -> Float32[Array, "n dim"]:
    """What bags have, for each of their positions; zero for padding."""
    return _spread(*_aligned(per_bag, bags._replace(weights=None)))


@jax.custom_vjp
def _spread(per_bag: jax.Array, bags: Bags) -> jax.Array:
    if per_bag.shape[0] == 0:
        return jnp.zeros((*bags.sources.shape, *per_bag.shape[1:]), per_bag.dtype)
    # A cotangent may be an array of NumPy.
    return jnp.asarray(per_bag).at[bags.sources].get(mode="fill", fill_value=0)


def _spread_forward(per_bag: Any, bags: Bags) -> Any:
    return _spread(per_bag, bags), bags


def _spread_backward(bags: Bags, by_position: jax.Array) -> Any:
    # JAX's own would be a scatter that adds in the order in which a GPU comes to it.
    return _pool_given(by_position, bags, None), None


_spread.defvjp(_spread_forward, _spread_backward)


class _Stored(NamedTuple):
    """What a pooled read of a table takes, besides weights."""

    clock: jax.Array
    values: jax.Array
    slots: jax.Array
    splits: jax.Array
    ends: jax.Array | None
    keys: Keys
    valid: jax.Array | None


class _Source(NamedTuple):
    """What is static of the table, and of the sums."""

    initializer: Initializer
    seed: int
    name: str
    has_first_rows: bool  # of valid keys without a slot
    dtype: Any  # of the sums; None: float32

    def initial(self, stored: _Stored) -> Any:
        if not self.has_first_rows:
            return None
        return self.initializer, self.seed, stored.keys, stored.valid


def pool_stored(
    table: Table,
    keys: Keys,
    slots: jax.Array,
    bags: Bags,
    valid: jax.Array | None,
    initial: bool,
    *,
    dtype: Any = None,
) -> tuple[Table, jax.Array]:
    """The weighted sum of each bag's rows in a table; valid keys without one may add first rows."""
    source = _Source(table.initializer, table.seed, table.name, initial, dtype)
    stored = _Stored(table.index.clock, table.values, slots, bags.splits, bags.ends, keys, valid)
    clock, values = _pool_slots(source, stored, bags)
    return with_clock(table, clock), checkpoint_name(values, ROWS_NAME)


def pool_by_slot(
    rows: Float[Array, "k dim"], slots: Int32[Array, " n"], bags: Bags, dtype: Any = None
) -> Float[Array, "b dim"]:
    """The weighted sum of each bag's rows, which stand in an array by the slots of the positions.

    Differentiable by the weights; slots of -1 are left out.
    """
    source = _Source(Initializer(0), 0, "rows", False, dtype)
    clock = jnp.zeros((2,), jnp.uint32)
    no_keys = Keys(jnp.zeros((0, 2), jnp.uint32))
    stored = _Stored(clock, rows, slots, bags.splits, bags.ends, no_keys, None)
    return checkpoint_name(_pool_slots(source, stored, bags)[1], ROWS_NAME)


def _pool_slots(source: _Source, stored: _Stored, bags: Bags) -> tuple[jax.Array, jax.Array]:
    if bags.weights is None:
        return _read_bags(source, stored, None)
    read: Any = _sum_stored(source, *_aligned(stored, bags))
    clock, values = read
    # A clock from a differentiated function has a tangent, which no table operation takes.
    return jnp.bitwise_or(clock, jnp.uint32(0)), values


def _read_bags(source: _Source, stored: _Stored, weights: jax.Array | None) -> Any:
    return _rows.pool(
        *(stored.clock, stored.values, stored.slots, stored.splits),
        ends=stored.ends,
        weights=weights,
        initial=source.initial(stored),
        dtype=source.dtype,
        name=source.name,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_stored(source: _Source, stored: _Stored, bags: Bags) -> Any:
    return _read_bags(source, stored, bags.weights)


def _sum_stored_forward(source: _Source, stored: Any, bags: Any) -> Any:
    if stored.values.perturbed:
        _ffi.refuse_derivative("pool_rows")
    stored, bags = jax.tree.map(lambda primal: primal.value, (stored, bags))
    clock, values = _read_bags(source, stored, bags.weights)
    # The rows of positions are read here, in the order of the clock, and kept: the table may have
    # changed by the time of the backward pass.
    clock, rows = _rows.gather(
        clock, stored.values, stored.slots, initial=source.initial(stored), name=source.name
    )
    return (clock, values), (checkpoint_name(rows, ROWS_NAME), bags)


def _sum_stored_backward(_: _Source, saved: Any, cotangents: Any) -> Any:
    rows, bags = saved
    of_bags = cotangents[1]
    if isinstance(of_bags, SymbolicZero):
        return None, None
    of_weights = jnp.sum(rows * _of_bags(of_bags.astype(jnp.float32), bags), axis=-1)
    return None, Bags(None, None, of_weights)  # pyright: ignore[reportArgumentType]


_sum_stored.defvjp(_sum_stored_forward, _sum_stored_backward, symbolic_zeros=True)
