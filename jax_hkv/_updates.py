"""What every optimizer does before and after its arithmetic: who is updated, by which gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Num, UInt32

from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._checks import as_array, as_rows
from jax_hkv._compat import is_traced, match_varying
from jax_hkv._ffi import FLOATS
from jax_hkv._keys import Keys, form_of, threefry
from jax_hkv.index import NO_SLOT
from jax_hkv.table import (
    InsertResult,
    OptimizerRows,
    Table,
    is_one_result,
    one_more,
    with_clock,
)

Result = TypeVar("Result")

_AT_ONCE = 1 << 23  # elements of rows that are moved together, 32 MiB of float32


class Batch(NamedTuple):
    """The distinct keys of an update.

    Attributes:
      groups: who they are.
      slots: where their rows lie, -1 for those that are not updated.
      terms: what their gradients are sums of.
      skipped: as of the table's optimizer rows, with those that lost their slot since the lookup,
        as far as slots were verified.
    """

    groups: _index.Groups
    slots: Int32[Array, " n"]
    terms: _index.Terms
    skipped: UInt32[Array, " 1"]


def optimizer_rows(
    fresh: Mapping[str, Num[Array, "1 ..."]],
    shared: Mapping[str, Num[Array, "1 ..."]],
    structure: Any,
    table: Table,
) -> OptimizerRows:
    """Optimizer rows for a table, all fresh, on its device, or on all that have it whole."""
    where = _where_whole(table.values)

    def put(leaf: jax.Array) -> jax.Array:
        return leaf if where is None else jax.device_put(leaf, where)

    def on_device(leaf: jax.Array) -> jax.Array:
        # A buffer of its own for each leaf: donation refuses one twice.
        return put(jnp.array(leaf, copy=True))

    return OptimizerRows(
        rows={name: put(_rows.new(put(leaf), table.capacity)) for name, leaf in fresh.items()},
        fresh={name: on_device(leaf) for name, leaf in fresh.items()},
        shared={name: on_device(leaf) for name, leaf in shared.items()},
        skipped=on_device(jnp.zeros((1,), jnp.uint32)),
        structure=structure,
    )


def _where_whole(values: jax.Array) -> jax.sharding.Sharding | None:
    """Where an array lies that is whole on each of its devices; None if that is left to JAX."""
    if is_traced(values) or not getattr(values, "committed", False):
        return None
    sharding = values.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.is_fully_replicated:
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    devices = list(sharding.device_set)
    return jax.sharding.SingleDeviceSharding(devices[0]) if len(devices) == 1 else None


def check_rounding(table: Table, is_stochastic: bool) -> None:
    """Raises if rows are to be rounded stochastically that are not bfloat16."""
    if is_stochastic and table.dtype != jnp.bfloat16:
        raise ValueError(
            f"optim.init: stochastic_rounding is for bfloat16 rows, got a table of "
            f"{table.dtype.name}: create it with dtype=jnp.bfloat16, or leave the option out"
        )


def rounded(rows: Float32[Array, "n dim"], keys: Keys, step: UInt32[Array, ""], seed: int) -> Array:
    """Rows of which bfloat16 holds every bit, rounded by chance (docs/semantics.md, section 7)."""
    low, high = (np.uint32(seed >> shift & 0xFFFFFFFF) for shift in (0, 32))
    element = jnp.arange(rows.shape[-1], dtype=jnp.uint32)[None]
    own = (keys.low ^ low)[:, None], (keys.high ^ high)[:, None]
    random = threefry(*own, step, element)[0] >> np.uint32(16)
    bits = (jax.lax.bitcast_convert_type(rows, jnp.uint32) + random) & np.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(rows), jax.lax.bitcast_convert_type(bits, jnp.float32), rows)


def rows_of(table: Table, structure: Any) -> OptimizerRows:
    """The table's optimizer rows; raises unless they are of this structure."""
    if table.optimizer is None:
        raise ValueError(
            f"optim.update: the table {table.name!r} has no optimizer rows. Call table = "
            "opt.init(table) once, before the first update; one that is frozen is looked up with "
            "train=False (features of a collection by a call of their own, with partial=True)"
        )
    if table.optimizer.structure != structure:
        raise ValueError(
            "optim.update: the table has no optimizer rows of this optimizer, but of another: "
            f"{table.optimizer.structure}, got {structure}. Take one of the kind that made them, "
            "whose numbers may be others. opt.init(table) would begin anew and drop them"
        )
    return table.optimizer


def batch_of(
    table: Table,
    before: OptimizerRows,
    result: Any,
    row_gradients: Any,
    apply: Bool[Array, ""] | None,
    verifies: bool = True,
) -> tuple[Table, Batch]:
    """Checks the arguments of an update; several results are merged into one batch.

    With `verifies` the slots of one result are verified here; those of several always are.
    """
    results, gradients = listed(result, row_gradients)
    for each in results:
        if each.values.shape[-1] != table.dim:
            raise ValueError(
                f"optim.update: result must be of a table with dim {table.dim} like the one to "
                f"update, got one with dim {each.values.shape[-1]}: give the table that its lookup "
                "returned"
            )
    terms = terms_of(results, gradients)
    skipped = before.skipped
    if skipped.shape != (1,) or skipped.dtype != jnp.uint32:
        raise TypeError(
            "optim.update: table.optimizer.skipped must be uint32[1], got "
            f"{skipped.dtype}{list(skipped.shape)}: to count from 0 again give "
            "jnp.zeros((1,), jnp.uint32)"
        )
    index = table.index
    if verifies or not _is_one_batch(results):
        index, groups, slots, skipped = _verified(index, results, skipped)
    else:
        groups, slots = merged_groups(results)
    if apply is not None:
        slots = jnp.where(apply, slots, NO_SLOT)
        skipped = jnp.where(apply, skipped, before.skipped)
    return dataclasses.replace(table, index=index), Batch(groups, slots, terms, skipped)


def are_known(arguments: Any) -> bool:
    """Whether they are arrays and numbers that a jitted function takes, of no trace."""
    kinds = (jax.Array, np.ndarray, np.generic, bool, int, float)
    leaves = jax.tree.leaves(arguments)
    if any(isinstance(leaf, np.ndarray) and leaf.dtype.hasobject for leaf in leaves):
        return False
    return all(isinstance(leaf, kinds) and not is_traced(leaf) for leaf in leaves)


def optim_update(
    rule: Any, table: Table, result: Any, row_gradients: Any, rate: jax.Array, apply: Any
) -> Table:
    """The table after a step of a native optimizer, a rule, at a learning rate."""
    before = rows_of(table, rule.form)
    table, batch = batch_of(table, before, result, row_gradients, apply, verifies=False)
    count = before.shared["count"]
    ahead = one_more(count)
    if apply is not None:
        ahead = jnp.where(apply, ahead, count)
    names = [name for name, _ in rule.starts]
    steps = before.rows["count"] if rule.count_per_row else ahead
    clock, values, *states, steps, skipped = _index.update_rows(
        *(rule.name, table.index, table.values, [before.rows[name] for name in names], steps),
        *(batch.skipped, batch.slots, batch.groups, rate, batch.terms),
        stochastic=int(rule.stochastic_rounding),
        seed=int(np.uint64(rule.seed).view(np.int64)),
        **dict(rule.constants),
    )
    rows = dict(zip(names, states, strict=True))
    optimizer = dataclasses.replace(
        before,
        rows=rows | {"count": steps} if rule.count_per_row else rows,
        shared=before.shared | {"count": ahead if rule.count_per_row else steps},
        skipped=skipped,
    )
    return dataclasses.replace(with_clock(table, clock), values=values, optimizer=optimizer)


# One program, where the call is eager, and not some ten.
optim_update_at_once = jax.jit(optim_update, static_argnums=0)


def in_parts(
    move: Callable[..., tuple[Table, Any]],
    table: Table,
    rows: tuple[Any, ...],
    sums: Callable[[Any, int], Any],
) -> tuple[Table, Any]:
    """What is done to distinct rows, some at a time, since each is moved by itself.

    Of all of them at once XLA keeps as many arrays as they have states.

    Args:
      move: from a table, slots, what else there is of each row, and sums, to the table and a result
        that is the same for any rows.
      table: with optimizer rows.
      rows: slots first.
      sums: of so many rows, from one on.
    """
    count = rows[0].shape[0]
    most = max(1, _AT_ONCE // table.dim)
    turns = -(-count // most)
    if turns <= 1:
        return move(table, *rows, sums(0, count))
    size = -(-count // turns)
    optimizer = table.optimizer
    assert optimizer is not None
    own = (table.index.clock, table.values, optimizer.rows)
    leaves, tree = jax.tree.flatten((own, rows))
    own, rows = tree.unflatten(match_varying(tuple(leaves)))

    def whole(own: Any) -> Table:
        clock, values, states = own
        states = dataclasses.replace(optimizer, rows=states)
        return dataclasses.replace(with_clock(table, clock), values=values, optimizer=states)

    def turn(number: jax.Array, own: Any) -> Any:
        first = number * size
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), rows)
        after, _ = move(whole(own), *part, sums(first, size))
        assert after.optimizer is not None
        return after.index.clock, after.values, after.optimizer.rows

    own = jax.lax.fori_loop(0, turns - 1, turn, own)  # a known number of turns: a GPU is not asked
    first = count - size
    slots, *others = jax.tree.map(lambda leaf: leaf[first:], rows)
    slots = jnp.where(_rows.positions(size) >= (turns - 1) * size - first, slots, NO_SLOT)
    return move(whole(own), slots, *others, sums(first, size))


def merged_groups(results: list[InsertResult]) -> tuple[_index.Groups, Int32[Array, " n"]]:
    """The distinct keys of all results, and their slots as the results have them."""
    slots = [result.unique_slots.reshape(-1) for result in results]
    return (results[0].groups, slots[0]) if _is_one_batch(results) else _merge(results, slots)


def _is_one_batch(results: list[InsertResult]) -> bool:
    return len(results) == 1 and results[0].unique_slots.ndim == 1


def square_norm(results: list[InsertResult], gradients: list[Any]) -> Float32[Array, ""]:
    """The squared norm of the sums of the gradients of keys that have a row."""
    groups, slots = merged_groups(results)
    return _index.square_norm(groups, terms_of(results, gradients), slots)


def terms_of(results: Sequence[Any], gradients: list[Any]) -> _index.Terms:
    """The gradients of all results as terms of sums over their positions, in order."""
    flat = [rows.reshape(-1, rows.shape[-1]) for rows in gradients]
    kind = jnp.result_type(*flat)
    rows = jnp.concatenate([rows.astype(kind) for rows in flat]) if len(flat) > 1 else flat[0]
    if all(result.bags is None for result in results):
        return _index.Terms(rows)
    sources, first = [], 0
    for result, own in zip(results, flat, strict=True):
        if result.bags is None:
            own_sources = _rows.positions(own.shape[0])
        else:  # of each lookup that is stacked they count from 0
            sources_of = result.bags.sources
            parts = math.prod(sources_of.shape[:-1])
            own_sources = _numbered_on(sources_of, own.shape[0] // max(parts, 1))
        sources.append(own_sources + jnp.int32(first))
        first += own.shape[0]
    weights = None
    if any(result.bags is not None and result.bags.weights is not None for result in results):
        weights = jnp.concatenate([_weights(result) for result in results])
    return _index.Terms(rows, jnp.concatenate(sources), weights)


def _numbered_on(numbers: jax.Array, each: int) -> jax.Array:
    """Numbers of stacked lookups, ``[..., n]``, that go on from those of the one before: flat."""
    lookups = math.prod(numbers.shape[:-1])
    rows = numbers.reshape(lookups, numbers.shape[-1])
    return (rows + (_rows.positions(lookups) * jnp.int32(each))[:, None]).reshape(-1)


def _weights(result: InsertResult) -> jax.Array:
    if result.bags is None:
        return jnp.ones((result.groups.inverse.size,), jnp.float32)
    return result.bags.factors.reshape(-1)


def listed(
    result: Any,
    row_gradients: Any,
    kind: type[Result] = InsertResult,
    call: str = "optim.update",
    lookup: str = "find_or_insert",
) -> tuple[list[Result], list[Any]]:
    """Checked results and gradients as lists; one result may be what ``jax.lax.scan`` stacked.

    Args:
      result: of a lookup, or a sequence of such.
      row_gradients: of it, or of each.
      kind: of the results.
      call: for errors.
      lookup: what returns such results, for errors.
    """
    is_one = is_one_result(result)
    results = [result] if is_one else list(result)
    if not is_one and any(isinstance(each, Table) for each in results):
        raise TypeError(
            f"{call}: result must be what {lookup} returned beside the table, got both of them: "
            "operations return (table, result), unpack them"
        )
    if not is_one and hasattr(row_gradients, "shape"):
        shapes = [(len(results), *np.shape(getattr(each, "values", ()))) for each in results]
        if not shapes or any(row_gradients.shape != shape for shape in shapes):
            raise TypeError(
                f"{call}: row_gradients must be a list, one for each result, where result is a "
                f"sequence, got {form_of(row_gradients)} for {len(results)} results: write "
                "[row_gradients], or give one result and its gradients"
            )
    inner = row_gradients if isinstance(row_gradients, (list, tuple)) else ()
    if any(hasattr(each, "counts") for each in (row_gradients, *inner)):
        raise TypeError(
            f"{call}: row_gradients must be the gradient by result.values, got one by the whole "
            "result: give its values"
        )
    leaves = jax.tree.leaves(row_gradients, is_leaf=lambda leaf: leaf is None)
    if any(leaf is None for leaf in leaves):
        raise TypeError(
            f"{call}: row_gradients must be the gradient by result.values, got None: take it by "
            "jax.grad of a function of those rows"
        )
    gradients = [row_gradients] if is_one else list(row_gradients)
    for each in results:
        if not isinstance(each, kind):
            raise TypeError(
                f"{call}: result must be what {lookup} returned (or a sequence of such), got "
                f"{type(each).__name__}: results of a table over several devices go to "
                "jax_hkv.sharding.update, others to the update of an optimizer, and those of find "
                "to none: look rows up by find_or_insert to train them"
            )
        if _is_gradient(each):
            raise TypeError(
                f"{call}: result must be what {lookup} returned, got one without its integers, "
                "which a gradient has not: give the lookup's own, and the gradient by its values"
            )
    if not results or len(results) != len(gradients):
        raise ValueError(
            f"{call}: row_gradients must be one for each result, got {len(gradients)} for "
            f"{len(results)} results"
        )
    return results, [_as_rows(call, *pair) for pair in zip(results, gradients, strict=True)]


def _is_gradient(result: Any) -> bool:
    """Whether a result lacks its integers, as a gradient by it does."""
    return result.counts.unique is None


def in_one_stack(result: Any, gradients: Any) -> tuple[Any, Any]:
    """A result and its gradients; those that scans in scans stacked, stacked once."""
    stacks = result.counts.unique.shape
    if len(stacks) < 2:
        return result, gradients

    def one(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(math.prod(stacks), *leaf.shape[len(stacks) :])

    return jax.tree.map(one, (result, gradients))


def _as_rows(call: str, result: Any, gradients: Any) -> jax.Array:
    array = as_array(call, "row_gradients", gradients, "an array like result.values")
    if array.dtype not in FLOATS:
        raise TypeError(
            f"{call}: row_gradients must be float32, bfloat16 or float16, got {array.dtype}: "
            "cast with .astype(jnp.float32)"
        )
    return as_rows(call, "row_gradients", array, np.shape(result.values), array.dtype)


def _verified(
    index: _index.Index, results: list[InsertResult], skipped: jax.Array
) -> tuple[_index.Index, _index.Groups, jax.Array, jax.Array]:
    """What the results say that still holds, and how much does not."""
    keys = jnp.concatenate([result.groups.keys.reshape(-1, 2) for result in results])
    looked_up = jnp.concatenate([result.unique_slots.reshape(-1) for result in results])
    index, slots, skipped = _index.verify(index, Keys(keys), looked_up, skipped)
    if _is_one_batch(results):
        return index, results[0].groups, slots, skipped
    ends = np.cumsum([result.unique_slots.size for result in results])[:-1]
    return index, *_merge(results, jnp.split(slots, ends)), skipped


def _merge(
    results: list[InsertResult], unique_slots: list[jax.Array]
) -> tuple[_index.Groups, jax.Array]:
    pairs = zip(results, unique_slots, strict=True)
    slots = jnp.concatenate([_slots_by_position(*pair) for pair in pairs])
    words = jnp.concatenate([result.keys.words.reshape(-1, 2) for result in results])
    groups = _index.unique(Keys(words), slots >= 0)
    first = jnp.where(_index.all_of(groups), _index.take(slots, groups.first), NO_SLOT)
    return groups, first


def _slots_by_position(result: InsertResult, unique_slots: Int32[Array, " n"]) -> jax.Array:
    inverse = result.groups.inverse
    numbers = _numbered_on(inverse, inverse.shape[-1])
    return jnp.where(inverse.reshape(-1) >= 0, _index.take(unique_slots, numbers), NO_SLOT)
