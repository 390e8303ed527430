"""Sums of bags of rows (docs/semantics.md, section 8): the part of the oracle about pooling."""

from __future__ import annotations

import numpy as np
from oracle import same_nan, tree_sum

Array = np.ndarray


def pool(rows: Array, splits: Array, valid: Array, weights: Array | None = None) -> Array:
    """The sum of each bag's valid rows, float32[batch, dim]; bits are those of the tree (8)."""
    sums = np.zeros((len(splits) - 1, rows.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for bag, (begin, end) in enumerate(zip(splits[:-1], splits[1:], strict=True)):
            positions = np.flatnonzero(valid[begin:end]) + begin
            if len(positions) == 0:
                continue
            terms = rows[positions].astype(np.float32)
            if weights is not None:
                terms = weights[positions, None] * terms
            total = tree_sum(terms)
            sums[bag] = total if weights is None and len(terms) == 1 else same_nan(total)
    return sums


def combine(
    rows: Array, splits: Array, valid: Array, weights: Array | None, combiner: str
) -> Array:
    """What a combiner means, in float64; a bag whose divisor is 0 gets zeros."""
    factors = np.where(valid, 1.0 if weights is None else weights.astype(np.float64), 0.0)
    combined = np.zeros((len(splits) - 1, rows.shape[1]))
    for bag, (begin, end) in enumerate(zip(splits[:-1], splits[1:], strict=True)):
        own = factors[begin:end]
        divisor = {"sum": 1.0, "mean": own.sum(), "sqrtn": np.sqrt((own**2).sum())}[combiner]
        if divisor != 0:
            terms = np.where(valid[begin:end, None], rows[begin:end].astype(np.float64), 0.0)
            combined[bag] = own @ terms / divisor
    return combined


def quotients(splits: Array, valid: Array, weights: Array | None, combiner: str) -> Array:
    """Each position's weight over its bag's divisor, float32; bits are those of section 8."""
    given = np.where(valid, np.float32(1) if weights is None else weights, np.float32(0))
    divided = np.zeros(len(valid), np.float32)
    for begin, end in zip(splits[:-1], splits[1:], strict=True):
        own = np.arange(begin, end)[valid[begin:end]]
        if len(own) == 0:
            continue
        terms = given[own] if combiner == "mean" else given[own] * given[own]
        divisor = np.float32(len(own)) if weights is None else tree_sum(terms[:, None])[0]
        divisor = np.sqrt(divisor) if combiner == "sqrtn" else divisor
        with np.errstate(invalid="ignore"):
            divided[own] = 0 if divisor == 0 else same_nan(given[own] / divisor)
    return divided


def unique(keys: Array, valid: Array, size: int) -> tuple[Array, Array, Array, int, int]:
    """Keys by first occurrence, inverse, counts, how many are kept, and how many are not."""
    numbers: dict[int, int] = {}
    inverse = np.full(len(keys), -1)
    counts = [0] * size
    for position in np.flatnonzero(valid):
        number = numbers.setdefault(int(keys[position]), len(numbers))
        if number < size:
            inverse[position] = number
            counts[number] += 1
    kept = [*numbers][:size]
    padded = np.array(kept + [0] * (size - len(kept)), np.uint64)
    return padded, inverse, np.array(counts, np.int32), len(kept), len(numbers) - len(kept)
