"""A digest of the bits of a pytree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jax_hkv._compat import gathered

_MIX = (0x7FEB352D, 0x846CA68B)  # Wellons: prospecting for hash functions, 2018


def digest(tree: Any) -> UInt32[Array, " 2"]:
    """A digest of the bits of all leaves: two sums of hashed words, in any order of addition.

    Args:
      tree: a table, or any pytree of arrays.

    Raises:
      TypeError: if a leaf is no array.

    Example:
      >>> digest({"a": jnp.arange(3)}).shape
      (2,)
    """
    total = jnp.zeros((2,), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"sharding.digest: tree must have arrays as leaves, got {type(leaf).__name__} "
                f"{leaf!r}: leave it out, or give it as an array"
            )
        words = _words(leaf)
        place = jnp.arange(words.shape[0], dtype=jnp.uint32) + jnp.uint32(
            number * 0x9E3779B9 % 2**32
        )
        first = _mixed(words ^ _mixed(place))
        second = _mixed(first + place)
        total = total + jnp.stack(
            [jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)]
        )
    return total


def digest_over(leaves: list[Any], split: list[tuple[str, ...]], axes: tuple[str, ...]) -> Any:
    """The digests of all devices along some axes: ``uint32[devices, 2]``; inside shard_map.

    Args:
      leaves: this device's.
      split: of each leaf the axes whose parts count as one, of which a table's has none.
      axes: of the mesh.
    """
    own = digest(
        [
            jax.lax.all_gather(digest([leaf]), names) if names else leaf
            for leaf, names in zip(leaves, split, strict=True)
        ]
    )
    for axis in reversed(axes):
        own = gathered(own, axis)
    return own.reshape(-1, 2)


def names_in(spec: Any) -> tuple[str, ...]:
    """The axes of a partition spec."""
    each = [names if isinstance(names, tuple) else (names,) for names in spec if names]
    return tuple(name for names in each for name in names)


def _words(leaf: Any) -> UInt32[Array, " n"]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        return jnp.concatenate([_words(leaf.real), _words(leaf.imag)])
    if not isinstance(leaf, jax.Array) and leaf.dtype.itemsize == 8:
        leaf = np.ascontiguousarray(leaf).view(np.uint32)  # of which JAX, with x64 off, drops half
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    kind = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, kind).reshape(-1).astype(jnp.uint32)


def _mixed(words: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
    for factor in _MIX:
        words = (words ^ (words >> 16)) * jnp.uint32(factor)
    return words ^ (words >> 16)
