"""Pictures of a table, with matplotlib (the extra ``plots``)."""

from __future__ import annotations

import math
import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_hkv import metrics
from jax_hkv.index import LANES
from jax_hkv.table import Table

__all__ = ["expected_occupancy", "summary"]

_DOTS_PER_INCH = 150
_BISECTIONS = 60  # halvings of [0, the rate of a full table]: the precision of a float64


def summary(table: metrics.Summary | Table, path: str | os.PathLike[str] | None = None) -> Figure:
    """How full the buckets are, the quantiles of the scores, and where the bytes are.

    The line over the bars is what one candidate bucket a key gives for as many entries: a Poisson
    distribution whose keys beyond 128 are evicted. It is missing where every bucket is full.

    Args:
      table: the table, or :func:`jax_hkv.metrics.summarize` of it.
      path: where the picture is saved as PNG; None: nowhere.

    Returns:
      A figure of three axes.

    Raises:
      TypeError: if `table` is neither.

    Example:
      >>> import jax_hkv as hkv
      >>> [axes.get_title() for axes in summary(hkv.create(128, dim=2)).axes]
      ['buckets by entries', 'scores by quantile', 'bytes']
    """
    if not isinstance(table, (metrics.Summary, Table)):
        raise TypeError(
            "plots.summary: table must be a jax_hkv Table or metrics.summarize of one, got "
            f"{type(table).__name__}"
        )
    values = metrics.summarize(table) if isinstance(table, Table) else table
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(
        f"{values.name}: {values.size:,} of {values.capacity:,} entries, {values.policy}"
    )
    occupancy, scores, sizes = figure.subplots(1, 3)
    _draw_occupancy(occupancy, values)
    _draw_scores(scores, values)
    _draw_bytes(sizes, values)
    if path is not None:
        figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
    return figure


def _draw_occupancy(axes: Axes, values: metrics.Summary) -> None:
    histogram = values.occupancy_histogram
    axes.bar(np.arange(LANES + 1), histogram, width=1.0, label=f"choices={values.choices}")
    expected = expected_occupancy(values.size, int(histogram.sum()))
    if expected is not None:
        axes.plot(np.arange(LANES + 1), expected, color="black", label="expected of choices=1")
    axes.set(title="buckets by entries", xlabel="entries of a bucket", ylabel="buckets")
    axes.legend()


def _draw_scores(axes: Axes, values: metrics.Summary) -> None:
    quantiles = values.score_quantiles
    axes.plot(list(quantiles), [float(score) for score in quantiles.values()], marker="o")
    for quantile, score in quantiles.items():
        axes.annotate(
            f"{score:,}",
            (quantile, float(score)),
            xytext=(0, 6),
            textcoords="offset points",
            horizontalalignment="center",
            fontsize="x-small",
        )
    axes.margins(x=0.15, y=0.1)
    axes.set(title="scores by quantile", xlabel="part of the entries", ylabel="score")


def _draw_bytes(axes: Axes, values: metrics.Summary) -> None:
    parts = {name: size for name, size in values.nbytes.items() if name != "total"}
    bars = axes.barh(list(parts), list(parts.values()))
    axes.bar_label(bars, [f"{size:,}" for size in parts.values()], padding=3)
    axes.margins(x=0.3)
    axes.set(title="bytes", xlabel=f"{values.nbytes['total']:,} in all")


def expected_occupancy(size: int, buckets: int) -> np.ndarray | None:
    """How many buckets hold 0 to 128 entries when keys fall on them at random.

    Args:
      size: entries that are kept, of at least as many keys.
      buckets: of the table.

    Returns:
      ``float64[129]``, or None where all buckets are full and the number of keys cannot be told.
    """
    if size >= buckets * LANES:
        return None
    low, high = 0.0, 2.0 * LANES  # at twice the lanes no bucket of a real table has room left
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        kept = float(_truncated_poisson(rate) @ np.arange(LANES + 1))
        low, high = (rate, high) if kept * buckets < size else (low, rate)
    return buckets * _truncated_poisson((low + high) / 2)


def _truncated_poisson(rate: float) -> np.ndarray:
    """The chances of 0 to 128 entries in a bucket that `rate` keys fall on, 128 and more as one."""
    counts = np.arange(LANES)
    factorials = np.array([math.lgamma(count + 1.0) for count in counts])
    chances = np.exp(counts * math.log(rate) - rate - factorials)
    return np.append(chances, max(0.0, 1.0 - chances.sum()))
