"""Parameters of tests whose axes are many: some combinations, in which nothing is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


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


def seldom(cases: Any, slow: Any) -> list[Any]:
    """Parameters of a test; what others stand for in the run of every day is marked as slow.

    Of several parameters each case is a tuple.
    """
    cases, rare = list(cases), list(slow)
    assert all(case in cases for case in rare)
    each = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[pytest.mark.slow] * (case in rare) for case in cases]
    return [pytest.param(*own, marks=mark) for own, mark in zip(each, marks, strict=True)]


def daily(choose: Callable[..., list[tuple[Any, ...]]], *axes: Iterable[Any]) -> list[Any]:
    """Every combination; in the run of every day those that `each` or `pairs` chooses."""
    cases = list(itertools.product(*axes))
    return seldom(cases, set(cases) - set(choose(*axes)))


def _pairs_of(combination: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    numbered = itertools.combinations(enumerate(combination), 2)
    return {(one, a, other, b) for (one, a), (other, b) in numbered}
