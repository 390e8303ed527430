"""Parameters of tests whose axes are many: some combinations, in which nothing is left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def each(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many combinations as the longest axis has values; every value of every axis is in one."""
    values = [list(axis) for axis in axes]
    return [tuple(own[turn % len(own)] for own in values) for turn in range(max(map(len, values)))]


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations in which any two values of different axes meet (pairwise testing).

    Of three axes or more, since those of two are their product. Each is the first of those that
    bring most new pairs.
    """
    given = [list(axis) for axis in axes]
    values = [range(len(axis)) for axis in given]
    left = {
        (one, a, other, b)
        for one, other in itertools.combinations(range(len(values)), 2)
        for a, b in itertools.product(values[one], values[other])
    }
    chosen = []
    while left:
        new = max(itertools.product(*values), key=lambda own: len(left & _pairs_of(own)))
        chosen.append(new)
        left -= _pairs_of(new)
    return [tuple(axis[i] for axis, i in zip(given, own, strict=True)) for own in chosen]


def _pairs_of(combination: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    numbered = itertools.combinations(enumerate(combination), 2)
    return {(one, a, other, b) for (one, a), (other, b) in numbered}
