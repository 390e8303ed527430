"""Entries drawn by chance: ids that a table has, as negatives, or to look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jax_hkv._checks import as_integer
from jax_hkv._keys import Keys
from jax_hkv.index import LANES, MAX_SLOTS
from jax_hkv.table import Table, check_one_device, jitted


class Sampled(NamedTuple):
    """Keys that were drawn.

    Attributes:
      keys: ``Keys[n]``; key 0 where none is.
      valid: ``bool[n]``, whether one is: give it to lookups as `valid`, or they take key 0.
    """

    keys: Keys
    valid: Bool[Array, " n"]


def sample(table: Table, key: Any, count: int) -> Sampled:
    """Entries by chance, all with the same probability: random negatives, say.

    Slots are drawn, with replacement, so that of a table with load factor 0.7 some 70 of 100 draws
    are `valid`. The table is only read, and in a jitted step not copied. Inside of a Placement's
    `step` and `run` each device draws from the part that it has; give each another key,
    ``jax.random.fold_in(key, jax.lax.axis_index(axis))``. Of a collection's fused table the keys
    are of any of its tables: `group.ids` says which are of one.

    Args:
      table: of one device, or a part.
      key: of ``jax.random``.
      count: how many to draw.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: of a used-up table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.full(100, 7, np.int32))
      >>> drawn = sample(table, jax.random.key(0), 1000)
      >>> set(drawn.keys.to_numpy()[np.asarray(drawn.valid)].tolist())
      {7}
    """
    check_one_device("sample", table)
    dtype = getattr(key, "dtype", None)
    shape = None
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        shape = ()
    elif dtype == jnp.uint32:  # of PRNGKey
        shape = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape
    if shape is None or key.shape != shape:
        raise TypeError(
            "sample: key must be one of jax.random, got "
            f"{type(key).__name__ if dtype is None else f'{dtype}{list(key.shape)}'}: give "
            "jax.random.key(seed), or one of jax.random.split"
        )
    return _sample(table, key, as_integer("sample", "count", count, 0, MAX_SLOTS))


@jitted("count")
def _sample(table: Table, key: jax.Array, count: int) -> Sampled:
    slots = jax.random.randint(key, (count,), 0, table.digests.shape[0] * LANES, jnp.int32)
    at = slots // LANES, slots % LANES
    valid = table.digests[at] != 0
    return Sampled(Keys(jnp.where(valid[:, None], table.keys[at], jnp.uint32(0))), valid)
