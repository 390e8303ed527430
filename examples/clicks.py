"""A click log that is made up on the spot, in the shape of Criteo's, with a known truth.

Every row can be computed from (seed, row number) alone, so any part of the log streams without
the rest, and no batch size changes it. A column holds one id, or several (its hotness). The planted
model is

    logit = bias + the effects of the 26 columns + a weighted sum of the 13 integers' logarithms

where the effect of a column is the sum of its ids', divided by the square root of its hotness.

and its own logits give the best AUC that any model can reach, which says how good a trained one is.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from criteo import CATEGORIES, INTEGERS, Batch, pack_keys
from metrics import auc
from numpy.random import Generator, Philox

DRAWS_PER_COUNTER = 4  # what Philox makes for one value of its counter
# The numbers below were tuned together, on 600,000 rows: they hold some 300,000 distinct keys, most
# of them seen only once or twice, as in a real click log.
VOCABULARIES = np.geomspace(4, 200_000, CATEGORIES).astype(np.int64)
ONE_HOT = (1,) * CATEGORIES
ID_EXPONENT, ID_SHIFT = 1.2, 20.0  # rank r is drawn in proportion to (r + shift)^-exponent
RECURRING_RANK = 300.0  # rarer ids cannot be learnt, so the truth gives them less and less to say
EFFECT = 0.35  # standard deviation over the most frequent ids
INTEGER_WEIGHT = 0.05  # standard deviation; small, so that the ids decide
BIAS = -1.2  # about one row in four is a click, as in Criteo's Kaggle log
MISSING_INTEGER, MISSING_CATEGORY = 0.2, 0.05
INTEGER_EXPONENTS = np.linspace(0.3, 1.5, INTEGERS)  # integers from nearly constant to heavy-tailed
MAX_INTEGER = 1e6
HEX_SPREAD = 0x9E3779B1  # odd, so rank * spread is a bijection of 32 bits: ranks look like hashes
TRUTH_ROWS = 8192  # at a time, when the best AUC is computed


class ClickLog:
    """A click log of `rows` rows: `batches` and `rows` are as `criteo.CriteoFile` has them."""

    def __init__(
        self,
        seed: int,
        rows: int,
        vocabularies: Sequence[int] | np.ndarray = VOCABULARIES,
        hotness: Sequence[int] = ONE_HOT,
    ) -> None:
        self.rows = rows
        self._seed = seed
        self._columns = np.repeat(np.arange(CATEGORIES), hotness)  # of the ids of a row
        sizes = np.asarray(vocabularies, np.int64)
        self._sizes = sizes[self._columns]
        self._first_of_column = (np.cumsum(sizes) - sizes)[self._columns]
        draw = np.random.default_rng(seed)
        fade = np.concatenate(
            [
                hot**-0.5 / (1 + np.arange(size) / RECURRING_RANK)
                for size, hot in zip(sizes, hotness, strict=True)
            ]
        )
        self._effects = EFFECT * fade * draw.standard_normal(fade.size)
        self._weights = INTEGER_WEIGHT * draw.standard_normal(INTEGERS)

    def batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        """Yields the rows from `start` to `stop` in batches of `size`, the last one smaller."""
        for first in range(start, stop, size):
            yield self._rows(first, min(size, stop - first))[0]

    def best_auc(self, start: int, stop: int) -> float | None:
        """Returns the AUC of the planted logits for the rows from `start` to `stop`."""
        labels, truth = [], []
        for first in range(start, stop, TRUTH_ROWS):
            batch, logits = self._rows(first, min(TRUTH_ROWS, stop - first))
            labels.append(batch.labels)
            truth.append(logits)
        return auc(np.concatenate(labels), np.concatenate(truth))

    def _rows(self, first: int, count: int) -> tuple[Batch, np.ndarray]:
        """Returns `count` rows from row `first` on, and their planted logits."""
        draws = INTEGERS + len(self._columns) + 1  # of a row: its integers, its ids, its label
        counters = -(-draws // DRAWS_PER_COUNTER)
        counter = Philox(key=self._seed)
        counter.advance(first * counters)
        uniform = Generator(counter).random((count, counters * DRAWS_PER_COUNTER))[:, :draws]
        integers = _integers(uniform[:, :INTEGERS])
        ranks = _ranks(uniform[:, INTEGERS:-1], self._sizes)
        logits = self._logits(integers, ranks)
        labels = (uniform[:, -1] * (1 + np.exp(-logits)) < 1).astype(np.float32)
        values = np.where(ranks < 0, -1, (ranks + 1) * HEX_SPREAD % 2**32)
        return Batch(labels, integers, pack_keys(values, self._columns)), logits

    def _logits(self, integers: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        places = np.maximum(ranks, 0) + self._first_of_column
        effects = np.where(ranks < 0, 0.0, self._effects[places])
        log_counts = np.nan_to_num(np.log1p(integers))
        return BIAS + effects.sum(axis=1) + log_counts @ self._weights


def _integers(uniform: np.ndarray) -> np.ndarray:
    """Returns heavy-tailed counts, float32[n, 13], NaN where missing."""
    present = (uniform - MISSING_INTEGER) / (1 - MISSING_INTEGER)
    tail = np.maximum(1 - present, 1e-12) ** -INTEGER_EXPONENTS
    counts = np.floor(np.minimum(tail, MAX_INTEGER)) - 1
    return np.where(present < 0, np.nan, counts).astype(np.float32)


def _ranks(uniform: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns power-law ids by rank, int64[n, k], -1 where missing: the inverse distribution."""
    present = (uniform - MISSING_CATEGORY) / (1 - MISSING_CATEGORY)
    head = ID_SHIFT ** (1 - ID_EXPONENT)
    tail = (ID_SHIFT + sizes) ** (1 - ID_EXPONENT)
    position = (head - np.maximum(present, 0) * (head - tail)) ** (1 / (1 - ID_EXPONENT))
    ranks = np.minimum((position - ID_SHIFT).astype(np.int64), sizes - 1)
    return np.where(present < 0, -1, ranks)
