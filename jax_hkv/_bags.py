"""Bags of ids as lookups work on them: those of one batch or of several, as one batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jax_hkv import index as _index
from jax_hkv._compat import is_fixed
from jax_hkv._keys import Keys
from jax_hkv.table import Bags


class Layout(NamedTuple):
    """The form of what a caller gave.

    Attributes:
      ids: their shape.
      batch: the shape of the batch of bags.
      is_weighted: whether there were weights, which may be differentiated.
    """

    ids: tuple[int, ...]
    batch: tuple[int, ...]
    is_weighted: bool

    @property
    def is_each_a_bag(self) -> bool:
        """Whether each id has a bag of its own, without a weight."""
        return self.ids == (*self.batch, 1) and not self.is_weighted

    @property
    def positions(self) -> int:
        """How many there are, with masked ones and padding."""
        return math.prod(self.ids)

    @property
    def bags(self) -> int:
        """How many there are."""
        return math.prod(self.batch)

    @property
    def hotness(self) -> int:
        """Positions of a bag, where all have as many."""
        return self.ids[-1]


class Given(NamedTuple):
    """Ids as a caller gave them, checked.

    Attributes:
      keys: Keys or integers, of the layout's shape, or without its last axis of one.
      valid: ``bool`` of the keys' shape; None: all.
      weights: flat; None: ones.
      splits: of bags of any length, whose ids are flat; None: all bags have as many ids.
    """

    keys: Any
    valid: Bool[Array, "*ids"] | None
    weights: Float32[Array, " n"] | None
    splits: Int32[Array, " batch+1"] | None


class Bagged(NamedTuple):
    """Ids in the form that lookups work on: flat, with the bag of each.

    Attributes:
      keys: ``[n]``.
      valid: ``bool[n]``; padding is not. None: all are.
      bags: who is in which bag, with the weights as they were given. None: each id has a bag of its
        own, without a weight, so that there is nothing to add up.
    """

    keys: Keys
    valid: Bool[Array, " n"] | None
    bags: Bags | None


def joined_bags(
    batches: Sequence[Given], layouts: Sequence[Layout]
) -> tuple[Bags, Bool[Array, " n"] | None]:
    """The bags of batches, one batch after the other, and which positions are valid (None: all)."""
    splits, ends = _places([batch.splits for batch in batches], layouts)
    valid = joined([batch.valid for batch in batches], layouts, jnp.bool_)
    weights = joined([batch.weights for batch in batches], layouts, jnp.float32)
    numbers = [number for number, batch in enumerate(batches) if batch.splits is not None]
    if not numbers:
        return Bags(_dense_sources(layouts), splits, weights), valid
    if len(numbers) == len(batches):
        sources, is_in_bag = _counted(splits, ends, layouts)
    else:
        sources, is_in_bag = _mixed(batches, layouts, numbers)
    valid = is_in_bag if valid is None else valid & is_in_bag
    return Bags(sources, splits, weights, ends), valid


def joined(
    given: Sequence[jax.Array | None], layouts: Sequence[Layout], dtype: Any
) -> Shaped[Array, " n"] | None:
    """Masks or weights, one batch's after the other's; ones of a batch without; None of none."""
    if all(own is None for own in given):
        return None
    return jnp.concatenate(
        [
            jnp.ones((layout.positions,), dtype) if own is None else own.reshape(-1)
            for own, layout in zip(given, layouts, strict=True)
        ]
    )


def counts_in(bags: Bags, flags: Bool[Array, "*stack n"]) -> Int32[Array, "*stack b"]:
    """How many positions of each bag have a flag, which no padding has; a scan may stack both."""
    if flags.ndim > 1:
        return jax.vmap(counts_in)(bags, flags)
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(flags, dtype=jnp.int32)])
    return jnp.diff(_index.take(before, bags.splits))


def _places(
    splits: Sequence[jax.Array | None], layouts: Sequence[Layout]
) -> tuple[Int32[Array, " b+1"], Int32[Array, " b"]]:
    """Where bags begin and, behind them, the number of positions; and where each bag ends."""
    begins, ends = [], []
    positions: Any = 0  # as all sizes here it may be symbolic
    for together, own_layouts in _runs(splits, layouts):
        counts = [layout.positions for layout in own_layouts]
        *firsts, positions = itertools.accumulate(counts, initial=positions)
        own = _dense_splits(own_layouts[0])[None] if together is None else together
        own = jnp.clip(own, 0, _column(counts)) + _column(firsts)  # traced ones are not checked
        begins.append(own[:, :-1].reshape(-1))
        ends.append(own[:, 1:].reshape(-1))
    return jnp.concatenate([*begins, _column([positions])[:, 0]]), jnp.concatenate(ends)


def _counted(
    splits: Int32[Array, " b+1"], ends: Int32[Array, " b"], layouts: Sequence[Layout]
) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """The bag of each position, and whether it is in it: of padding the bag is the next one."""
    positions = sum(layout.positions for layout in layouts)
    # The bag of a position is the number of ends at or before it, which integers count in any
    # order: no search. That of padding begins behind it.
    counted = jnp.zeros((positions,), jnp.int32).at[ends].add(1, mode="drop")
    sources = jnp.cumsum(counted, dtype=jnp.int32)
    return sources, _index.take(splits, sources) <= jax.lax.iota(jnp.int32, positions)


def _mixed(
    batches: Sequence[Given], layouts: Sequence[Layout], numbers: Sequence[int]
) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
    """As :func:`_counted`, where batches of these numbers alone have splits."""
    jagged = [layouts[number] for number in numbers]
    places = _places([batches[number].splits for number in numbers], jagged)
    sources, is_in_bag = _counted(*places, jagged)
    # The others, between which these stand in runs, need no sum.
    runs = [
        (is_dense, [layout for _, layout in run])
        for is_dense, run in itertools.groupby(
            zip(batches, layouts, strict=True), lambda pair: pair[0].splits is None
        )
    ]
    sizes = [sum(own.positions for own in run) for is_dense, run in runs if not is_dense]
    parts = zip(jax.lax.split(sources, sizes), jax.lax.split(is_in_bag, sizes), strict=True)
    parts_of_all, bags, dense_bags = [], 0, 0
    for is_dense, run in runs:
        if is_dense:
            of_bags = _dense_sources(run) + jnp.int32(bags)
            parts_of_all.append((of_bags, jnp.ones(of_bags.shape, jnp.bool_)))
            dense_bags += sum(layout.bags for layout in run)
        else:
            of_bags, in_bag = next(parts)
            parts_of_all.append((of_bags + jnp.int32(dense_bags), in_bag))
        bags += sum(layout.bags for layout in run)
    own_sources, are_in_bag = zip(*parts_of_all, strict=True)
    return jnp.concatenate(own_sources), jnp.concatenate(are_in_bag)


def _column(numbers: Sequence[Any]) -> Int32[Array, "k 1"]:
    """Sizes one below the other. Native calls refuse those that int32 does not count."""
    if is_fixed(tuple(numbers)):
        return jnp.asarray(np.array(numbers, np.int64).astype(np.int32)[:, None])
    return jnp.stack([jnp.int32(number) for number in numbers])[:, None]


def _dense_splits(layout: Layout) -> Int32[Array, " bags+1"]:
    return jax.lax.iota(jnp.int32, layout.bags + 1) * jnp.int32(layout.hotness)


def _dense_sources(layouts: Sequence[Layout]) -> Int32[Array, " n"]:
    sources, bags = [], 0
    for _, own in _runs([None] * len(layouts), layouts):
        numbers = jax.lax.iota(jnp.int32, len(own) * own[0].positions)
        sources.append(numbers // jnp.int32(max(own[0].hotness, 1)) + jnp.int32(bags))
        bags += len(own) * own[0].bags
    return jnp.concatenate(sources)


def _runs(
    splits: Sequence[jax.Array | None], layouts: Sequence[Layout]
) -> Iterator[tuple[Int32[Array, "k bags+1"] | None, list[Layout]]]:
    """Splits and layouts of batches that stand side by side, with as many bags each.

    Where there are no splits the bags have as many ids, too. XLA makes kernels of what is done with
    each of many batches: what is done with a run is done at once.
    """

    def form(pair: tuple[jax.Array | None, Layout]) -> tuple[int, int | None]:
        own, layout = pair
        return layout.bags, layout.hotness if own is None else None

    for _, run in itertools.groupby(zip(splits, layouts, strict=True), form):
        own, same = zip(*run, strict=True)
        yield None if own[0] is None else jnp.stack(own), list(same)
