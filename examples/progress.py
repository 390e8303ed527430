"""What is shown of a training: a progress bar while it runs, and its curves as a picture."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
from criteo import Batch, UserError
from learners import Outcome
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from metrics import RunningAuc
from tqdm import tqdm

CURVES: tuple[str, ...] = ("loss", "AUC so far", "hit rate", "load factor")


class Progress:
    """The sums and curves of a training.

    Attributes:
        examples: rows trained on, every epoch's.
        skipped: bad rows passed over, every epoch's.
        steps: of training.
        counts: `hkv.Counts` by name, summed over the batches.
        size: keys in the embedding now.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.examples = self.skipped = self.steps = self.size = 0
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        self._auc = RunningAuc()
        self._positions: list[int] = []
        self._curves: list[list[float]] = [[] for _ in CURVES]
        self._bar = tqdm(total=rows, unit="row", unit_scale=True, dynamic_ncols=True)

    def add(self, batch: Batch, outcome: Outcome) -> None:
        """Counts one step.

        Raises:
            UserError: if the loss is no finite number any more.
        """
        rows = len(batch.labels)
        self.skipped += batch.skipped
        self._bar.update(rows + batch.skipped)
        if rows == 0:
            return
        self.examples += rows
        self.steps += 1
        loss = float(outcome.loss)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at example {self.examples}: try a smaller --lr")
        counts = {name: int(count) for name, count in outcome.counts._asdict().items()}
        self.counts.update(counts)
        self.size = int(outcome.size)
        self._auc.add(batch.labels, np.asarray(outcome.logits)[:rows])
        self._draw(loss, counts["hits"] / counts["unique"])

    def close(self) -> None:
        """Ends the bar's line."""
        self._bar.close()

    def save(self, path: Path) -> None:
        """Writes the curves to a PNG file."""
        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, name, curve in zip(
            figure.subplots(2, 2, sharex=True).flat, CURVES, self._curves, strict=True
        ):
            axes.plot(self._positions, curve)
            axes.set(title=name, xlabel="examples")
            axes.xaxis.set_major_formatter(EngFormatter())
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)

    def _draw(self, loss: float, hit_rate: float) -> None:
        area = self._auc.value()
        values = (loss, math.nan if area is None else area, hit_rate, self.size / self._capacity)
        self._positions.append(self.examples)
        for curve, value in zip(self._curves, values, strict=True):
            curve.append(value)
        shown = dict(zip(CURVES, (f"{value:.3f}" for value in values), strict=True))
        self._bar.set_postfix(shown, refresh=False)
