"""Who gets a row: rules that keep rare keys out of a table (docs/semantics.md, section 11).

Most ids of a click log are seen once; a row for each of them evicts rows that are needed. A table
made with one of these rules lets ``find_or_insert`` insert an absent key only when the rule admits
it; the others are turned away. Decisions are functions of (seed, key, table), in integers alone, so
all backends agree on them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jax_hkv import _trees
from jax_hkv._checks import as_integer, as_number
from jax_hkv._keys import Keys, as_bool
from jax_hkv._warnings import warn

__all__ = ["Admission", "Frequency", "Probability", "frequency", "probability"]

# The 32-bit finaliser of MurmurHash3 (Appleby: SMHasher, 2011), a bijection of the 32-bit words.
_FACTORS = 0x85EBCA6B, 0xC2B2AE35
# 2^32 divided by the golden ratio: keeps zero words from hashing to zero.
_GOLDEN = 0x9E3779B9

# What a hash begins with where it is no row of a sketch.
_DRAW = 2**32 - 1

_MOST_ROWS = 16  # an overestimate has a chance below e^-16 then
# Of a sketch that ages: 2^24 periods of 2^20 keys each are more than anybody counts.
_COUNT_BITS = 8
_MOST_COUNT = 2**_COUNT_BITS - 1
_MOST_PERIODS = 2 ** (32 - _COUNT_BITS) - 1

_MOST_SIGHTINGS = 2**31 - 1  # a counter and the occurrences of a batch stay below 2^32 together


@dataclasses.dataclass(frozen=True)
class Frequency:
    """Admits a key at its `sightings`-th sighting. Made by :func:`frequency`."""

    sightings: int
    width: int
    depth: int
    aging: bool = False

    def __str__(self) -> str:
        also = ", aging=True" if self.aging else ""
        return f"frequency({self.sightings}, width={self.width}, depth={self.depth}{also})"

    def start(self) -> Admission | None:
        """What a new table carries; None where everything is admitted."""
        if self.sightings == 1:
            return None
        counters = jnp.zeros((self.depth, self.width), jnp.uint32)
        return Admission(counters, jnp.zeros(2, jnp.uint32) if self.aging else None, self)


@dataclasses.dataclass(frozen=True)
class Probability:
    """Admits `threshold` of 2**32 draws. Made by :func:`probability`."""

    threshold: int

    def start(self) -> Admission | None:
        """What a new table carries; None where everything is admitted."""
        return None if self.threshold == 2**32 else Admission(None, None, self)


@_trees.register
@dataclasses.dataclass(frozen=True)
class Admission:
    """A rule, and what it remembers of the keys that a table has no row for.

    Attributes:
      counters: ``uint32[depth, width]``, the sketch of :func:`frequency`; else None. One that ages
        has counts in the low 8 bits, of the period that the others number.
      age: ``uint32[2]``, of a sketch that ages the period, and how many keys were counted in it;
        else None.
      rule: static.
    """

    counters: UInt32[Array, "depth width"] | None
    age: UInt32[Array, " 2"] | None
    rule: Frequency | Probability = _trees.static(told_by="counters")

    def decide(
        self,
        seed: int,
        clock: UInt32[Array, " 2"],
        keys: Keys,
        absent: Bool[Array, " n"],
        occurrences: Int32[Array, " n"],
    ) -> tuple[Admission, Bool[Array, " n"]]:
        """Counts the absent ones of distinct keys, and says which of them get a row.

        Args:
          seed: of the table.
          clock: of this batch.
          keys: distinct where they are absent.
          absent: which keys have no row; the others are not counted, and False in the result.
          occurrences: of each key in the batch, those that count as sightings.
        """
        words = [jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32)]
        if isinstance(self.rule, Probability):
            # The clock before the key: keys of equal hash at one time have others at the next.
            draws = _hash(jnp.uint32(_DRAW), *words, clock[0], clock[1], keys.low, keys.high)
            return self, absent & (draws < jnp.uint32(self.rule.threshold))
        rule = self.rule
        assert self.counters is not None
        rows = jnp.arange(rule.depth, dtype=jnp.uint32)[:, None]
        hashes = _hash(rows, *words, keys.low[None], keys.high[None])
        cells = (hashes % jnp.uint32(rule.width)).astype(jnp.int32)
        own = rows, jnp.where(absent[None], cells, rule.width)
        counted = self._counts(self.counters.at[own].get(mode="fill", fill_value=0))
        before = jnp.min(counted, axis=0)
        # It stops where it admits, so it never wraps.
        seen = jnp.minimum(before + occurrences.astype(jnp.uint32), jnp.uint32(rule.sightings))
        written, age = seen[None], self.age
        if age is not None:
            _warn_of_batch(rule, absent.shape[0])
            written = age[0] << _COUNT_BITS | jnp.maximum(counted, written)  # no period is later
            total = age[1] + jnp.sum(absent & (occurrences > 0), dtype=jnp.uint32)
            width = jnp.uint32(rule.width)
            age = jnp.stack([_later(age[0], total >= width), total % width])
        counters = self.counters.at[own].max(written, mode="drop")
        admitted = absent & (seen >= jnp.uint32(rule.sightings))
        return dataclasses.replace(self, counters=counters, age=age), admitted

    def _counts(self, words: Any) -> Any:
        """The sightings that words of the sketch stand for by now."""
        if self.age is None:
            return words
        halvings = self.age[0] - (words >> _COUNT_BITS)
        of_counts = np if isinstance(words, np.ndarray) else jnp
        return (words & _MOST_COUNT) >> of_counts.minimum(halvings, np.uint32(_COUNT_BITS))

    def sightings(self) -> Any:
        """``uint32[depth, width]``, the counts of the sketch; None where there is none.

        Raises:
          ValueError: if it is of a table over devices, whose parts have halved theirs at times of
            their own.
        """
        if self.age is not None and self.age.shape != (2,):
            raise ValueError(
                "Admission.sightings: age must be uint32[2], of one device, got "
                f"uint32{list(self.age.shape)}: ask the parts of the table, placement.shards(table)"
            )
        return None if self.counters is None else self._counts(self.counters)

    def with_sightings(self, counts: np.ndarray) -> Admission:
        """With counts of this width, on the host."""
        if self.age is not None:
            assert isinstance(self.rule, Frequency)
            counts = np.minimum(counts, np.uint32(self.rule.sightings))
            counts = np.asarray(self.age)[0] << np.uint32(_COUNT_BITS) | counts
        return dataclasses.replace(self, counters=counts)

    def halved(self) -> Admission:
        """With half of all counts, rounded down."""
        assert self.counters is not None
        if self.age is None:
            return dataclasses.replace(self, counters=self.counters >> 1)
        # Of whole tables over devices, too, where those of the parts stand side by side.
        is_period = np.arange(self.age.shape[-1]) % 2 == 0
        later = _later(self.age, jnp.bool_(True))
        return dataclasses.replace(self, age=jnp.where(is_period, later, self.age))


def _later(period: jax.Array, is_over: jax.Array) -> jax.Array:
    return jnp.minimum(period + is_over.astype(jnp.uint32), jnp.uint32(_MOST_PERIODS))


def _warn_of_batch(rule: Frequency, positions: int) -> None:
    if 2 * positions > rule.width:
        warn(
            f"admission.frequency: a sketch that ages halves its counts for every {rule.width} ids "
            f"without a row, and a batch may have {positions} of them: if most are distinct and "
            "new, hardly any is seen often enough between two halvings. Give a width= of many "
            "batches"
        )


def _hash(*words: jax.Array) -> jax.Array:
    return functools.reduce(_absorb, words, jnp.uint32(0))


def _absorb(state: jax.Array, word: jax.Array) -> jax.Array:
    state = (state ^ word) + jnp.uint32(_GOLDEN)
    state = (state ^ (state >> 16)) * jnp.uint32(_FACTORS[0])
    state = (state ^ (state >> 13)) * jnp.uint32(_FACTORS[1])
    return state ^ (state >> 16)


def frequency(
    sightings: int, *, width: int = 2**20, depth: int = 4, aging: bool = False
) -> Frequency:
    """A key gets a row at its `sightings`-th sighting.

    Sightings of keys without a row are counted by a count-min sketch (Cormode and Muthukrishnan: An
    improved data stream summary: the count-min sketch and its applications, 2005) with conservative
    update (Estan and Varghese: New directions in traffic measurement and accounting, 2002), in
    ``4 * width * depth`` bytes whatever the number of keys. It never counts too few, so a key that
    was seen often enough always gets in. Several occurrences in a batch are as many sightings (of a
    call with `admit=` those whose flag is True), and the batch of the last one needed admits the
    key.

    A sketch that only grows ends by admitting everything. After `width` sightings of as many keys
    in a sketch of four rows, 2 lets in 16 of 100 keys that were never seen, and 3 not one of
    100,000; after twice as many 56 and 1 of 100, after half as many 2.4 and none. With `aging` all
    counts are halved, rounding down, once for every `width` keys without a row, counted batch by
    batch, with those that get one in it, and without those that `admit=` leaves out (Einziger,
    Friedman and Manes: TinyLFU: a highly efficient cache admission policy, 2017): of those never
    seen 2 lets in some 5 of 100, for ever. What lies between two sightings costs them by chance: of
    keys that come again after `width / 8` others 89 of 100 get in at their second sighting by 2,
    and 77 at their third by 3, after `width / 2` others 54 and 6. Take a `width` that is many
    batches, and several times what comes between two sightings of a key that is to get in.
    :func:`jax_hkv.halve_sightings` halves by hand. :func:`jax_hkv.metrics.summarize` says which
    share of keys never seen it would let in now (`admits_unseen`).

    Args:
      sightings: 1 to 2**31 - 1, with `aging` to 255; with 1 the table is as without admission.
      width: counters of a row of the sketch; a power of two hashes fastest. Each part of a table
        over devices has a sketch of this width, of its own keys.
      depth: rows of the sketch, 1 to 16.
      aging: whether it halves its counts by itself: for a stream that does not end.

    Warns:
      UserWarning: if one batch has more positions than half of the `width` of a sketch that ages.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=2, admission=frequency(2, width=1024))
      >>> for _ in range(3):
      ...     table, result = hkv.find_or_insert(table, np.array([5], np.int32))
      ...     print(hkv.Status(int(result.status[0])).name)
      NOT_ADMITTED
      INSERTED
      FOUND
    """
    call = "admission.frequency"
    depth = as_integer(call, "depth", depth, 1, _MOST_ROWS)
    aging = as_bool(call, "aging", aging)
    return Frequency(
        as_integer(call, "sightings", sightings, 1, _MOST_COUNT if aging else _MOST_SIGHTINGS),
        as_integer(call, "width", width, 1, (2**31 - 1) // depth),
        depth,
        aging,
    )


def probability(p: float) -> Probability:
    """An absent key gets a row with probability `p` for each batch that it occurs in.

    It needs no memory: a key waits for ``1 / p`` batches on average, so frequent keys get in soon
    and most rare ones never do. The draw is a function of the seed, the key and the clock.

    Args:
      p: 2**-32 to 1, in steps of 2**-32; with 1 the table is as without admission.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> probability(0.25).threshold == 2**30
      True
    """
    p = as_number("admission.probability", "p", p)
    if not 2.0**-32 <= p <= 1.0:
        raise ValueError(
            f"admission.probability: p must be from 2**-32 to 1, got {p}; to insert nothing, look "
            "keys up with jax_hkv.find"
        )
    return Probability(round(p * 2**32))


def check_rule(call: str, rule: Any) -> None:
    """Raises unless `rule` is None or comes from this module."""
    if rule is not None and not isinstance(rule, (Frequency, Probability)):
        raise TypeError(
            f"{call}: admission must be None or come from jax_hkv.admission (frequency or "
            f"probability), got {type(rule).__name__}"
        )
    if isinstance(rule, Frequency) and rule.aging and rule.sightings > _MOST_COUNT:
        raise ValueError(
            f"{call}: admission must have sightings up to {_MOST_COUNT} with aging, got {rule}"
        )
