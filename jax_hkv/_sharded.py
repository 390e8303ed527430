"""Lookups of a table that lies on several devices: what each of them does.

A lookup sends the keys to their owners, which do what a table of one device does with its batch,
and brings rows back. Where keys overflow the room of the exchange, the first round leaves the table
alone (the clock aside), and a second one, with room for all, stands in a branch seldom taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32

from jax_hkv import _checks, _inserts, pooled, whole_table
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._bags import Bagged
from jax_hkv._compat import agreed, over, vary
from jax_hkv._exchange import Exchange, as_exchange, owners
from jax_hkv._hops import (
    Items,
    Leg,
    Plan,
    bags_homeward,
    by_slot,
    bytes_of_rows,
    bytes_of_sums,
    homeward,
    onward_one,
    outward,
    own_block,
    plan_of,
)
from jax_hkv._inserts import found_or_missing, insert_result, insert_rows
from jax_hkv._keys import Keys, as_keys, check_fixed
from jax_hkv._options import Fill
from jax_hkv._warnings import lookup_of_layer, warn_of_axes
from jax_hkv.admission import Frequency
from jax_hkv.index import NO_SLOT, Groups, Status, is_new
from jax_hkv.operations import ROWS_NAME
from jax_hkv.table import (
    Bags,
    Counts,
    Entries,
    InsertResult,
    Table,
    check_one_device,
    gather_values,
    is_one_result,
    no_counts,
)

State = TypeVar("State")

Measure = Callable[[InsertResult], Mapping[str, Counts]]


class Route(NamedTuple):
    """How the keys of a lookup came to their owners, for the gradients of their rows.

    Attributes:
      plan: static.
      legs: what its hops did.
      owner: what this device did as an owner.
      start: what was sent.
      overflow: keys that found no room, over all devices; None: there is room for whatever comes.
      wide_slots: of the distinct keys that the second round brought this device as an owner, -1 for
        all if there was none; None: it stands not in the program.
    """

    plan: Plan
    legs: tuple[Leg, ...]
    owner: InsertResult | None
    start: Items
    overflow: Int32[Array, ""] | None
    wide_slots: Int32[Array, " room"] | None = None

    @property
    def left_out(self) -> Int32[Array, ""]:
        return jnp.int32(0) if self.overflow is None else self.overflow


class ShardedResult(NamedTuple):
    """What `find_or_insert` over several devices returns, on each of them.

    Attributes:
      values: rows of this device's keys, or of its bags; initial rows where they got none,
        zeros where masked.
      keys: of this device's batch.
      status: of its positions; see :class:`jax_hkv.Status`.
      counts: of the distinct keys of all devices' batches, the same on every device.
      overflow: ``int32``, keys that found no room in the first round (on their way two hops long, a
        key may count twice), over all devices.
      by_table: the counts of the tables of a collection.
      groups: the distinct keys of this device's batch, or None if they were not merged.
      bags: of a pooled lookup.
      exchange: static.
      route: for the gradients.
      evicted: the entries that this device's part lost, if asked for.
    """

    values: Float[Array, "*batch dim"]
    keys: Keys
    status: Int32[Array, "*ids"]
    counts: Counts
    overflow: Int32[Array, ""]
    by_table: Mapping[str, Counts]
    groups: Groups | None
    bags: Bags | None
    exchange: Exchange
    route: Route
    evicted: Entries | None = None


class ShardedRows(NamedTuple):
    """What a reading lookup over several devices returns: rows, and whether keys are present.

    `overflow` is as in :class:`ShardedResult`: above 0, a strict exchange has found nothing.
    """

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*ids"]
    overflow: Int32[Array, ""]


class ScoredShardedRows(NamedTuple):
    """:class:`ShardedRows` and, last, the entries' scores, zero where keys are not found."""

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*ids"]
    overflow: Int32[Array, ""]
    scores: Keys


class ShardedFound(NamedTuple):
    """What `contains` over several devices returns; `overflow` is as in :class:`ShardedRows`."""

    found: Bool[Array, "*ids"]
    overflow: Int32[Array, ""]


class _Task(NamedTuple):
    """What is asked of a lookup.

    Attributes:
      exchange: static.
      items: of this device.
      offered: rows of its positions for keys that are inserted, or None.
      bags: of its positions, or None.
      owners_pool: whether owners return sums for the bags.
      train: whether absent keys are inserted.
      touches: whether the others are scored, if none is inserted.
      reads: whether rows are wanted.
      scored: whether the scores of entries are wanted, if none is inserted.
      initial: whether keys without a row get the row that they would start with, else zeros.
      pinned: slots of this device that are not evicted, or None.
      evicted: whether the evicted entries are wanted.
      dtype: of the rows, or None; rows that are summed travel in the table's.
      measure: what else to count of the distinct keys.
    """

    exchange: Exchange
    items: Items
    offered: jax.Array | None
    bags: Bags | None
    owners_pool: bool
    train: bool
    touches: bool
    reads: bool
    scored: bool
    initial: bool
    pinned: jax.Array | None
    evicted: bool
    dtype: Any
    measure: Measure | None

    @property
    def bag_count(self) -> int:
        return 0 if self.bags is None else self.bags.splits.shape[0] - 1


class _Seen(NamedTuple):
    """What a round brought back, and what the owner counted."""

    values: jax.Array
    status: jax.Array
    counts: Counts
    by_table: Mapping[str, Counts]
    evicted: Entries | None
    scores: Keys | None


def look_up(
    exchange: Exchange,
    table: Table,
    batch: Bagged,
    *,
    is_weighted: bool = False,
    train: bool,
    touches: bool = False,
    reads: bool = True,
    scored: bool = False,
    initial: bool,
    scores: Keys | None = None,
    offered: jax.Array | None = None,
    admit: jax.Array | None = None,
    pinned: jax.Array | None = None,
    evicted: bool = False,
    dtype: Any = None,
    measure: Measure | None = None,
) -> tuple[Table, ShardedResult, Keys | None]:
    """Looks up the batches of all devices; inside shard_map or pmap.

    Args:
      exchange: how.
      table: this device's part.
      batch: of this device, flat; the rows of each bag are combined, in float32.
      is_weighted: whether the weights of bags may be differentiated.
      train: whether absent keys are inserted.
      touches: whether the others are scored, if none is inserted.
      reads: whether rows are wanted; without them they have no elements.
      scored: whether the scores of entries are wanted, if none is inserted.
      initial: whether keys without a row get the row that they would start with, else zeros.
      scores: of training, one for each position.
      offered: of training, a row for each position: of keys that are inserted the first counts.
      admit: of training, which positions let their keys in, of any shape; None: all.
      pinned: of training, slots of this device that are not evicted.
      evicted: whether the evicted entries are wanted.
      dtype: of the rows; None: the table's, of bags float32.
      measure: what else is counted of the distinct keys at their owners.

    Returns:
      The table, what a lookup returns, and the scores of entries.
    """
    merges = may_merge(exchange, table, scores)
    positions = batch.keys.shape[0]
    valid = _checks.flat_mask(batch.valid, (positions,))
    plan = plan_of(exchange, positions, merges=merges, reads=not (train or touches))
    bags = batch.bags
    owners_pool = bags is not None and not plan.hops
    if bags is not None and plan.hops:
        summed = _summed(exchange, table, plan, bags, is_weighted)
        owners_pool, plan = summed is not plan, summed
    items = Items(batch.keys, valid, None if scores is None else scores.words)
    if admit is not None:
        items = items._replace(admits=admit.reshape(-1).astype(jnp.int32))
    is_counted = table.policy.counts if touches else train and _counts_occurrences(table)
    if plan.merges and plan.hops and is_counted:
        items = items._replace(occurrences=jnp.ones((positions,), jnp.int32))
    if owners_pool and plan.hops and bags is not None:
        items = items._replace(bags=bags.sources, weights=bags.weights)
    items, offered = vary((items, offered), exchange.axes)
    # JAX does not differentiate loops backward: what weights are multiplied with leaves them first.
    pools_later = not owners_pool and is_weighted and _may_repeat(plan, exchange)
    own_bags = None if pools_later else bags
    task = _Task(
        *(exchange, items, offered, own_bags, owners_pool, train, touches, reads),
        *(scored, initial, pinned, evicted, None if pools_later else dtype, measure),
    )
    table, seen, route = in_rounds(
        exchange, plan, table, items, partial(_round, task), task.bag_count
    )
    if pools_later and bags is not None:
        slots = jnp.where(valid, _rows.positions(positions), NO_SLOT)
        seen = seen._replace(values=pooled.pool_by_slot(seen.values, slots, bags, dtype))
    counts, by_table = exchange.of_all((seen.counts, seen.by_table))
    groups = route.legs[0].groups if route.legs else None
    values = seen.values if dtype is None else seen.values.astype(dtype)  # others are as they came
    values = checkpoint_name(values, ROWS_NAME)
    result = ShardedResult(
        *(values, batch.keys, seen.status, counts, route.left_out, by_table),
        *(groups, bags, exchange, route, seen.evicted),
    )
    return table, result, seen.scores


def may_merge(exchange: Exchange, table: Table, scores: Keys | None) -> bool:
    """Whether equal keys are merged; given counts are summed where they arrive, in 64 bits."""
    return exchange.deduplicate and not (scores is not None and table.policy.counts)


def of_batch(
    call: str,
    table: Table,
    batch: Bagged,
    *,
    exchange: Exchange | None,
    is_weighted: bool,
    train: bool,
    fill: Fill,
    dtype: Any = None,
    scores: Any = None,
    admit: jax.Array | None = None,
    pinned: jax.Array | None = None,
    evicted: bool = False,
    measure: Measure | None = None,
) -> tuple[Table, pooled.BagRows]:
    """As :func:`jax_hkv.pooled.of_batch`, over the devices of an exchange if there is one."""
    if exchange is None:
        with lookup_of_layer(call, is_right=table.replicas is True and not train):
            options: dict[str, Any] = {"scores": scores, "admit": admit, "evicted": evicted}
            options |= {"pinned": pinned, "train": train, "fill": fill, "dtype": dtype}
            return pooled.of_batch(call, table, batch, **options)
    exchange = _of_table(call, exchange, table)
    pairs = None
    if train:
        pairs = _checks.as_flat_scores(call, table.policy, scores, batch.keys.shape)
    table, result, _ = look_up(
        exchange if train else exchange.of_reads(),
        table,
        batch,
        is_weighted=is_weighted,
        train=train,
        initial=pooled.is_initial(call, fill),
        scores=pairs,
        admit=admit if train else None,
        pinned=pinned if train else None,
        evicted=evicted and train,
        dtype=dtype or jnp.float32,
        measure=measure,
    )
    rows = pooled.BagRows(result.values, slots_like(result.status), result if train else None)
    return table, rows


def _summed(exchange: Exchange, table: Table, plan: Plan, bags: Bags, is_weighted: bool) -> Plan:
    """The plan by which owners return a sum for each bag; the given one if rows are better.

    Sums are better where they are fewer bytes. Weights that may be differentiated need rows.
    """
    count = bags.splits.shape[0] - 1
    if exchange.partial is False or plan.gathers or is_weighted or not count:
        return plan  # of no bags XLA gathers nothing
    summed = plan_of(exchange, bags.sources.shape[0], merges=False, reads=plan.reads)
    row_bytes = 4 * table.dim
    pays = bytes_of_sums(summed, count, row_bytes) < bytes_of_rows(plan, row_bytes)
    return summed if exchange.partial or pays else plan


def _may_repeat(plan: Plan, exchange: Exchange) -> bool:
    """Whether a second round stands in the program."""
    return not plan.is_complete and not exchange.strict


def _counts_occurrences(table: Table) -> bool:
    rule = None if table.admission is None else table.admission.rule
    return table.policy.counts or isinstance(rule, Frequency)


# --- Rounds --------------------------------------------------------------------------------------


def in_rounds(
    exchange: Exchange,
    plan: Plan,
    table: Table,
    items: Items,
    act: Callable[..., tuple[Table, State, InsertResult | None]],
    bag_count: int = 0,
) -> tuple[Table, State, Route]:
    """What owners do with the keys of all devices; again, with room for all, where keys overflow.

    Args:
      exchange: how keys travel.
      plan: of the first round.
      table: this device's part.
      items: of this device.
      act: of (plan, table, legs, arrived items, is_ticked): the table, what comes back of it, in
        one form in both rounds, and the result of a training lookup.
      bag_count: of this device, where owners pool.
    """
    legs, arrived, beyond = outward(plan, items, bag_count)
    overflow = None
    if not plan.is_complete:
        if plan.reads and exchange.copied:  # so far each of replicas has counted by itself
            beyond = over(exchange.copied, jax.lax.psum, beyond)
        arrived = arrived._replace(valid=arrived.valid & (beyond == 0))
        overflow = agreed(beyond, exchange.axes)
    table, seen, owner = act(plan, table, legs, arrived, is_ticked=False)
    route = Route(plan, legs, owner, items, overflow)
    if not _may_repeat(plan, exchange):
        return table, seen, route
    assert overflow is not None

    wide = wide_plan(plan, exchange, items)

    def second(state: tuple[Table, State, Any], now: jax.Array) -> tuple[Table, State, Any]:
        own = items._replace(valid=items.valid & now)
        legs, arrived, _ = outward(wide, own, bag_count)
        table, seen, owner = act(wide, state[0], legs, arrived, is_ticked=True)
        slots = None if owner is None else owner.unique_slots
        return vary((table, seen, slots), exchange.axes)

    slots = None if owner is None else jnp.full((wide.hops[-1].room,), NO_SLOT)
    state = vary((table, seen, slots), exchange.axes)
    table, seen, slots = once_if(overflow > 0, second, state)
    return table, seen, route._replace(wide_slots=slots)


def padded(entries: Entries | None, exchange: Exchange, plan: Plan, items: Items) -> Entries | None:
    """Evicted entries in the form that they have in both rounds."""
    if entries is None or not _may_repeat(plan, exchange):
        return entries
    missing = wide_plan(plan, exchange, items).hops[-1].room - entries.keys.shape[0]

    def one(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if leaf.ndim else leaf

    return jax.tree.map(one, entries)


def once_if(condition: jax.Array, fn: Callable[[State, jax.Array], State], state: State) -> State:
    """A state after a function, if a condition holds; else as it was.

    A loop of at most one turn: compiled for a GPU, ``jax.lax.cond`` copies the tables in its
    branches, a loop does not.

    Args:
      condition: ``bool``, the same on every device.
      fn: of the state and the condition, by which it must mask what it begins with: work that is
        the same in every turn of a loop, XLA does before the loop, and so always.
      state: any pytree.
    """

    def body(turn: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return jnp.zeros_like(turn[0]), fn(turn[1], turn[0])

    return jax.lax.while_loop(lambda turn: turn[0], body, (condition, state))[1]


def wide_plan(plan: Plan, exchange: Exchange, items: Items) -> Plan:
    """The plan of a second round."""
    count = items.valid.shape[0]
    return plan_of(exchange, count, merges=plan.merges, reads=plan.reads, complete=True)


def _round(
    task: _Task,
    plan: Plan,
    table: Table,
    legs: tuple[Leg, ...],
    arrived: Items,
    *,
    is_ticked: bool,
) -> tuple[Table, _Seen, InsertResult | None]:
    """What the owner does with the keys that arrived, and what comes back of it."""
    keys, valid = arrived.keys, arrived.valid
    inserted = None
    bags = task.bags if task.owners_pool else None
    if bags is not None and plan.hops:
        bags = arrived_bags(plan, arrived, task.bag_count)
    rows = None
    if task.train:
        offered = task.offered
        # Of replicas the rows of one's own keys alone are read.
        reads = task.reads and task.initial and bags is None and not plan.gathers
        table, inserted = insert_rows(
            table,
            keys,
            valid,
            scores_of(table, arrived),
            None if offered is None else onward_one(plan, legs, offered, last=False),
            task.evicted,
            admit=arrived.admits,
            occurrences=arrived.occurrences,
            pinned=task.pinned,
            is_ticked=is_ticked,
            reads=reads,
            dtype=_travels_in(task, plan, table),
        )
        slots, rows = inserted.upserted.slots, inserted.values
    elif task.touches:
        counts = scores_of(table, arrived)
        table, slots = _inserts.touch(table, keys, valid, counts, is_ticked=is_ticked)
    else:
        index, slots = _index.find(table.index, keys, valid)
        table = dataclasses.replace(table, index=index)
    if task.reads:
        table, values, rows = _home_rows(task, plan, table, legs, arrived, slots, bags, rows)
    else:
        values = rows = jnp.zeros((task.items.valid.shape[0], 0), table.dtype)
    if inserted is None:
        status, scores = found_or_missing(slots), None
        if task.scored:
            table, status, scores = _home_scores(plan, table, legs, slots, status)
        else:
            status = home_status(plan, legs, status)
        return table, _Seen(values, status, no_counts(), {}, None, scores), None
    result = insert_result(rows, keys, inserted, bags)
    by_table = {} if task.measure is None else task.measure(result)
    status = home_status(plan, legs, result.status)
    evicted = padded(result.evicted, task.exchange, plan, task.items)
    seen = _Seen(values, status, result.counts, by_table, evicted, None)
    return table, seen, result._replace(evicted=None)


def scores_of(table: Table, arrived: Items) -> Keys | None:
    """Scores as they were given, or the occurrences that a counting policy adds up."""
    if arrived.scores is not None:
        return Keys(arrived.scores)
    if arrived.occurrences is None or not table.policy.counts:
        return None
    low = arrived.occurrences.astype(jnp.uint32)
    return Keys(jnp.stack([low, jnp.zeros_like(low)], axis=-1))


def arrived_bags(plan: Plan, arrived: Items, bag_count: int) -> Bags:
    """The bags of all devices: those of each peer of the last hop, one peer after the other."""
    last = plan.hops[-1]
    total = bag_count * plan.devices
    sources = arrived.bags
    assert sources is not None
    sources = jnp.where(arrived.valid, sources, total)
    lengths = jnp.zeros((total,), jnp.int32).at[sources].add(1, mode="drop")
    lengths = lengths.reshape(last.peers, -1)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    starts = starts + (_rows.positions(last.peers) * jnp.int32(last.places))[:, None]
    splits = jnp.concatenate([starts.reshape(-1), jnp.full((1,), last.room, jnp.int32)])
    # Behind the last bag of a peer is what it sent no key for.
    return Bags(sources, splits, arrived.weights, (starts + lengths).reshape(-1))


def _home_rows(
    task: _Task,
    plan: Plan,
    table: Table,
    legs: tuple[Leg, ...],
    arrived: Items,
    slots: jax.Array,
    bags: Bags | None,
    rows: jax.Array | None,
) -> tuple[Table, jax.Array, jax.Array]:
    """The rows of this device's batch, and those that it returned as an owner.

    `rows` are those of what arrived, if they were read when it was inserted.
    """
    keys, valid = arrived.keys, arrived.valid
    if bags is not None:
        kind = None if plan.hops else task.dtype  # sums of sums are float32
        table, rows = pooled.pool_stored(table, keys, slots, bags, valid, task.initial, dtype=kind)
        return table, bags_homeward(plan, rows), rows
    room = slots.shape[0]
    keys, valid, slots = own_block(plan, (keys, valid, slots))
    if rows is None:
        initial = (table.initializer, table.seed, keys, valid) if task.initial else None
        kind = _travels_in(task, plan, table)
        table, rows = gather_values(table, slots, initial=initial, dtype=kind)
    if not plan.hops:
        return table, rows, rows
    by_place = homeward(plan, legs, rows, last=False)
    # Of replicas the result's values matter for their shape alone.
    returned = jnp.zeros((room, table.dim), rows.dtype) if plan.gathers else rows
    if task.bags is None:
        return table, by_slot(by_place, legs[0].slots, task.dtype), returned
    rows = pooled.pool_by_slot(by_place, legs[0].slots, task.bags, task.dtype)
    return table, rows, returned


def _travels_in(task: _Task, plan: Plan, table: Table) -> Any:
    """The type in which rows come from their owners, the narrower one; None: the table's."""
    kind = task.dtype
    is_wider = kind is not None and jnp.dtype(kind).itemsize > table.dtype.itemsize
    return None if task.bags is not None or (plan.hops and is_wider) else kind


def home_status(plan: Plan, legs: tuple[Leg, ...], status: jax.Array) -> jax.Array:
    """The status of each position; of equal keys that were merged the first says "inserted"."""
    if not legs:
        return status

    def of_later(status: jax.Array) -> jax.Array:
        return jnp.where(is_new(status), jnp.int32(Status.FOUND), status)

    return homeward(plan, legs, own_block(plan, status[:, None]), of_later=of_later)[:, 0]


def _home_scores(
    plan: Plan, table: Table, legs: tuple[Leg, ...], slots: jax.Array, status: jax.Array
) -> tuple[Table, jax.Array, Keys]:
    """The status of each position and the score of its entry, of keys that were looked up."""
    index, scores = _index.scores_at(table.index, slots)
    table = dataclasses.replace(table, index=index)
    if not legs:
        return table, status, scores
    words = jax.lax.bitcast_convert_type(scores.words, jnp.int32)
    own = own_block(plan, jnp.concatenate([status[:, None], words], axis=1))
    numbers = homeward(plan, legs, own)
    words = jax.lax.bitcast_convert_type(numbers[:, 1:], jnp.uint32)
    return table, numbers[:, 0], Keys(words)


# --- Results -------------------------------------------------------------------------------------


def slots_like(status: Int32[Array, "*batch"]) -> Int32[Array, "*batch"]:
    """0 where a key has a row, -1 where it has none."""
    has_row = (status == Status.FOUND) | is_new(status)
    return jnp.where(has_row, jnp.int32(0), NO_SLOT)


def is_sharded(result: Any) -> bool:
    """Whether a result, or every one of a sequence, is that of a lookup over several devices."""
    if is_one_result(result):
        return isinstance(result, ShardedResult)
    results = list(result)
    return bool(results) and all(isinstance(each, ShardedResult) for each in results)


def is_strict(result: Any) -> bool:
    """Whether a result is of an exchange whose overflow is an error."""
    return isinstance(result, ShardedResult) and result.exchange.strict


# --- Parts ---------------------------------------------------------------------------------------


def as_flat(
    call: str, table: Table, keys: Any, valid: Any, axis_name: Any
) -> tuple[Exchange, Keys, Bagged]:
    """How keys travel, the keys as they were given, and as a batch without bags."""
    exchange = exchange_of(call, table, axis_name)
    given = as_keys(call, "keys", keys, table.index.namespace)
    check_fixed(call, "keys", given.shape)
    mask = _checks.as_flat_mask(call, "valid", valid, given.shape)
    return exchange, given, Bagged(given.reshape(-1), mask, None)


def exchange_of(call: str, table: Table, axis_name: Any) -> Exchange:
    """How the keys of a table over devices travel; raises in the name of the call."""
    exchange = as_exchange(axis_name)
    if exchange is None:
        raise TypeError(
            f"{call}: axis_name must be the name of a mesh axis (or a tuple of such, or a "
            f"jax_hkv.sharding.Exchange), got None: for a table of one device use jax_hkv."
            f"{call.removeprefix('sharding.')}"
        )
    check_one_device(call, table, is_part=True)
    return _of_table(call, exchange, table)


def _of_table(call: str, exchange: Exchange, table: Table) -> Exchange:
    """The exchange, of replicas where the table is one; raises if it says something else."""
    if exchange.replicas and exchange.replicas != table.replicas:
        kind = f"has replicas={table.replicas}" if table.replicas else "is split by keys"
        raise ValueError(
            f"{call}: axis_name must say nothing of replicas for the table {table.name!r}, which "
            f"{kind}, got replicas={exchange.replicas}: leave that out here, or create the table "
            f"with replicas={exchange.replicas} (jax_hkv.sharding.reshard, or export_entries and "
            "import_entries, bring entries over)"
        )
    warn_of_axes(call, table.replicas, exchange.axes)
    return dataclasses.replace(exchange, replicas=table.replicas)


def misplaced(table: Table, *, axis_name: str | tuple[str, ...] | Exchange) -> Int32[Array, ""]:
    """As :func:`jax_hkv.misplaced`, of a table over devices; inside shard_map or pmap.

    Entries on a device that does not own their key are counted too: those that an operation of
    one device put into a part (``jax_hkv.insert_or_assign`` in place of the one of
    :mod:`jax_hkv.sharding`), or that lie there because axes were named in another order.

    Args:
      table: this device's part.
      axis_name: of the mesh axis, or an :class:`Exchange`.

    Returns:
      The entries of all devices that a lookup of their own key does not find, the same on each
      device; of replicas, those of the worst one.

    Raises:
      TypeError: naming the argument.
      NameError: if the axis is not bound.
    """
    exchange = exchange_of("sharding.misplaced", table, axis_name)
    copied, split, parts = exchange.copied, exchange.split, exchange.parts
    if split:
        own = jax.lax.axis_index(split).astype(jnp.int32)
        count = whole_table.count_misplaced(table, lambda keys: owners(keys, parts) != own)
        count = over(split, jax.lax.psum, count)
    else:
        count = whole_table.misplaced(table)
    return over(copied, jax.lax.pmax, count)
