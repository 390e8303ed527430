"""Training on the first part of a click log, and evaluation on its last."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from clicks import ClickLog
from criteo import Batch, CriteoFile, UserError
from dlrm import Inputs
from learners import Learner
from metrics import auc, logloss
from progress import Progress


class Predictions(NamedTuple):
    """What a model says of rows it was not trained on.

    Attributes:
        labels: float32[n], 1 for a click.
        logits: float32[n].
        skipped: bad rows that were passed over.
    """

    labels: np.ndarray
    logits: np.ndarray
    skipped: int


def split_of(args: Namespace, log: ClickLog | CriteoFile) -> tuple[int, int]:
    """Returns where the part of a log begins that is evaluated on, and where it ends.

    Raises:
        UserError: if the log is too short.
    """
    rows = min(log.rows, args.rows or log.rows)
    split = rows - max(1, round(rows * args.eval_fraction))
    if split < 1:
        raise UserError(f"{rows} row is too little to train on some and evaluate on others")
    return split, rows


def train_and_evaluate(
    args: Namespace, learner: Learner, log: ClickLog | CriteoFile
) -> tuple[dict[str, object], Progress]:
    """Returns the figures of a run, and its curves.

    Raises:
        UserError: as the parts of it do.
    """
    split, rows = split_of(args, log)
    best_auc = log.best_auc(split, rows) if isinstance(log, ClickLog) else None
    if best_auc is not None:
        print(f"a built-in log of {rows:,} rows, where the best possible AUC is {best_auc:.4f}")
    start = time.perf_counter()
    state, progress = train(args, learner, log, split)
    seconds = time.perf_counter() - start
    seen = evaluate(args, learner, state, log.batches(split, rows, args.batch))
    figures = {
        "auc": auc(seen.labels, seen.logits),
        "best_auc": best_auc,
        "logloss": logloss(seen.labels, seen.logits),
        "hit_rate": progress.counts["hits"] / progress.counts["unique"],
        "size": progress.size,
        "capacity": learner.capacity,
        "evicted": progress.counts["evicted"],
        "refused": progress.counts["refused"],
        "unique_per_step": round(progress.counts["unique"] / progress.steps, 1),
        "examples": progress.examples,
        "eval_examples": len(seen.labels),
        "bad_rows": progress.skipped // args.epochs + seen.skipped,
        "examples_per_second": round(progress.examples / seconds, 1),
        "seed": args.seed,
    }
    return figures, progress


def train(
    args: Namespace, learner: Learner, log: ClickLog | CriteoFile, split: int
) -> tuple[Any, Progress]:
    """Trains on the rows before `split`, `args.epochs` times.

    Raises:
        UserError: if a row is bad, if none is good, or if the loss is no finite number.
    """
    state, waiting = learner.state, None
    progress = Progress(split * args.epochs, learner.capacity)
    with closing(progress):
        for batch in _passes(args, log, split):
            state, outcome = learner.step(state, _inputs(learner, batch, args.batch))
            # One step behind, so that the host reads and parses while the device computes.
            if waiting:
                progress.add(*waiting)
            waiting = (batch, outcome)
        if waiting:
            progress.add(*waiting)
    if progress.examples == 0:
        raise UserError(f"{args.data}: no good row among the first {split}")
    return state, progress


def evaluate(
    args: Namespace, learner: Learner, state: Any, batches: Iterator[Batch]
) -> Predictions:
    """Predicts, and leaves the state as it is.

    Raises:
        UserError: if a row is bad, or if a prediction is no finite number.
    """
    labels, logits, skipped = [], [], 0
    for batch in batches:
        outputs = np.asarray(learner.logits(state, _inputs(learner, batch, args.batch)))
        if not np.isfinite(outputs).all():
            raise UserError("the last step made the model's outputs infinite: try a smaller --lr")
        labels.append(batch.labels)
        logits.append(outputs[: len(batch.labels)])
        skipped += batch.skipped
    return Predictions(np.concatenate(labels), np.concatenate(logits), skipped)


def _passes(args: Namespace, log: ClickLog | CriteoFile, split: int) -> Iterator[Batch]:
    for _ in range(args.epochs):
        yield from log.batches(0, split, args.batch)


def _inputs(learner: Learner, batch: Batch, size: int) -> Inputs:
    """Pads a batch to `size` rows, so that one compiled step serves them all."""
    padding = size - len(batch.labels)
    labels, integers, keys = (
        np.pad(part, [(0, padding)] + [(0, 0)] * (part.ndim - 1)) for part in batch[:3]
    )
    valid = jnp.asarray(np.arange(size) < len(batch.labels))
    return Inputs(jnp.asarray(labels), jnp.asarray(integers), learner.encode(keys), valid)
