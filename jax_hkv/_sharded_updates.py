"""Updates of a table that lies on several devices: gradients take the way that the keys took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from jax_hkv import _checks, _updates, pooled
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._compat import vary
from jax_hkv._hops import Leg, Plan, bags_onward, in_a_row, onward, outward
from jax_hkv._options import Flag
from jax_hkv._sharded import ShardedResult, arrived_bags, once_if, wide_plan
from jax_hkv.index import NO_SLOT
from jax_hkv.table import Bags, InsertResult, Table


def update(
    optimizer: Any,
    table: Table,
    result: ShardedResult | Sequence[ShardedResult],
    row_gradients: Any,
    *,
    apply: Flag | None = None,
    **extra: Any,
) -> Table:
    """This device's part of a table after one step; see :func:`jax_hkv.sharding.update`."""
    if "axis_name" in extra:
        raise TypeError(
            f"sharding.update: axis_name is none of its arguments, got {extra['axis_name']!r}: "
            "gradients take the way of the lookup, which its result knows; leave it out"
        )
    apply = _checks.as_flag("sharding.update", "apply", apply)
    pairs = _listed(result, row_gradients)
    overflowed = _overflowed(pairs)
    first = apply
    if overflowed is not None:
        first = ~overflowed if apply is None else apply & ~overflowed
    sent = [_sent(*pair) for pair in pairs]
    table = _apply(optimizer, table, sent, first, extra)
    if overflowed is None or pairs[0][0].exchange.strict:
        return table

    def second(table: Table, now: jax.Array) -> Table:
        return _apply(optimizer, table, _again(pairs, sent, now), apply, extra)

    return once_if(overflowed, second, table)


def square_norm(call: str, result: Any, row_gradients: Any) -> Float32[Array, ""]:
    """The squared norm of the summed gradients of all devices' distinct keys that have rows."""
    pairs = _listed(result, row_gradients, call)
    exchange = pairs[0][0].exchange
    overflowed = _overflowed(pairs)
    sent = [_sent(*pair) for pair in pairs]
    total = _square_norm(sent)
    if overflowed is not None and not exchange.strict:

        def second(_: jax.Array, now: jax.Array) -> jax.Array:
            return _square_norm(_again(pairs, sent, now))

        total = vary(total, exchange.axes)
        total = once_if(overflowed, second, total)
    return exchange.of_all(total)


def _square_norm(sent: list[tuple[InsertResult, jax.Array]]) -> Float32[Array, ""]:
    return _updates.square_norm([own for own, _ in sent], [rows for _, rows in sent])


def _masked(result: ShardedResult, mask: Bool[Array, " ..."]) -> ShardedResult:
    """A result that leaves out the positions where a mask is False."""
    start = result.route.start
    start = start._replace(valid=start.valid & mask)
    return result._replace(route=result.route._replace(start=start))


def _listed(
    result: Any, row_gradients: Any, call: str = "sharding.update"
) -> list[tuple[ShardedResult, Any]]:
    """Checked results with their gradients, as pairs."""
    names = (call, "sharding.find_or_insert")
    results, gradients = _updates.listed(result, row_gradients, ShardedResult, *names)
    if len({each.exchange.strict for each in results}) > 1:
        raise ValueError(
            f"{call}: the results of one update must come from exchanges that are all "
            "strict, or all not; got both: update with each kind by itself"
        )
    pairs = zip(results, gradients, strict=True)
    return [_updates.in_one_stack(*pair) for pair in pairs]


def _is_stack(result: ShardedResult) -> bool:
    """Whether ``jax.lax.scan`` has stacked lookups, whose gradients travel together."""
    return result.counts.unique.ndim > 0


def _overflowed(pairs: list[tuple[ShardedResult, Any]]) -> Bool[Array, ""] | None:
    counts = [each.route.overflow for each, _ in pairs if each.route.overflow is not None]
    totals = [_index.total_of(each) if each.ndim else each for each in counts]
    return None if not totals else sum(totals, jnp.int32(0)) > 0


def _apply(
    optimizer: Any,
    table: Table,
    sent: list[tuple[InsertResult, jax.Array]],
    apply: Any,
    extra: dict[str, Any],
) -> Table:
    extra = extra if apply is None else {**extra, "apply": apply}
    if len(sent) == 1:
        return optimizer.update(table, *sent[0], **extra)
    return optimizer.update(table, [own for own, _ in sent], [rows for _, rows in sent], **extra)


def _sent(result: ShardedResult, gradients: Any) -> tuple[InsertResult, jax.Array]:
    """The owner's result, and the gradients by its rows that the other devices sent."""
    route = result.route
    assert route.owner is not None
    rows = _onward(result, gradients, route.plan, route.legs)
    return route.owner, rows.reshape(route.owner.values.shape)


def _onward(
    result: ShardedResult, gradients: Any, plan: Plan, legs: tuple[Leg, ...]
) -> Float[Array, "*rows dim"]:
    """The gradients by an owner's rows; of stacked lookups those of one after the other's."""
    terms = _updates.terms_of([result], [gradients])
    rows = terms.rows
    if not plan.hops:
        return rows
    if result.bags is not None and result.route.start.bags is not None:
        send = partial(bags_onward, plan)
        if not _is_stack(result):
            return send(rows)
        return jax.vmap(send)(rows.reshape(result.values.shape))
    if _is_stack(result):
        legs = tuple(map(in_a_row, legs))
    if legs[0].groups is not None:
        return onward(plan, legs, _index.combine(legs[0].groups, terms))
    if terms.sources is not None:
        # Weighed natively, as where keys are merged: XLA's product may drop subnormal numbers.
        each = Bags(terms.sources, _rows.positions(terms.sources.shape[0] + 1), terms.weights)
        rows = pooled.pool_by_slot(rows, terms.sources, each)
    return onward(plan, legs, rows)


def _again(
    pairs: list[tuple[ShardedResult, Any]], sent: list[tuple[InsertResult, jax.Array]], now: Any
) -> list[tuple[InsertResult, jax.Array]]:
    """The owner's results where keys of one of them overflowed.

    Of a lookup that overflowed the first round has no keys, of another one the second: in their
    order they are what was looked up.
    """
    again = []
    for (result, gradients), (owner, rows) in zip(pairs, sent, strict=True):
        if _is_stack(result) and result.route.wide_slots is not None:
            again.append(_stack_again(result, gradients, (owner, rows), now))
            continue
        if len(pairs) > 1:
            again.append((owner, rows))
        if result.route.wide_slots is not None:
            again.append(_sent_wide(_masked(result, now), gradients, rows))
    return again


def _stack_again(
    result: ShardedResult, gradients: Any, sent: tuple[InsertResult, jax.Array], now: Any
) -> tuple[InsertResult, jax.Array]:
    """As :func:`_again`, of stacked lookups: of each the round that has its keys.

    One by one, since each has messages of its own: the program is as long for any number of them.
    """

    def one(lookup: Any) -> tuple[InsertResult, jax.Array]:
        result, gradients, (owner, rows) = lookup
        wide = _sent_wide(_masked(result, now), gradients, rows)
        # As in those, the rows stand for the values.
        return _either(result.route.overflow > 0, wide, (owner._replace(values=rows), rows))

    return jax.lax.map(one, (result, gradients, sent))


def _either(is_wide: Bool[Array, ""], wide: Any, first: Any) -> Any:
    """What the second round has sent, or the first in its form: it has more room."""

    def one(own: jax.Array, other: jax.Array) -> jax.Array:
        if own.shape != other.shape:
            fill = NO_SLOT if own.dtype == jnp.int32 else 0
            missing = [(0, own.shape[0] - other.shape[0])] + [(0, 0)] * (own.ndim - 1)
            other = jnp.pad(other, missing, constant_values=fill)
        return jnp.where(is_wide, own, other)

    return jax.tree.map(one, wide, first)


def _sent_wide(
    result: ShardedResult, gradients: Any, of_bags: jax.Array
) -> tuple[InsertResult, jax.Array]:
    """As :func:`_sent`, after a lookup whose keys overflowed: sent as its second round sent them.

    Gradients of bags need no room: they have been sent.
    """
    route = result.route
    assert route.wide_slots is not None
    plan = wide_plan(route.plan, result.exchange, route.start)
    bag_count = 0 if result.bags is None else result.bags.splits.shape[0] - 1
    legs, arrived, _ = outward(plan, route.start, bag_count)
    groups = _index.unique(arrived.keys, arrived.valid)
    unique_slots = route.wide_slots
    slots = _index.by_position(groups, unique_slots, NO_SLOT)
    bags = None if arrived.bags is None else arrived_bags(plan, arrived, bag_count)
    rows = of_bags if bags is not None else _onward(result, gradients, plan, legs)
    # The rows stand for the values because of their shape alone.
    fields = (rows, arrived.keys, slots, slots, result.counts, None, groups, unique_slots, bags)
    return InsertResult(*fields), rows
