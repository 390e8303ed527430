"""Rows as they must be after a benchmark's steps, in double precision and without haste."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def sums_of(rows: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a batch, and the sum of each one's gradients."""
    touched, inverse = np.unique(rows, return_inverse=True)
    sums = np.zeros((len(touched), gradients.shape[1]))
    np.add.at(sums, inverse.reshape(-1), np.asarray(gradients, np.float64))
    return touched, sums


def sgd(
    start: np.ndarray, steps: Iterable[tuple[np.ndarray, np.ndarray]], rate: float
) -> np.ndarray:
    """Rows after steps of :func:`sums_of`."""
    rows = np.array(start, np.float64)
    for touched, sums in steps:
        rows[touched] -= rate * sums
    return rows


def adam(
    start: np.ndarray, steps: Iterable[tuple[np.ndarray, np.ndarray]], rate: float
) -> np.ndarray:
    """Rows after steps of lazy Adam, which leaves rows and moments alone that are not touched."""
    rows = np.array(start, np.float64)
    first, second = np.zeros_like(rows), np.zeros_like(rows)
    for number, (touched, sums) in enumerate(steps, 1):
        first[touched] = 0.9 * first[touched] + 0.1 * sums
        second[touched] = 0.999 * second[touched] + 0.001 * sums**2
        corrected = first[touched] / (1 - 0.9**number)
        root = np.sqrt(second[touched] / (1 - 0.999**number))
        rows[touched] -= rate * corrected / (root + 1e-8)
    return rows
