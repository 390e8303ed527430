"""What ids come as that is no integers, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_OF_FLOATS = (
    "hash or cast them before they become floats, which round ids above 2**53. A column with "
    "missing values comes as floats, or with None in it: fill those (fill_null(0), or fillna(0) of "
    "an Int64 column) before NumPy makes an array of it, and give valid=, False where they were"
)
_OF_TEXTS = (
    "hash them to 64 bits by a function that is the same in every process (of hashlib, or xxhash; "
    "not Python's hash, which is salted anew in each of them)"
)
_TEXTS = str, bytes
_OF_OTHERS = "hash or cast them to int64 or uint64 first"


def remedy_of(array: Any, values: Iterable[Any] | None = None) -> str:
    """What to do about an array, of which `values` are the elements where it holds objects."""
    kind = getattr(array.dtype, "kind", "")
    objects = array.flat if values is None and kind == "O" else values
    own = [] if objects is None else [*objects]
    # Texts before what is missing among them.
    if kind in "UST" or any(isinstance(value, _TEXTS) for value in own):
        return _OF_TEXTS
    if kind == "f" or any(map(_is_missing, own)):
        return _OF_FLOATS
    return _OF_OTHERS


def remedy_of_value(value: Any) -> str:
    """What to do about one id."""
    return remedy_of(np.empty(0, object), [value])


def _is_missing(value: Any) -> bool:
    """Whether it stands for a missing value, or is a float, as those beside one become."""
    is_float = isinstance(value, (float, np.floating))
    return value is None or is_float or type(value).__name__ in ("NAType", "NaTType")
