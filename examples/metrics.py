"""How well predicted clicks match the real ones: AUC and logloss, in NumPy."""

import numpy as np

BINS = 4096  # of predicted probability: an AUC from these bins is exact to about 1e-3


def auc(labels: np.ndarray, scores: np.ndarray) -> float | None:
    """Returns the chance that a click scores above a non-click, ties counting one half.

    Args:
        labels: 0 or 1, of shape [n].
        scores: any finite numbers that grow with the chance of a click, of shape [n].

    Returns:
        A number between 0 and 1, or None where the labels are all of one class.
    """
    _, place = np.unique(scores, return_inverse=True)
    return _auc_of_bins(
        np.bincount(place, weights=labels), np.bincount(place, weights=1.0 - labels)
    )


def logloss(labels: np.ndarray, logits: np.ndarray) -> float | None:
    """Returns the mean negative log likelihood in nats, or None without a single example."""
    if labels.size == 0:
        return None
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


class RunningAuc:
    """The AUC over everything that was predicted so far, in memory that does not grow."""

    def __init__(self) -> None:
        self._clicks = np.zeros(BINS)
        self._others = np.zeros(BINS)

    def add(self, labels: np.ndarray, logits: np.ndarray) -> None:
        """Counts predictions: labels 0 or 1 and logits, both of shape [n]."""
        place = (BINS / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))).astype(np.int64)
        place = np.minimum(place, BINS - 1)
        self._clicks += np.bincount(place, weights=labels, minlength=BINS)
        self._others += np.bincount(place, weights=1.0 - labels, minlength=BINS)

    def value(self) -> float | None:
        """Returns the AUC, or None as long as one class is missing."""
        return _auc_of_bins(self._clicks, self._others)


def _auc_of_bins(clicks: np.ndarray, others: np.ndarray) -> float | None:
    pairs = clicks.sum() * others.sum()
    if pairs == 0:
        return None
    others_below = np.cumsum(others) - others / 2
    return float(clicks @ others_below / pairs)
