"""The way of a batch's keys to the devices that own them, and of rows back.

An exchange is a sequence of hops, one for each mesh axis. A hop merges equal keys, puts every key
into the block of the peer that is next on its way, and swaps blocks with the peers of its axis.
Where there are several replicas, a last hop gathers what all of them have got, so that each does
the same. Rows take the same way back, and gradients the same way again; what a hop did is kept as a
leg.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num, UInt32

from jax_hkv import _ffi
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._compat import over, vary
from jax_hkv._exchange import Exchange
from jax_hkv._keys import Keys, check_fixed
from jax_hkv.index import MAX_SLOTS, NO_SLOT, Groups

# Room beyond the expected number of keys for a peer, in standard deviations: keys are spread by a
# hash, so their number is binomial, and six deviations are passed once in 10**9 times.
_DEVIATIONS = 6.0
_WORD = 4  # bytes


# --- Plans ---------------------------------------------------------------------------------------


class Hop(NamedTuple):
    """One exchange along an axis: static.

    Attributes:
      axes: along which blocks are swapped.
      peers: devices along them.
      inner: devices along all axes further in: the peer of a key is ``owner // inner % peers``.
      places: room for keys in the block of one peer.
      gathers: whether every peer gets the same block, since all hold the same part.
    """

    axes: tuple[str, ...]
    peers: int
    inner: int
    places: int
    gathers: bool = False

    @property
    def room(self) -> int:
        """Keys that can arrive."""
        return self.peers * self.places


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plan:
    """The hops of a batch, with their room.

    Attributes:
      hops: in the order in which keys take them, the last of which may gather; none on one device.
      devices: that a table, or each of its replicas, is split over.
      merges: whether equal keys are merged before each hop.
      reads: whether nothing is changed, so that one of replicas is asked.
      ragged: see :class:`Exchange`.
      is_complete: whether there is room for whatever comes.
    """

    hops: tuple[Hop, ...]
    devices: int
    merges: bool
    reads: bool
    ragged: bool
    is_complete: bool

    @property
    def gathers(self) -> bool:
        """Whether every replica gets all keys of its part."""
        return bool(self.hops) and self.hops[-1].gathers


def plan_of(
    exchange: Exchange, items: int, *, merges: bool, reads: bool = False, complete: bool = False
) -> Plan:
    """The plan for a batch of so many positions; a complete one has room for all.

    That takes one hop to the owners, whatever the axes. The last hop is that to other replicas.
    """
    check_fixed("jax_hkv.sharding", "keys", (items,))
    copied, split, devices = exchange.copied, exchange.split, exchange.parts
    sizes = dict(zip(exchange.axes, exchange.sizes, strict=True))
    expected = items * (exchange.distinct if merges else 1.0)
    levels = [(split, devices)] if split else []
    if exchange.levels and not complete:
        levels = [((axis,), sizes[axis]) for axis in split]
    if copied and not reads:
        levels = [(copied, exchange.devices // devices), *levels]
    hops: list[Hop] = []
    left, inner = items, 1
    for axes, peers in reversed(levels):
        gathers = axes == copied
        places = max(1, left)
        if not complete:
            places = _room(expected if gathers else expected / peers, exchange, left, gathers)
        if peers * places > MAX_SLOTS:
            raise ValueError(
                f"jax_hkv: an exchange of {peers} devices with {places} places for each needs "
                "more than 2**31 places: give smaller batches, or (beside strict=True) a smaller "
                "distinct= or slack= of jax_hkv.sharding.Exchange"
            )
        if peers > 1:
            hops.append(Hop(axes, peers, inner, places, gathers))
            left = peers * places
        inner *= peers
    return Plan(
        hops=tuple(hops),
        devices=devices,
        merges=merges,
        reads=reads,
        ragged=exchange.ragged,
        is_complete=_is_complete(items, hops),
    )


def _room(mean: float, exchange: Exchange, most: int, gathers: bool) -> int:
    """Places for a number of keys of this mean, at most as many as there are keys."""
    if gathers and mean == most:  # of a batch that is not split before, whatever slack says
        return max(1, most)
    wanted = math.ceil(exchange.slack * mean + _DEVIATIONS * math.sqrt(mean))
    return max(1, min(most, wanted))


def _is_complete(items: int, hops: list[Hop]) -> bool:
    arriving = [items, *(hop.room for hop in hops)]
    return all(hop.places >= count for hop, count in zip(hops, arriving, strict=False))


def bytes_of_rows(plan: Plan, row_bytes: int) -> float:
    """Bytes that a device sends in a step whose owners return a row for each key."""
    each = 2 * _WORD + _WORD + row_bytes + row_bytes  # key, status, row, gradient
    return sum(_leaving(hop) * hop.room * each for hop in plan.hops)


def bytes_of_sums(plan: Plan, bags: int, row_bytes: int) -> float:
    """Bytes that a device sends in a step whose owners return a row for each bag."""
    total = 0.0
    for hop in plan.hops:
        total += _leaving(hop) * hop.room * 4 * _WORD  # key, bag or weight, status
        total += (hop.peers - 1) * bags * 2 * row_bytes  # sums, and gradients
        bags *= hop.peers
    return total


def _leaving(hop: Hop) -> float:
    return 1 - 1 / hop.peers


# --- Keys outward --------------------------------------------------------------------------------


class Items(NamedTuple):
    """What travels of a batch, one entry for each position or distinct key.

    Attributes:
      keys: ``[n]``.
      valid: ``bool[n]``.
      scores: ``uint32[n, 2]`` words, or None.
      occurrences: of the key in the batch, where the table counts them; else None.
      bags: the bag of each position, where owners pool; else None.
      weights: of each position in its bag, or None.
      admits: how many positions let the key in, where the caller says which do; else None.
    """

    keys: Keys
    valid: Bool[Array, " n"]
    scores: UInt32[Array, "n 2"] | None = None
    occurrences: Int32[Array, " n"] | None = None
    bags: Int32[Array, " n"] | None = None
    weights: Float32[Array, " n"] | None = None
    admits: Int32[Array, " n"] | None = None


class Leg(NamedTuple):
    """What a hop did.

    Attributes:
      groups: the distinct keys before it, if it merged them.
      sent: ``int32[peers * places]``, who stands at each place that was sent, -1 for nobody.
      slots: of each position before the hop: the place of its key, -1 if it has none.
      outgoing: ``int32[peers]``, keys sent to each peer.
      incoming: ``int32[peers]``, keys that came from each peer.
    """

    groups: Groups | None
    sent: Int32[Array, " room"]
    slots: Int32[Array, " n"]
    outgoing: Int32[Array, " peers"]
    incoming: Int32[Array, " peers"]


def outward(
    plan: Plan, items: Items, bags: int = 0
) -> tuple[tuple[Leg, ...], Items, Int32[Array, ""]]:
    """Sends keys to their owners.

    Args:
      plan: of this number of positions.
      items: of this device.
      bags: how many bags they are in, where owners pool.

    Returns:
      What the hops did, what arrived here, and how many keys of all devices found no room.
    """
    legs = []
    own = overflow = jnp.int32(0)
    for hop in plan.hops:
        groups = None
        if plan.merges:
            groups, items = _merged(items)
        leg, items, left_out, overflow = _hop(plan, hop, items, groups)
        if items.bags is not None:
            peer = _rows.positions(hop.room) // jnp.int32(hop.places)
            items = items._replace(bags=items.bags + peer * jnp.int32(bags))
            bags *= hop.peers
        legs.append(leg)
        own = own + left_out
    if len(plan.hops) > 1:  # a header has come from the devices of one axis
        axes = tuple(axis for hop in plan.hops for axis in hop.axes)
        overflow = over(axes, jax.lax.psum, own)
    return tuple(legs), items, overflow


def _merged(items: Items) -> tuple[Groups, Items]:
    """The distinct keys; of scores the last counts, occurrences and admissions are summed."""
    groups = _index.unique(items.keys, items.valid)

    def summed(numbers: jax.Array | None) -> jax.Array | None:
        return None if numbers is None else _index.sum_by_key(groups, numbers)

    scores = None if items.scores is None else _index.take(items.scores, groups.last)
    occurrences, admits = summed(items.occurrences), summed(items.admits)
    keys = Keys(groups.keys)
    return groups, Items(keys, _index.all_of(groups), scores, occurrences, admits=admits)


def _hop(
    plan: Plan, hop: Hop, items: Items, groups: Groups | None
) -> tuple[Leg, Items, Int32[Array, ""], Int32[Array, ""]]:
    """What a hop did, what arrived, and how many keys this device and all its peers left out."""
    if hop.gathers:
        sent, places, counts = _to_everyone(hop, items.valid)
    else:
        sent, places, counts = _ffi.call(
            "route_keys",
            *(items.keys.words, items.valid),
            devices=plan.devices,
            inner=hop.inner,
            p=hop.peers,
            c=hop.places,
        )
        sent = sent.reshape(-1)
    outgoing = jnp.minimum(counts, hop.places)
    left_out = jnp.sum(counts - outgoing, dtype=jnp.int32)
    message = _with_header(_packed(items), sent, outgoing, left_out)
    if hop.gathers:
        arrived = jax.lax.all_gather(message[0], hop.axes)
    else:
        arrived = jax.lax.all_to_all(message, hop.axes, 0, 0, tiled=True)
    incoming, beyond = arrived[:, 0, 0].astype(jnp.int32), arrived[:, 0, 1].astype(jnp.int32)
    valid = _rows.positions(hop.places)[None] < incoming[:, None]
    words = arrived[:, 1:].reshape(hop.room, arrived.shape[-1])
    slots = places if groups is None else _index.by_position(groups, places, NO_SLOT)
    leg = Leg(groups, sent, slots, outgoing, incoming)
    arrivals = _unpacked(words, valid.reshape(-1), items)
    return leg, arrivals, left_out, jnp.sum(beyond, dtype=jnp.int32)


def _to_everyone(hop: Hop, valid: Bool[Array, " n"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block for all: the first valid items, in order."""
    before = jnp.cumsum(valid, dtype=jnp.int32) - valid.astype(jnp.int32)
    places = jnp.where(valid & (before < hop.places), before, NO_SLOT)
    sent = jnp.full((hop.places,), NO_SLOT, jnp.int32)
    sent = sent.at[jnp.where(places < 0, hop.places, places)].set(
        _rows.positions(valid.shape[0]), mode="drop"
    )
    return sent, places, jnp.sum(valid, dtype=jnp.int32)[None]


def _with_header(
    words: UInt32[Array, "n w"],
    sent: Int32[Array, " room"],
    outgoing: Int32[Array, " blocks"],
    left_out: Int32[Array, ""],
) -> UInt32[Array, "blocks places+1 w"]:
    """The blocks to send; the first entry of each says how many are meant, and how many left out.

    So every peer knows what found no room without a reduction between keys and owners.
    """
    blocks, width = outgoing.shape[0], words.shape[1]
    body = by_slot(words, sent).reshape(blocks, -1, width)
    numbers = jnp.stack([outgoing, jnp.broadcast_to(left_out, (blocks,))], axis=1)
    header = jnp.pad(numbers.astype(jnp.uint32), ((0, 0), (0, width - 2)))
    return jnp.concatenate([header[:, None], body], axis=1)


def _packed(items: Items) -> UInt32[Array, "n w"]:
    """All that an item has, in one row of words."""
    return jnp.concatenate([_as_words(part) for part in _parts(items)], axis=1)


def _unpacked(words: UInt32[Array, "m w"], valid: Bool[Array, " m"], like: Items) -> Items:
    parts, first = [], 0
    for part in _parts(like):
        width = part.shape[1] if part.ndim == 2 else 1
        own = words[:, first : first + width]
        bits = own if part.ndim == 2 else own[:, 0]
        parts.append(jax.lax.bitcast_convert_type(bits, part.dtype))
        first += width
    rest = iter(parts[1:])
    return Items(Keys(parts[0]), valid, *(None if own is None else next(rest) for own in like[2:]))


def _parts(items: Items) -> list[jax.Array]:
    return [items.keys.words, *(part for part in items[2:] if part is not None)]


def _as_words(part: jax.Array) -> UInt32[Array, "n w"]:
    words = jax.lax.bitcast_convert_type(part, jnp.uint32)
    return words if words.ndim == 2 else words[:, None]


# --- Rows back, gradients out --------------------------------------------------------------------


def by_slot(
    rows: Num[Array, "k ..."], slots: Int32[Array, " n"], dtype: Any = None
) -> Num[Array, "n ..."]:
    """Rows by their numbers, which may be cast; zeros where that is -1."""
    clock = jnp.zeros((2,), jnp.uint32)
    return _rows.gather(clock, rows, slots, dtype=dtype, name="exchange")[1]


def swap(
    plan: Plan, hop: Hop, rows: jax.Array, outgoing: jax.Array, incoming: jax.Array
) -> jax.Array:
    """Swaps the blocks of rows with the peers of a hop.

    Of each block only as many rows are meant as `outgoing` says; the others are zero.
    """
    if not plan.ragged:
        return jax.lax.all_to_all(rows, hop.axes, 0, 0, tiled=True)
    starts = _rows.positions(hop.peers) * jnp.int32(hop.places)
    own = jax.lax.axis_index(hop.axes).astype(jnp.int32) * jnp.int32(hop.places)
    starts, there, outgoing, incoming = vary(
        (starts, jnp.broadcast_to(own, starts.shape), outgoing, incoming), hop.axes
    )
    empty = vary(jnp.zeros_like(rows), hop.axes)
    return jax.lax.ragged_all_to_all(
        rows, empty, starts, outgoing, there, incoming, axis_name=hop.axes
    )


def homeward(
    plan: Plan,
    legs: tuple[Leg, ...],
    rows: Num[Array, "room ..."],
    *,
    last: bool = True,
    of_later: Callable[[jax.Array], jax.Array] | None = None,
) -> Num[Array, "n ..."]:
    """Brings rows of what arrived back to those who sent it.

    Args:
      plan: of the exchange.
      legs: of :func:`outward`.
      rows: one for each place that arrived, zeros where nothing did; of gathered ones those of
        :func:`own_block`.
      last: whether they are spread over the positions of the batch; otherwise they stay by place.
      of_later: what becomes of the row of a key at its occurrences after the first.
    """
    for number, (hop, leg) in reversed([*enumerate(zip(plan.hops, legs, strict=True))]):
        if not hop.gathers:
            rows = swap(plan, hop, rows, leg.incoming, leg.outgoing)
        if number == 0 and not last:
            return rows
        rows = spread(leg, rows, of_later)
    return rows


def own_block(plan: Plan, tree: Any) -> Any:
    """Of what arrived what this device is to read: all, or of gathered things what it sent."""
    if not plan.gathers:
        return tree
    hop = plan.hops[-1]
    first = jax.lax.axis_index(hop.axes).astype(jnp.int32) * jnp.int32(hop.places)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, hop.places), tree)


def spread(
    leg: Leg, rows: Num[Array, "room ..."], of_later: Callable[[jax.Array], jax.Array] | None = None
) -> Num[Array, "n ..."]:
    """Rows by place, for the positions before a hop; see :func:`homeward`."""
    rows = by_slot(rows, leg.slots)
    if leg.groups is None or of_later is None:
        return rows
    first = _index.by_position(leg.groups, leg.groups.first, NO_SLOT)
    is_later = _rows.positions(first.shape[0]) != first
    return jnp.where(is_later[:, None], of_later(rows), rows)


def onward(
    plan: Plan, legs: tuple[Leg, ...], sums: Float[Array, "n dim"]
) -> Float[Array, "room dim"]:
    """Sends a row of each distinct key (or position) of this device the way that its key took.

    With legs of :func:`in_a_row`: those of all lookups at once, and they arrive lookup by lookup.
    """
    for number, (hop, leg) in enumerate(zip(plan.hops, legs, strict=True)):
        if number and leg.groups is not None:
            sums = _index.combine(leg.groups, _index.Terms(sums))
        sums = by_slot(sums, leg.sent)
        send = functools.partial(_to_peers, plan, hop)
        if leg.outgoing.ndim == 1:
            sums = send((sums, leg.outgoing, leg.incoming))
            continue
        # Ragged ones go one by one: JAX 0.11.2 cannot map them where all have the same starts.
        at_once = functools.partial(jax.lax.map, send) if plan.ragged else jax.vmap(send)
        rows = sums.reshape(leg.outgoing.shape[0], -1, sums.shape[-1])
        sums = at_once((rows, leg.outgoing, leg.incoming)).reshape(-1, sums.shape[-1])
    return sums


def _to_peers(plan: Plan, hop: Hop, sent: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    rows, outgoing, incoming = sent
    if hop.gathers:
        return jax.lax.all_gather(rows, hop.axes, tiled=True)
    return swap(plan, hop, rows, outgoing, incoming)


def in_a_row(leg: Leg) -> Leg:
    """What a hop did for lookups that ``jax.lax.scan`` stacked, as for their batches in a row.

    Equal keys of several lookups stay several keys. Of groups it has what sums need.
    """
    groups = leg.groups
    lookups, positions = leg.slots.shape
    counts = jnp.full((lookups,), positions, jnp.int32) if groups is None else groups.count[:, 0]
    before = (jnp.cumsum(counts, dtype=jnp.int32) - counts)[:, None]

    def on(numbers: Int32[Array, "lookups n"]) -> Int32[Array, " m"]:
        return jnp.where(numbers < 0, NO_SLOT, numbers + before).reshape(-1)

    if groups is not None:
        total = jnp.sum(groups.count, axis=0, dtype=jnp.int32)
        groups = groups._replace(inverse=on(groups.inverse), count=total)
    return leg._replace(groups=groups, sent=on(leg.sent))


def onward_one(
    plan: Plan, legs: tuple[Leg, ...], rows: Num[Array, "n dim"], *, last: bool = True
) -> Num[Array, "room dim"]:
    """Sends the last or the first row of each key of this device the way that its key took."""
    kind = rows.dtype
    for hop, leg in zip(plan.hops, legs, strict=True):
        sources = leg.sent
        if leg.groups is not None and rows.shape[0]:
            chosen = leg.groups.last if last else leg.groups.first
            sources = jnp.where(sources >= 0, _index.take(chosen, sources), NO_SLOT)
        rows = by_slot(rows, sources)
        if kind.itemsize == 2:  # XLA for CPUs would make float32 of them, and other NaNs
            rows = jax.lax.bitcast_convert_type(rows, jnp.uint16)
        rows = _to_peers(plan, hop, (rows, leg.outgoing, leg.incoming))
        rows = jax.lax.bitcast_convert_type(rows, kind)
    return rows


def bags_homeward(plan: Plan, rows: Float[Array, "b dim"]) -> Float[Array, "own dim"]:
    """Brings sums for the bags of all peers back, where they are added up."""
    for hop in reversed(plan.hops):
        rows = jax.lax.all_to_all(rows, hop.axes, 0, 0, tiled=True)
        rows = jnp.sum(rows.reshape(hop.peers, -1, rows.shape[-1]), axis=0)
    return rows


def bags_onward(plan: Plan, rows: Float[Array, "own dim"]) -> Float[Array, "b dim"]:
    """Sends the rows of this device's bags to all owners."""
    for hop in plan.hops:
        rows = jax.lax.all_gather(rows, hop.axes, tiled=True)
    return rows
