"""Keys to slots: the index of a table, and what can be done to it.

Every function threads the clock leaf: each native call takes it and returns it, so that XLA orders
the calls and never has to copy a leaf that a later call updates in place.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num, UInt8, UInt32

from jax_hkv import _ffi, _trees, rows
from jax_hkv._keys import Keys
from jax_hkv._namespaces import Namespace
from jax_hkv.initializers import Initializer

LANES = 128
MAX_SLOTS = 2**31 - 1
NO_SLOT = -1


class Policy(enum.IntEnum):
    """How entries are scored; the entry of lowest score in a full bucket is evicted."""

    LRU = 0
    LFU = 1
    EPOCH_LRU = 2
    EPOCH_LFU = 3
    CUSTOM = 4

    @property
    def counts(self) -> bool:
        """Whether scores are sums of occurrences, or of the scores given with them."""
        return self in (Policy.LFU, Policy.EPOCH_LFU)

    @property
    def has_epochs(self) -> bool:
        """Whether scores begin with the epoch, of 32 bits."""
        return self in (Policy.EPOCH_LRU, Policy.EPOCH_LFU)


class Status(enum.IntEnum):
    """What became of a position of a batch (docs/semantics.md, sections 3.4 and 11)."""

    MISSING = 0
    FOUND = 1
    INSERTED = 2
    EVICTED = 3
    REFUSED = 4
    NOT_ADMITTED = 5


def is_new(status: Int32[Array, "*batch"]) -> Bool[Array, "*batch"]:
    """Which positions have inserted their keys: into free lanes, or in place of other entries.

    Of several occurrences of a new key that is the first.

    Args:
      status: of a result, of any shape.

    Raises:
      TypeError: if it is no array of integers.

    Example:
      >>> is_new(jnp.array([Status.FOUND, Status.INSERTED, Status.EVICTED])).tolist()
      [False, True, True]
    """
    if not jnp.issubdtype(getattr(status, "dtype", None) or bool, jnp.integer):
        raise TypeError(
            "is_new: status must be an array of integers, as `status` of results is, got "
            f"{type(status).__name__}: give result.status"
        )
    return (status == Status.INSERTED) | (status == Status.EVICTED)


@_trees.register
@dataclasses.dataclass(frozen=True)
class Index:
    """Digests, keys and scores of `B` buckets of 128 lanes.

    Attributes:
      digests: ``uint8[B, 128]``; 0 marks an empty lane.
      keys: ``uint32[B, 128, 2]``.
      scores: ``uint32[B, 128, 2]``.
      occupancy: ``int32[B]``, entries of each bucket.
      oldest: ``uint32[B, 4]``, of each bucket entries that were its oldest at a time, under LRU:
        what finds victims without reading a bucket's scores.
      clock: ``uint32[2]``, the logical time, and the leaf that orders operations.
      epoch: ``uint32[1]``.
      policy: static.
      choices: static, candidate buckets of a key.
      namespace: static, whose ids the keys are, where their highest bits say that; None: ids.
      name: static, for error messages.
    """

    digests: UInt8[Array, "B 128"]
    keys: UInt32[Array, "B 128 2"]
    scores: UInt32[Array, "B 128 2"]
    occupancy: Int32[Array, " B"]
    oldest: UInt32[Array, "B 4"]
    clock: UInt32[Array, " 2"]
    epoch: UInt32[Array, " 1"]
    policy: Policy = _trees.static(told_by="scores")
    choices: int = _trees.static(told_by="keys")
    namespace: Namespace | None = _trees.static(told_by="keys")
    name: str = _trees.static()

    def _identity(self) -> tuple[Any, ...]:
        """What none of its arrays can be read without: a part of them would be no index."""
        namespace = self.namespace and (*self.namespace.tables, self.namespace.bits)
        return self.policy, self.choices, namespace

    @property
    def slots(self) -> int:
        """Slots in all."""
        return self.digests.shape[-2] * LANES


class Groups(NamedTuple):
    """The distinct keys of a batch of n positions, and who they are (docs/semantics.md, section 6).

    Attributes:
      keys: ``uint32[n, 2]``, distinct keys in order of first occurrence, zero behind `count`.
      inverse: ``int32[n]``, the number of each position's key, -1 where masked.
      first: ``int32[n]``, the position of each distinct key's first occurrence, -1 behind `count`.
      last: ``int32[n]``, of its last one.
      count: ``int32[1]``, distinct keys.
    """

    keys: UInt32[Array, "n 2"]
    inverse: Int32[Array, " n"]
    first: Int32[Array, " n"]
    last: Int32[Array, " n"]
    count: Int32[Array, " 1"]


class Occurrences(NamedTuple):
    """The positions of a batch, grouped by key (docs/semantics.md, section 6).

    Attributes:
      order: ``int32[n]``, the valid positions, key by key.
      offsets: ``int32[n + 1]``, where each key's begin in `order`.
    """

    order: Int32[Array, " n"]
    offsets: Int32[Array, " n+1"]

    @property
    def counts(self) -> Int32[Array, " n"]:
        """How often each distinct key occurs."""
        return jnp.diff(self.offsets)


class Upserted(NamedTuple):
    """What an upsert did, by position and by distinct key.

    `new_slots` are the slots of the distinct keys that were inserted, -1 for the others;
    `evicted_count` is how many of the evicted are meant, 0 where they were not asked for.
    """

    slots: Int32[Array, " n"]
    status: Int32[Array, " n"]
    unique_slots: Int32[Array, " n"]
    unique_status: Int32[Array, " n"]
    evicted_keys: UInt32[Array, "e 2"]
    evicted_scores: UInt32[Array, "e 2"]
    evicted_slots: Int32[Array, " e"]
    evicted_count: Int32[Array, " 1"]
    new_slots: Int32[Array, " m"]


def take(array: jax.Array, positions: jax.Array) -> jax.Array:
    """Elements by position; positions that do not exist give an element without meaning."""
    return array.at[positions].get(mode="clip") if array.shape[0] else array


def by_position(groups: Groups, of_keys: Int32[Array, " n"], masked: int) -> Int32[Array, " n"]:
    """What distinct keys have, for each of their positions."""
    return jnp.where(groups.inverse >= 0, take(of_keys, groups.inverse), masked)


def sum_by_key(groups: Groups, numbers: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The sum of the positions' integers for each distinct key."""
    target = jnp.where(groups.inverse >= 0, groups.inverse, numbers.shape[0])
    return jnp.zeros_like(numbers).at[target].add(numbers, mode="drop")


def total_of(counts: Int32[Array, "*shape"]) -> Int32[Array, ""]:
    """Their sum, with x64 on too of 32 bits."""
    return jnp.sum(counts, dtype=jnp.int32)


def tally(numbers: Int32[Array, " n"], kinds: int) -> Int32[Array, " kinds"]:
    """How often each number from 0 to `kinds` - 1 occurs, best in runs; others do not count."""
    (counts,) = _ffi.call("tally", numbers, kinds=kinds)
    return counts


def create(
    buckets: int, policy: Policy, choices: int, name: str, namespace: Namespace | None = None
) -> Index:
    """An empty index."""
    return Index(
        digests=rows.new(jnp.zeros((1, LANES), jnp.uint8), buckets),
        keys=rows.new(jnp.zeros((1, LANES, 2), jnp.uint32), buckets),
        scores=rows.new(jnp.zeros((1, LANES, 2), jnp.uint32), buckets),
        occupancy=jnp.zeros((buckets,), jnp.int32),
        oldest=jnp.zeros((buckets, 4), jnp.uint32),
        clock=jnp.zeros((2,), jnp.uint32),
        epoch=jnp.zeros((1,), jnp.uint32),
        policy=policy,
        choices=choices,
        namespace=namespace,
        name=name,
    )


def tick(index: Index) -> Index:
    """One unit of logical time later."""
    low = index.clock[:1] + jnp.uint32(1)
    high = index.clock[1:] + (low == 0).astype(jnp.uint32)
    return dataclasses.replace(index, clock=jnp.concatenate([low, high]))


def unique(keys: Keys, valid: rows.Mask) -> Groups:
    """The distinct valid keys of a batch."""
    return Groups(*_ffi.call("unique", keys.words, rows.flags(valid)))


def occurrences(groups: Groups) -> Occurrences:
    """Where each distinct key occurs. A sort on a GPU: for those who need all occurrences."""
    return Occurrences(*_ffi.call("list_occurrences", groups.inverse, groups.count))


class Terms(NamedTuple):
    """What a batch's positions add to the sums of their keys.

    Attributes:
      rows: any floating-point type.
      sources: of each position: the row that it adds; None: position i adds row i.
      weights: of each position: a factor; None: one.
    """

    rows: Float[Array, "k ..."]
    sources: Int32[Array, " n"] | None = None
    weights: Float32[Array, " n"] | None = None

    @property
    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As native operations take them."""
        sources = jnp.zeros((0,), jnp.int32) if self.sources is None else self.sources
        weights = jnp.zeros((0,), jnp.float32) if self.weights is None else self.weights
        return sources, weights, self.rows


def combine(groups: Groups, terms: Terms, size: int | None = None) -> Float32[Array, "size ..."]:
    """The sum of each distinct key's rows by the fixed tree of docs/semantics.md, section 8.

    Args:
      groups: of the positions.
      terms: what these add.
      size: how many of the keys are meant, the first ones: no position is of another one. None:
        all.
    """
    order, offsets = occurrences(groups)
    offsets = offsets if size is None else offsets[: size + 1]
    (sums,) = _ffi.call(
        "combine_rows", groups.count, groups.inverse, order, offsets, *terms.operands
    )
    return sums


def combine_some(
    groups: Groups, terms: Terms, found: Occurrences, first: Any, size: int
) -> Float32[Array, "size ..."]:
    """So many of the sums of :func:`combine`, from that of a key on, whose number may be traced."""
    count, inverse, offsets = groups.count, groups.inverse, found.offsets
    if size != groups.keys.shape[0]:
        count, inverse = jnp.clip(count - first, 0, size), inverse - first
        inverse = jnp.where((inverse >= 0) & (inverse < size), inverse, -1)
        offsets = jax.lax.dynamic_slice_in_dim(offsets, first, size + 1)
    (sums,) = _ffi.call("combine_rows", count, inverse, found.order, offsets, *terms.operands)
    return sums


def square_norm(groups: Groups, terms: Terms, slots: Int32[Array, " n"]) -> Float32[Array, ""]:
    """The sum of the squares of all that :func:`combine` gives the keys that have a slot."""
    (norm,) = _ffi.call(
        "square_norm",
        *(slots, groups.count, groups.inverse, *occurrences(groups), *terms.operands),
    )
    return norm[0]


def update_rows(
    rule: str,
    index: Index,
    values: Float[Array, "S ..."],
    states: Sequence[Array],
    steps: UInt32[Array, " c"],
    skipped: UInt32[Array, " 1"],
    slots: Int32[Array, " n"],
    groups: Groups,
    rate: Float32[Array, " 1"],
    terms: Terms,
    **attributes: Any,
) -> list[Any]:
    """Moves the rows in slots that still hold their keys by the keys' sums, as a native rule does.

    Returns:
      The clock, the values, each of the states, the steps, and what was skipped, as they are then.
    """
    return _ffi.call(
        f"update_{rule}",
        *(index.clock, index.digests, index.keys, values, *states, steps, skipped),
        *(slots, groups.keys, rate, groups.count, groups.inverse, *occurrences(groups)),
        *terms.operands,
        table=index.name,
        **attributes,
    )


def all_of(groups: Groups) -> Bool[Array, " n"]:
    """Which entries of `groups.keys` are keys."""
    return jax.lax.iota(jnp.int32, groups.keys.shape[0]) < groups.count


def find(index: Index, keys: Keys, valid: rows.Mask) -> tuple[Index, Int32[Array, " n"]]:
    """The slot of every key, -1 where it is absent or masked."""
    clock, slots = _ffi.call(
        "find_slots",
        index.clock,
        index.digests,
        index.keys,
        keys.words,
        rows.flags(valid),
        table=index.name,
        choices=index.choices,
    )
    return dataclasses.replace(index, clock=clock), slots


def scores_at(index: Index, slots: Int32[Array, " n"]) -> tuple[Index, Keys]:
    """The scores of the entries in slots, zero where that is -1."""
    clock, words = rows.gather(index.clock, index.scores.reshape(-1, 2), slots, name=index.name)
    return dataclasses.replace(index, clock=clock), Keys(words)


def find_rows(
    index: Index,
    keys: Keys,
    valid: rows.Mask,
    values: Num[Array, "S ..."],
    *,
    fill: float,
    initial: tuple[Initializer, int] | None,
    dtype: Any = None,
) -> tuple[Index, Int32[Array, " n"], Num[Array, "n ..."]]:
    """:func:`find` and :func:`jax_hkv.rows.gather` in one pass, equal in bits.

    Args:
      index: to look in.
      keys: of the batch.
      valid: of them.
      values: rows by slot.
      fill: the row of masked keys, and of absent ones unless:
      initial: initializer and seed of the first rows that absent keys get.
      dtype: of the rows that come back; None: of the values.
    """
    initializer, seed = initial or (Initializer(0), 0)
    clock, slots, found = _ffi.call(
        "find_rows",
        index.clock,
        index.digests,
        index.keys,
        values,
        keys.words,
        rows.flags(valid),
        table=index.name,
        choices=index.choices,
        initialize=int(initial is not None),
        dtype=values.dtype if dtype is None else dtype,
        fill=float(fill),
        **rows.attributes(initializer, seed),
    )
    return dataclasses.replace(index, clock=clock), slots, found


def verify(
    index: Index, keys: Keys, slots: Int32[Array, " n"], stale: UInt32[Array, " 1"]
) -> tuple[Index, Int32[Array, " n"], UInt32[Array, " 1"]]:
    """The slots that still hold their keys; the others become -1, and `stale` counts them."""
    clock, stale, verified = _ffi.call(
        "verify_slots",
        *(index.clock, index.digests, index.keys),
        *(keys.words, slots, stale),
        table=index.name,
    )
    return dataclasses.replace(index, clock=clock), verified, stale


def upsert(
    index: Index,
    groups: Groups,
    scores: Keys | None,
    *,
    admit: bool,
    write_scores: bool = True,
    pinned: Int32[Array, " p"] | None = None,
    report_evicted: bool = False,
    report_new: bool = False,
    is_ticked: bool = False,
    as_given: bool = False,
) -> tuple[Index, Upserted]:
    """Refreshes the keys that are present and, with `admit`, inserts the others; ticks the clock.

    Args:
      index: to change.
      groups: of the batch.
      scores: of the positions, or None.
      admit: whether absent keys are inserted.
      write_scores: whether hits are scored.
      pinned: slots that must not be evicted, besides those of the batch.
      report_evicted: whether evicted entries are wanted.
      report_new: whether `new_slots` are wanted.
      is_ticked: whether the clock already stands at the time of this batch.
      as_given: whether scores are those given, whatever the policy.
    """
    policy = Policy.CUSTOM if as_given else index.policy
    positions = groups.keys.shape[0]
    none = jnp.zeros((0,), jnp.int32)
    is_counting = policy.counts and (admit or write_scores)
    results = _ffi.call(
        "upsert",
        *(index.clock, index.epoch, index.digests, index.keys, index.scores),
        *(index.occupancy, index.oldest),
        *(groups.keys, groups.count, groups.inverse, groups.first, groups.last),
        *(occurrences(groups) if is_counting else (none, none)),
        jnp.zeros((0, 2), jnp.uint32) if scores is None else scores.words,
        none if pinned is None else pinned,
        table=index.name,
        policy=int(policy),
        choices=index.choices,
        admit=int(admit),
        write_scores=int(write_scores),
        foreign=int(policy is not index.policy),
        ticks=int(not is_ticked),
        e=positions if report_evicted else 0,
        m=positions if report_new else 0,
    )
    return _with_leaves(index, results[:6]), Upserted(*results[6:])


def erase(index: Index, slots: Int32[Array, " m"]) -> Index:
    """Empties distinct slots that hold entries; -1 is passed over."""
    own = (index.clock, index.digests, index.keys, index.scores, index.occupancy)
    return _with_leaves(index, _ffi.call("erase_slots", *own, slots, table=index.name))


def clear(index: Index) -> Index:
    """Empties every slot."""
    own = (index.clock, index.digests, index.keys, index.scores, index.occupancy)
    return _with_leaves(index, _ffi.call("clear", *own, table=index.name))


def read(
    index: Index, offset: Int32[Array, ""], count: int
) -> tuple[Index, Keys, Keys, Bool[Array, " count"]]:
    """Keys, scores and occupancy of `count` slots from `offset` on."""
    clock, keys, scores, occupied = _ffi.call(
        "read_slots",
        index.clock,
        index.digests,
        index.keys,
        index.scores,
        offset.reshape(1),
        table=index.name,
        count=count,
    )
    return dataclasses.replace(index, clock=clock), Keys(keys), Keys(scores), occupied


class Exported(NamedTuple):
    """What :func:`export` gives: entries side by side, behind them zeros and slot -1."""

    keys: Keys
    scores: Keys
    slots: Int32[Array, " count"]
    count: Int32[Array, ""]
    values: Num[Array, "count ..."]


def export(
    index: Index,
    values: Num[Array, "S ..."],
    offset: Int32[Array, ""],
    count: int,
    chosen: rows.Mask,
) -> tuple[Index, Exported]:
    """The entries in `count` slots from `offset` on, in slot order, and how many there are.

    Args:
      index: to read.
      values: rows by slot.
      offset: first slot.
      count: slots.
      chosen: of the slots, those that are wanted; None: all.
    """
    clock, keys, scores, slots, exported, values = _ffi.call(
        "export_slots",
        index.clock,
        index.digests,
        index.keys,
        index.scores,
        values,
        offset.reshape(1),
        rows.flags(chosen),
        table=index.name,
        count=count,
    )
    index = dataclasses.replace(index, clock=clock)
    return index, Exported(Keys(keys), Keys(scores), slots, exported.reshape(()), values)


# Leaves that are changed, in the order of results; what removes entries leaves the last one alone.
_CHANGED = ("clock", "digests", "keys", "scores", "occupancy", "oldest")


def _with_leaves(index: Index, leaves: Sequence[jax.Array]) -> Index:
    changed: dict[str, Any] = dict(zip(_CHANGED, leaves, strict=False))
    return dataclasses.replace(index, **changed)
