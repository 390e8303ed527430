"""Slots to rows: arrays whose leading axis is the slot, read and written natively.

Each function takes the clock leaf and returns it, for the order of operations (see index.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Num, UInt32

from jax_hkv import _ffi
from jax_hkv._keys import Keys
from jax_hkv.initializers import Initializer

Clock = UInt32[Array, "2"]
Mask = Bool[Array, " n"] | None  # None: everything counts


def attributes(initializer: Initializer, seed: int) -> dict[str, int | float]:
    """An initializer as native operations take it."""
    return {
        "init_kind": initializer.kind,
        "init_a": initializer.a,
        "init_b": initializer.b,
        "seed": seed - 2**64 if seed >= 2**63 else seed,
    }


def flags(mask: Mask) -> Bool[Array, " flags"]:
    """A mask as native operations take it: for "all" nobody has to make one."""
    return jnp.zeros((0,), jnp.bool_) if mask is None else mask


def new(row: Num[Array, "1 ..."], slots: int) -> Num[Array, "S ..."]:
    """A new array of `slots` rows, all equal to the given one."""
    (values,) = _ffi.call("fill_rows", row, S=slots)
    return values


def gather(
    clock: Clock,
    values: Num[Array, "S ..."],
    slots: Int32[Array, " n"],
    *,
    fill: float = 0.0,
    initial: tuple[Initializer, int, Keys, Mask] | None = None,
    dtype: Any = None,
    name: str,
) -> tuple[Clock, Num[Array, "n ..."]]:
    """Rows by slot; where the slot is -1, the fill value or (where the mask says so) a first row.

    Args:
      clock: of the table.
      values: rows by slot.
      slots: of the rows wanted.
      fill: for positions without a slot; numbers that are not floating-point get zero.
      initial: initializer, seed, keys, and which positions without a slot take a first row.
      dtype: of the rows that come back, which are as ``rows.astype(dtype)``; None: of the values.
      name: of the table.
    """
    initializer, seed, keys, mask = initial or (Initializer(0), 0, None, None)
    clock, rows = _ffi.call(
        "gather_rows",
        clock,
        values,
        slots,
        jnp.zeros((0, 2), jnp.uint32) if keys is None else keys.words,
        flags(mask),
        table=name,
        dtype=values.dtype if dtype is None else dtype,
        fill=float(fill),
        **attributes(initializer, seed),
    )
    return clock, rows


def pool(
    clock: Clock,
    values: Float[Array, "S ..."],
    slots: Int32[Array, " n"],
    splits: Int32[Array, " b+1"],
    *,
    ends: Int32[Array, " b"] | None = None,
    weights: Float32[Array, " n"] | None = None,
    initial: tuple[Initializer, int, Keys, Mask] | None = None,
    dtype: Any = None,
    name: str,
) -> tuple[Clock, Float[Array, "b ..."]]:
    """The sum of the rows of each bag, positions ``splits[j]`` to ``ends[j] - 1``.

    The sum is that of docs/semantics.md, section 8; an empty one is zero.

    Args:
      clock: of the table.
      values: rows by slot.
      slots: of the rows of positions; those without a slot are left out, unless:
      splits: where bags begin and, of the last one, end.
      ends: where bags end; None: where the next one begins.
      weights: factors of the rows.
      initial: initializer, seed, keys, and which positions without a slot add a first row.
      dtype: of the sums, which are made in float32 and then rounded; None: float32.
      name: of the table.
    """
    initializer, seed, keys, mask = initial or (Initializer(0), 0, None, None)
    clock, pooled = _ffi.call(
        "pool_rows",
        clock,
        values,
        slots,
        splits,
        jnp.zeros((0,), jnp.int32) if ends is None else ends,
        jnp.zeros((0,), jnp.float32) if weights is None else weights,
        jnp.zeros((0, 2), jnp.uint32) if keys is None else keys.words,
        flags(mask),
        table=name,
        dtype=jnp.float32 if dtype is None else dtype,
        **attributes(initializer, seed),
    )
    return clock, pooled


def scatter(
    clock: Clock,
    values: Num[Array, "S ..."],
    slots: Int32[Array, " m"],
    sources: Int32[Array, " m"] | None,
    rows: Num[Array, "k ..."],
    *,
    name: str,
) -> tuple[Clock, Num[Array, "S ..."]]:
    """``values[slots[i]] = rows[sources[i]]`` for distinct slots, -1 passed over.

    Without sources the i-th row, or the only one, goes to ``slots[i]``.
    """
    sources = jnp.zeros((0,), jnp.int32) if sources is None else sources
    clock, values = _ffi.call("scatter_rows", clock, values, slots, sources, rows, table=name)
    return clock, values


def initialize(
    clock: Clock,
    values: Float[Array, "S ..."],
    slots: Int32[Array, " m"],
    keys: Keys,
    initializer: Initializer,
    seed: int,
    *,
    name: str,
) -> tuple[Clock, Float[Array, "S ..."]]:
    """``values[slots[i]]`` becomes the first row of ``keys[i]``."""
    clock, values = _ffi.call(
        "init_rows", clock, values, slots, keys.words, table=name, **attributes(initializer, seed)
    )
    return clock, values


def gather_or_init(
    clock: Clock,
    values: Float[Array, "S ..."],
    slots: Int32[Array, " n"],
    inverse: Int32[Array, " n"],
    first: Int32[Array, " n"],
    new_slots: Int32[Array, " n"],
    unique_keys: UInt32[Array, "n 2"],
    keys: Keys,
    mask: Mask,
    initializer: Initializer,
    seed: int,
    *,
    dtype: Any = None,
    name: str,
) -> tuple[Clock, Float[Array, "S ..."], Float[Array, "n ..."]]:
    """Rows by slot, of a batch whose new keys have none yet: they get their first rows.

    Args:
      clock: of the table.
      values: rows by slot.
      slots: of positions.
      inverse: of positions: which distinct key theirs is, or -1.
      first: of distinct keys: their first positions.
      new_slots: of distinct keys without a row yet, else -1.
      unique_keys: the distinct keys.
      keys: of positions.
      mask: of the positions without a slot, those that read a first row, and not zeros.
      initializer: of first rows.
      seed: likewise.
      dtype: of the rows that come back; None: of the values.
      name: of the table.
    """
    clock, values, rows = _ffi.call(
        "gather_or_init_rows",
        *(clock, values, slots, inverse, first, new_slots, unique_keys, keys.words, flags(mask)),
        table=name,
        dtype=values.dtype if dtype is None else dtype,
        **attributes(initializer, seed),
    )
    return clock, values, rows


def positions(count: int) -> Int32[Array, " count"]:
    """0 to count - 1: sources of rows that are already in order."""
    return jax.lax.iota(jnp.int32, count)
