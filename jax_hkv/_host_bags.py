"""What bags are made of on the host: ids as 64-bit words, and weights."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from jax_hkv import _ffi
from jax_hkv._compat import is_traced
from jax_hkv._id_types import is_missing, remedy_of, remedy_of_value
from jax_hkv._keys import Keys, as_integers, check_unmasked, form_of

_LOWEST_ID, _HIGHEST_ID = -(2**63), 2**64 - 1
_TRACED = (
    "call it there, or inside of jit make jax_hkv.Jagged(ids, row_splits), with row_splits = "
    "jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])"
)
_MASKED = (
    "leave out what it masks, and count lengths without it; or give array.filled(0), and to the "
    "lookup a valid= of all positions that is False there"
)
MASKED_LENGTHS = "give lengths.filled(0), and values without the ids of those bags"
_FEW = 8  # of so many ids a loop makes words sooner than NumPy makes an array


def check_on_host(what: str, array: Any) -> None:
    """Raises for what is traced, of which NumPy can make nothing."""
    if is_traced(array):
        raise TypeError(
            f"{what} must be on the host, got {form_of(array)} traced inside of jit: {_TRACED}"
        )


def as_numpy(what: str, given: Any, if_masked: str = _MASKED) -> np.ndarray:
    """An array on the host, of what is neither traced nor masked (of which: what to do)."""
    check_unmasked(what, given, if_masked)
    check_on_host(what, given)
    try:
        return np.asarray(given)
    except jax.errors.TracerArrayConversionError:
        check_on_host(what, next(filter(is_traced, jax.tree.leaves(given))))
        raise


def words_of_lists(
    call: str, lists: Any, weights: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Of a list of ids for each bag: words, one bag after the other, lengths, and weights."""
    try:
        lists = list(lists)
    except TypeError:
        raise TypeError(
            f"{call}: lists must be a list of ids for each bag, got {type(lists).__name__}: ids of "
            "one bag are [ids]"
        ) from None
    ids = _plain_words(lists)
    if ids is None:
        lists = [words_of(f"{call}: bag {number}", bag) for number, bag in enumerate(lists)]
        ids = np.concatenate([*lists, np.zeros(0, np.uint64)])
    lengths = [len(bag) for bag in lists]
    factors = None if weights is None else _weights_of(call, weights, lengths)
    return ids, np.array(lengths, np.int64), factors


def _plain_words(bags: list[Any]) -> np.ndarray | None:
    """Ids of all bags one after the other, of lists of ints or arrays of one type; None: others."""
    kinds = set(map(type, bags))
    if kinds == {list}:
        ids = [*itertools.chain.from_iterable(bags)]
        array = np.array(ids) if ids and set(map(type, ids)) == {int} else None
    elif kinds == {np.ndarray} and {(bag.ndim, bag.dtype) for bag in bags} == {(1, bags[0].dtype)}:
        array = np.concatenate(bags)
    else:
        return None
    # NumPy finds no integer type for ids of both ends of 64 bits.
    return array.astype(np.uint64) if array is not None and array.dtype.kind in "iu" else None


def words_of(what: str, ids: Any) -> np.ndarray:
    """Ids as 64-bit words; errors begin with what they are."""
    if isinstance(ids, Keys):
        raise TypeError(
            f"{what} must be a list or an array of integers, got Keys: give ids.to_numpy(), or "
            "Keys of all bags to Jagged.from_lengths(keys, lengths)"
        )
    if hasattr(ids, "__array__"):
        ids = as_numpy(what, ids)
        if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size):  # an empty list is float64
            return ids.astype(np.uint64)  # which extends the sign
        if ids.ndim == 1 and ids.dtype == object:
            return as_integers(ids, what).astype(np.uint64)
        raise TypeError(
            f"{what} must hold integers along one axis, got {ids.dtype}{list(ids.shape)}: "
            f"{'flatten it' if ids.dtype.kind in 'iu' else remedy_of(ids)}"
        )
    if is_missing(ids):
        raise TypeError(
            f"{what} must be a list or an array of integers, got {ids!r}: a missing bag is one "
            "without ids, [] (of Arrow's list arrays give from_lengths(array.flatten(), "
            "array.value_lengths().fill_null(0)))"
        )
    no_bags = (str, bytes, bytearray, memoryview, Mapping)  # whose values would be lost
    if isinstance(ids, no_bags) or not isinstance(ids, Collection):
        raise TypeError(
            f"{what} must be a list or an array of integers, got {type(ids).__name__} {ids!r}: a "
            "bag of one id is [id]; weights are a list of their own"
        )
    if len(ids) > _FEW and set(map(type, ids)) == {int}:
        array = np.array([*ids])
        if array.dtype.kind in "iu":  # NumPy finds none for those of both ends of 64 bits
            return array.astype(np.uint64)
    words = np.zeros(len(ids), np.uint64)
    for position, given in enumerate(ids):
        try:
            if isinstance(given, (bool, np.bool_)):  # of which NumPy 2.0 makes integers, too
                raise TypeError
            word = operator.index(given)
        except TypeError:
            remedy = _TRACED if is_traced(given) else remedy_of_value(given)
            raise TypeError(
                f"{what} must hold integers, got {type(given).__name__} {given!r}: {remedy}"
            ) from None
        if not _LOWEST_ID <= word <= _HIGHEST_ID:
            raise ValueError(
                f"{what} must hold integers of 64 bits, got {word}: hash its ids to 64 bits first"
            )
        words[position] = word & _HIGHEST_ID
    return words


def _weights_of(call: str, weights: Any, lengths: list[int]) -> np.ndarray:
    """Weights of bags of these lengths, one bag after the other."""
    try:
        weights = list(weights)  # an iterator has them once
        given = [len(bag) for bag in weights]
    except TypeError:
        raise TypeError(
            f"{call}: weights must be a list of numbers for each bag, got "
            f"{type(weights).__name__} {weights!r}: weights of one bag are [weights]"
        ) from None
    if given != lengths:
        where = next(
            (j for j, pair in enumerate(zip(given, lengths, strict=False)) if pair[0] != pair[1]),
            min(len(given), len(lengths)),
        )
        raise ValueError(
            f"{call}: weights must be one for each id, bag by bag; the first bag where "
            f"they are not is {where}: give {lengths[where : where + 1]} weights there, got "
            f"{given[where : where + 1]}"
        )
    factors = [flat(call, f"weights[{number}]", bag, "iuf") for number, bag in enumerate(weights)]
    return np.concatenate(factors or [np.zeros(0)])


def flat_ids(call: str, argument: str, given: Any) -> np.ndarray:
    """Integers along one axis, which are ids."""
    if getattr(given, "dtype", None) == np.dtype(object) and np.ndim(given) == 1:
        return as_integers(given, f"{call}: {argument}")
    return flat(call, argument, given, "iu", remedy=remedy_of)


def flat(
    call: str,
    argument: str,
    given: Any,
    kinds: str,
    if_masked: str = _MASKED,
    remedy: Callable[[np.ndarray], str] | None = None,
) -> np.ndarray:
    """Numbers along one axis, of the given kinds of NumPy; an empty list is of any kind."""
    array = as_numpy(f"{call}: {argument}", given, if_masked)
    is_kind = array.dtype.kind in kinds or ("f" in kinds and array.dtype in _ffi.FLOATS)
    if array.ndim == 1 and (is_kind or not np.size(given)):
        return array.astype(np.int64) if not array.size else array
    what = "numbers" if "f" in kinds else "integers"
    to_do = f"give an array whose dtype is one of {what}" if remedy is None else remedy(array)
    raise TypeError(
        f"{call}: {argument} must be {what} along one axis, got {array.dtype}{list(array.shape)}: "
        f"{'flatten them' if is_kind else to_do}"
    )
