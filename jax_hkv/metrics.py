"""What a table does and holds, as values: numbers of a step, and the summary of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt32

from jax_hkv._checks import as_counts, check_known
from jax_hkv._compat import is_inside, over
from jax_hkv._keys import Keys
from jax_hkv._sharded import ShardedResult
from jax_hkv._sharded_writes import ShardedWrite
from jax_hkv.admission import Frequency
from jax_hkv.index import LANES, Policy, total_of
from jax_hkv.table import (
    Counts,
    InsertResult,
    Table,
    WriteResult,
    check_live,
    check_one_device,
    is_one_result,
    no_counts,
)
from jax_hkv.whole_table import load_factor

__all__ = ["QUANTILES", "Metrics", "Summary", "of", "summarize"]

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

# Buckets whose scores travel to the host at a time: 16 MiB of them.
_CHUNK_BUCKETS = 16384


class Metrics(NamedTuple):
    """What became of the distinct keys of a step, and the state of the table; scalars.

    A pytree, to be returned from a train step. Of a step that looks a table up several times (from
    several layers, or in micro-batches) every lookup has its distinct keys, and the counts are
    summed: a new key that two of them hold is inserted once and hit once. `overflow` counts keys
    that found no room in a buffer of static size, `skipped` the stale rows that the optimizer has
    ever left out, since the table was made. Over several devices all numbers are those of all of
    them.
    """

    hits: Int32[Array, ""]
    inserted: Int32[Array, ""]
    evicted: Int32[Array, ""]
    refused: Int32[Array, ""]
    not_admitted: Int32[Array, ""]
    unique: Int32[Array, ""]
    overflow: Int32[Array, ""]
    load_factor: Float[Array, ""]
    skipped: UInt32[Array, ""]


Result = InsertResult | WriteResult | ShardedResult | ShardedWrite


def of(
    table: Table,
    result: Result | Sequence[Result],
    overflow: Any = None,
) -> Metrics:
    """The metrics of a step, inside ``jit`` too, and inside ``shard_map`` and ``pmap``.

    Call it last: it reads the occupancy of the table, which a later write would have to copy.

    Args:
      table: after the step.
      result: of the step's operation; or of several, whose counts are summed (a key that two of
        them saw counts twice).
      overflow: keys that were left out for want of room, a scalar; None: those of the results.

    Raises:
      TypeError: if `result` holds no counts, or if `overflow` is none.

    Example:
      >>> import jax_hkv as hkv
      >>> table, result = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 5, 6], np.int32))
      >>> metrics = of(table, result)
      >>> int(metrics.unique), int(metrics.inserted), float(metrics.load_factor)
      (2, 2, 0.015625)
    """
    check_live("metrics.of", table)
    is_one = is_one_result(result)
    results: list[Any] = [result] if is_one else list(result)  # pyright: ignore[reportArgumentType]
    for each in results:
        if not isinstance(getattr(each, "counts", None), Counts):
            raise TypeError(
                "metrics.of: result must be what find_or_insert or a write returned (or a sequence "
                f"of such), got {type(each).__name__}"
            )
    totals = no_counts()
    for each in results:  # a scan may have stacked them
        totals = jax.tree.map(jnp.add, totals, _totals_of(each.counts))
    if overflow is None:
        overflows = [getattr(each, "overflow", None) for each in results]
        overflow = sum(total_of(own) for own in overflows if own is not None)
    full = load_factor(table)
    skipped = table.optimizer.skipped if table.optimizer else jnp.zeros((table.copies,), jnp.uint32)
    exchanges = [each.exchange for each in results if getattr(each, "exchange", None)]
    skipped = jnp.sum(skipped.reshape(table.copies, -1), axis=1, dtype=jnp.uint32).max()
    if exchanges and is_inside(exchanges[0].axes):  # the table is a part; outside it is whole
        full = over(exchanges[0].axes, jax.lax.pmean, full)
        skipped = exchanges[0].of_all(skipped)
    return Metrics(
        **totals._asdict(),
        overflow=jnp.asarray(as_counts("metrics.of", "overflow", overflow), jnp.int32),
        load_factor=full,
        skipped=skipped,
    )


def _totals_of(counts: Any) -> Any:
    """The sums of a tree of stacked counts in few kernels.

    One by one each would be a kernel of its own, and cut out of one array of sums a copy; sums of
    two numbers XLA makes together.
    """
    leaves, structure = jax.tree.flatten(counts)
    if not leaves or leaves[0].ndim == 0:
        return counts
    rows = jnp.stack([leaf.reshape(-1) for leaf in leaves])
    others = jnp.sum(rows[:, 1:], axis=1, dtype=jnp.int32)
    return structure.unflatten([*map(jnp.add, rows[:, 0], others)])


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """What a table holds, on the host. Made by :func:`summarize`; ``str`` of it is a short text.

    Attributes:
      name: of the table.
      capacity: slots.
      dim: elements of a row.
      dtype: of the rows, by name.
      policy: by name.
      choices: candidate buckets of a key.
      size: entries.
      load_factor: entries by slots.
      occupancy_histogram: ``int64[129]``, how many buckets hold 0 to 128 entries.
      score_quantiles: of the entries: 0, 0.25, 0.5, 0.75 and 1, each the score of an entry (the
        lower one of two); empty where there are none.
      nbytes: of the "index", the "values", the "optimizer", the "admission", and in "total".
      epoch: of the table.
      clock: the logical time: mutating calls so far, of the table that entries came from, too.
      epoch_quantiles: of the entries' own epochs, under EPOCH_LRU and EPOCH_LFU, whose scores put
        it before the rest (``epoch * 2**32 + rest``); else empty.
      count_quantiles: of the entries' counts, under LFU and EPOCH_LFU; else empty.
      admits_unseen: of a table with :func:`jax_hkv.admission.frequency`, the share of keys never
        seen before that it would let in at their first sighting, since others fill its sketch: call
        :func:`jax_hkv.halve_sightings` before that is much; else None.
    """

    name: str
    capacity: int
    dim: int
    dtype: str
    policy: str
    choices: int
    size: int
    load_factor: float
    occupancy_histogram: np.ndarray
    score_quantiles: dict[float, int]
    nbytes: dict[str, int]
    epoch: int
    clock: int
    epoch_quantiles: dict[float, int]
    count_quantiles: dict[float, int]
    admits_unseen: float | None

    def __str__(self) -> str:
        full, unseen = int(self.occupancy_histogram[LANES]), self.admits_unseen
        lines = {
            "table": f"{self.name}, {self.dtype}[{self.capacity:,}, {self.dim}]",
            "policy": f"{self.policy}, {self.choices} candidate bucket(s)",
            "entries": f"{self.size:,} (load factor {self.load_factor:.3f})",
            "full buckets": f"{full:,} of {int(self.occupancy_histogram.sum()):,}",
            "clock, epoch": f"{self.clock:,}, {self.epoch:,}",
            **({} if unseen is None else {"admits unseen": f"{unseen:.4f}"}),
            **_shown("epoch", self.epoch_quantiles),
            **_shown("count", self.count_quantiles),
            **_shown("score", {} if self.epoch_quantiles else self.score_quantiles),
            **{f"{part} bytes": f"{size:,}" for part, size in self.nbytes.items()},
        }
        return "\n".join(f"{name:<17}{text}" for name, text in lines.items())


def summarize(table: Table) -> Summary:
    """What a table holds. For use between steps; rows stay on the device.

    Scores come to the host in chunks; 8 bytes an entry are needed there.

    Args:
      table: of one device, to read; with known values, so not inside ``jit``.

    Raises:
      TypeError, RuntimeError: if it is none, or spread over devices, or is used up.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(256, 4), np.array([5, 6], np.int32))
      >>> print(summarize(table))
      table            table, float32[256, 4]
      policy           LRU, 1 candidate bucket(s)
      entries          2 (load factor 0.008)
      full buckets     0 of 2
      clock, epoch     1, 0
      score, 0%        1
      score, 25%       1
      score, 50%       1
      score, 75%       1
      score, 100%      1
      index bytes      4,404
      values bytes     4,096
      optimizer bytes  0
      admission bytes  0
      total bytes      8,500
    """
    if isinstance(table, Table) and table.clock.ndim == 1 and table.clock.shape != (2,):
        raise TypeError(
            "metrics.summarize: table must be that of one device, whose clock is uint32[2], got "
            f"clocks uint32{list(table.clock.shape)} of a table over several devices: give its "
            "parts, [summarize(part) for part in placement.shards(table)]"
        )
    check_one_device("metrics.summarize", table)
    check_known("metrics.summarize", table.occupancy)
    occupancy = np.asarray(table.occupancy)
    size = int(occupancy.sum(dtype=np.int64))
    scores = np.concatenate(list(_scores(table)))
    quantiles = _quantiles(scores)
    epochs = {q: score >> 32 for q, score in quantiles.items()}  # scores are in their order
    counts = quantiles if table.policy is Policy.LFU else {}
    if table.policy is Policy.EPOCH_LFU:
        counts = _quantiles(scores & np.uint64(2**32 - 1))
    return Summary(
        name=table.name,
        capacity=table.capacity,
        dim=table.dim,
        dtype=table.dtype.name,
        policy=table.policy.name,
        choices=table.choices,
        size=size,
        load_factor=size / table.capacity,
        occupancy_histogram=np.bincount(occupancy, minlength=LANES + 1),
        score_quantiles=quantiles,
        nbytes=_bytes(table),
        epoch=int(table.epoch[0]),
        clock=int(Keys(table.clock).to_numpy()),
        epoch_quantiles=epochs if table.policy.has_epochs else {},
        count_quantiles=counts,
        admits_unseen=_admits_unseen(table),
    )


def _admits_unseen(table: Table) -> float | None:
    """The share of all cells' combinations that lack one sighting or none."""
    own = table.admission
    if own is None or own.counters is None:
        return None
    assert isinstance(own.rule, Frequency)
    enough = own.sightings() >= np.uint32(own.rule.sightings - 1)
    return float(np.prod(np.asarray(jnp.mean(enough, axis=1), np.float64)))


def _shown(name: str, quantiles: dict[float, int]) -> dict[str, str]:
    return {f"{name}, {q:.0%}": f"{number:,}" for q, number in quantiles.items()}


def _scores(table: Table) -> Iterator[np.ndarray]:
    """The scores of the entries, by chunks of buckets."""
    for start in range(0, table.occupancy.shape[0], _CHUNK_BUCKETS):
        part = slice(start, start + _CHUNK_BUCKETS)
        is_occupied = np.asarray(table.digests[part]) != 0
        yield Keys(np.asarray(table.scores[part])[is_occupied]).to_numpy()


def _quantiles(scores: np.ndarray) -> dict[float, int]:
    if scores.size == 0:
        return {}
    ranks = [int(quantile * (scores.size - 1)) for quantile in QUANTILES]
    scores.partition(ranks)
    return {q: int(scores[rank]) for q, rank in zip(QUANTILES, ranks, strict=True)}


def _bytes(table: Table) -> dict[str, int]:
    parts = {name: getattr(table, name) for name in ("index", "values", "optimizer", "admission")}
    sizes = {
        name: sum(int(leaf.nbytes) for leaf in jax.tree.leaves(part))
        for name, part in parts.items()
    }
    return {**sizes, "total": sum(sizes.values())}
