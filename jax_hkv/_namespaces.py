"""The highest bits of a key, which tell the ids of several tables in one physical table apart."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_hkv._keys import Keys, keys_of

_WORD_BITS = 32
# Odd factors that spread the bits of a number over a word (Steele, Lea, Flood 2014; Murmur3).
_SPREAD_LOW, _SPREAD_HIGH = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Whose ids the keys of a physical table are, and how many bits say whose."""

    tables: tuple[str, ...]
    bits: int

    def __post_init__(self) -> None:
        # Of JSON; and names of NumPy or of an enumeration, which are strings, too.
        object.__setattr__(self, "tables", tuple(map(str.__str__, self.tables)))
        object.__setattr__(self, "bits", int(self.bits))

    def __str__(self) -> str:
        return "1 bit" if self.bits == 1 else f"{self.bits} bits"

    def begins_with(self, other: Namespace) -> bool:
        """Whether the keys of the other one mean the same here: tables may stand behind its."""
        return self.bits == other.bits and self.tables[: len(other.tables)] == other.tables


def keys_are(namespace: Namespace | None) -> str:
    """What keys are, for errors."""
    if namespace is None:
        return "keys that are ids"
    return f"keys of {list(namespace.tables)} told apart by {namespace}"


def as_array(namespace: Namespace | None) -> np.ndarray | None:
    """As checkpoints hold it: text in ``uint8``."""
    if namespace is None:
        return None
    return np.frombuffer(json.dumps([namespace.bits, *namespace.tables]).encode(), np.uint8)


def from_array(text: np.ndarray) -> Namespace:
    """What :func:`as_array` wrote."""
    bits, *tables = json.loads(np.asarray(text, np.uint8).tobytes())
    return Namespace(tuple(tables), bits)


def in_namespace(keys: Keys, number: int | np.ndarray, bits: int) -> Keys:
    """Keys with a table's number in their highest bits, which are folded into the others.

    Keys whose highest bits are zero keep the rest, so different ones stay different. Of keys of
    several tables the numbers have a shape that goes with the keys'.
    """
    if bits == 0:
        return keys
    above = keys.high >> np.uint32(_WORD_BITS - bits)
    high = (keys.high ^ (above * _SPREAD_HIGH)) & _below(bits)
    high = high | np.asarray(number << (_WORD_BITS - bits), np.uint32)
    return Keys(jnp.stack([keys.low ^ (above * _SPREAD_LOW), high], axis=-1))


def joined_in_namespaces(ids: Sequence[Any], numbers: Sequence[int], bits: int) -> Keys:
    """The ids of several tables as flat keys, one after the other, with the tables' numbers.

    Those of one form are numbered together: XLA makes a GPU's kernel of each of many small ones.

    Args:
      ids: as :func:`jax_hkv._keys.check_keys` let them pass, of any shapes.
      numbers: of their tables.
      bits: of keys that hold a number.
    """
    words = []
    pairs = zip([_flat(own) for own in ids], numbers, strict=True)
    for _, of_form in itertools.groupby(pairs, lambda pair: (pair[0].shape, pair[0].dtype)):
        own, own_numbers = zip(*of_form, strict=True)
        together = jnp.stack(own)
        keys = Keys(together) if together.ndim == 3 else keys_of(together)
        numbered = in_namespace(keys, np.array(own_numbers)[:, None], bits)
        words.append(numbered.words.reshape(-1, 2))
    return Keys(jnp.concatenate(words))


def _flat(ids: Any) -> Any:
    """Integers ``[n]``, or the words of keys ``[n, 2]``."""
    return ids.words.reshape(-1, 2) if isinstance(ids, Keys) else ids.reshape(-1)


def outside_namespace(keys: Keys, bits: int) -> Keys:
    """Keys without the number of a table: the ids that they stand for, where none was folded."""
    return Keys(jnp.stack([keys.low, keys.high & _below(bits)], axis=-1))


def _below(bits: int) -> np.uint32:
    """The bits of a key's high word that are left for ids."""
    return np.uint32(2 ** (_WORD_BITS - bits) - 1)


@dataclasses.dataclass(frozen=True)
class NumberOf:
    """The number of the table that a key is of; functions of equal bits are equal, for jit."""

    bits: int

    def __call__(self, keys: Keys) -> Int32[Array, "*shape"]:
        if self.bits == 0:
            return jnp.zeros(keys.shape, jnp.int32)
        return (keys.high >> np.uint32(_WORD_BITS - self.bits)).astype(jnp.int32)
