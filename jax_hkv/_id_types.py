"""What ids come as that is no integers, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_OF_FLOATS = (
    "hash or cast them before they become floats, which round ids above 2**53. So they come of a "
    "list with ids on both sides of 2**63 (give the list itself), and of a column with missing "
    "values or None in it: fill those (fill_null(0), or fillna(0) of an Int64 or UInt64 "
    "column) before NumPy makes an array of it, and give valid=, False where they were"
)
_OF_TEXTS = (
    "hash them to 64 bits by a function that is the same in every process (of hashlib, or xxhash; "
    "not Python's hash, which is salted anew in each of them)"
)
_OF_NUMERALS = (
    "these are numbers that were read as text (of a column with ids from 2**63 on, say): read them "
    "as integers (UInt64), or give [int(text) for text in ids], so that an id is one key whichever "
    "way it comes"
)
_OF_OTHERS = "hash or cast them to int64 or uint64 first"


def remedy_of(array: Any, values: Iterable[Any] | None = None) -> str:
    """What to do about an array, of which `values` are the elements where it holds objects."""
    kind = getattr(array.dtype, "kind", "")
    if values is None and kind == "O" and isinstance(array, np.ndarray):
        values = array.flat
    own = [] if values is None else [*values]
    are_texts = kind in ("U", "S", "T")
    elements = own or (array.flat if are_texts else ())
    texts = [value for value in elements if isinstance(value, (str, bytes))]
    if are_texts or texts:  # before what is missing among them
        return _OF_NUMERALS if texts and all(map(_is_numeral, texts)) else _OF_TEXTS
    if "float" in str(array.dtype) or any(map(is_missing, own)):
        return _OF_FLOATS
    if own and all(type(value) is int or isinstance(value, np.integer) for value in own):
        return "give jax_hkv.Keys.from_numpy(ids)"
    return _OF_OTHERS


def remedy_of_value(value: Any) -> str:
    """What to do about one id."""
    return remedy_of(np.empty(0, object), [value])


def _is_numeral(text: str | bytes) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def is_missing(value: Any) -> bool:
    """Whether it stands for a missing value, or is a float, as those beside one become."""
    is_float = isinstance(value, (float, np.floating))
    is_null = getattr(value, "is_valid", True) is False  # of Arrow
    return value is None or is_float or is_null or type(value).__name__ in ("NAType", "NaTType")
