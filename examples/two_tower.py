"""Trains two towers, of users and of items, to retrieve what a user takes next.

    python examples/two_tower.py                             # a list that is made up on the spot
    python examples/two_tower.py --data interactions.tsv.gz  # a user and an item per line

The other items of a batch are the negatives, with the correction of Yi et al., "Sampling-Bias-
Corrected Neural Modeling for Large Corpus Item Recommendations", 2019. The last line of standard
output is a JSON object with the figures.
"""

import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from criteo import UserError
from flax import nnx
from interactions import Interactions, make_up, read
from options import count, rate, report, seed
from retrieval import leave_one_out, popularity_recall, recall
from tqdm import tqdm

import jax_hkv as hkv
from jax_hkv.nnx import Embed, TrainState, train_step

TEMPERATURE = 0.15  # of the softmax over cosines; measured: 0.1 and 0.2 are no better
SHORTEST = 1e-12  # squared length that a vector is taken to have at least
NO_NEGATIVE = -1e9  # a logit that adds nothing to a softmax, and is no infinity


class Tower(nnx.Module):
    """From ids to unit vectors: an embedding, and an MLP that adds to it."""

    def __init__(self, name: str, seed: int, args: Namespace, rngs: nnx.Rngs) -> None:
        optimizer = hkv.optim.adam(args.lr)
        self.embed = Embed(
            args.capacity, args.dim, choices=2, seed=seed, optimizer=optimizer, name=name
        )
        self.hidden = nnx.Linear(args.dim, 2 * args.dim, rngs=rngs)
        self.output = nnx.Linear(2 * args.dim, args.dim, rngs=rngs)

    def __call__(self, ids: hkv.Keys, *, train: bool = False, valid: Any = None) -> jax.Array:
        rows = self.embed(ids, train=train, valid=valid)
        vectors = rows + self.output(nnx.relu(self.hidden(rows)))
        return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, axis=-1, keepdims=True) + SHORTEST)


class TwoTower(nnx.Module):
    """A tower for each side, so that the vectors of items can be computed before a user comes."""

    def __init__(self, args: Namespace, rngs: nnx.Rngs) -> None:
        # Two seeds: with one, the user and the item of one id would begin as the same vector.
        self.user = Tower("users", args.seed, args, rngs)
        self.item = Tower("items", args.seed + 1, args, rngs)


def loss_of(model: TwoTower, users: Any, items: Any, log_frequency: Any, valid: Any) -> jax.Array:
    """Returns how badly each user's item is told from the other items of the batch, in nats."""
    queries = model.user(users, train=True, valid=valid)
    candidates = model.item(items, train=True, valid=valid)
    # Frequent items are negatives more often: without the correction that alone would sink them.
    logits = queries @ candidates.T / TEMPERATURE - log_frequency
    own = jnp.arange(len(queries))
    is_same_item = hkv.equal(items[:, None], items[None]) & (own[:, None] != own)
    logits = jnp.where(is_same_item | ~valid, NO_NEGATIVE, logits)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, own), where=valid)


def train(args: Namespace, model: TwoTower, training: Interactions) -> Counter[str]:
    """Trains the model, and returns the sums of its tables' counts over all steps.

    Raises:
        UserError: if a batch takes too much memory, or the loss is no finite number any more.
    """
    state, step = TrainState(model, optax.adam(args.lr)), train_step(loss_of)
    batches = training.batches(args.batch, args.epochs, args.seed)
    total = args.epochs * math.ceil(len(training.users) / args.batch)
    counts: Counter[str] = Counter()
    for batch in (bar := tqdm(batches, total=total, unit="step", dynamic_ncols=True)):
        keys = map(hkv.Keys.from_numpy, (batch.users, batch.items))
        try:
            info = jax.device_get(step(state, *keys, batch.log_frequency, batch.valid))
        except jax.errors.JaxRuntimeError as error:  # a batch's logits are its square
            raise UserError(f"--batch {args.batch}: {str(error).splitlines()[0]}") from error
        if not math.isfinite(info.loss):
            raise UserError(f"the loss is {info.loss}: try a smaller --lr")
        for metrics in info.tables.values():
            counts.update({name: int(getattr(metrics, name)) for name in hkv.Counts._fields})
        bar.set_postfix(loss=f"{info.loss:.3f}", evicted=counts["evicted"], refresh=False)
    return counts


def run(args: Namespace) -> dict[str, object]:
    """Trains on all but the last item of each user, looks for those, and returns the figures.

    Raises:
        UserError: if the data or an option cannot be used.
    """
    log = make_up(args.seed) if args.data is None else read(args.data)
    training, questions = leave_one_out(log, args.seed)
    try:
        model = TwoTower(args, nnx.Rngs(args.seed))
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise UserError(f"--capacity {args.capacity} --dim {args.dim}: {error}") from error
    start, examples = time.perf_counter(), args.epochs * len(training.users)
    counts = train(args, model, training)
    seconds = time.perf_counter() - start
    users = np.asarray(model.user(hkv.Keys.from_numpy(questions.users)))
    items = np.asarray(model.item(hkv.Keys.from_numpy(questions.candidates)))
    return {
        "recall_at_10": recall(questions, users, items),
        "popularity_recall_at_10": popularity_recall(questions),
        "questions": len(users),
        "candidates": len(items),
        "users": int(hkv.size(model.user.embed.table.get_value())),
        "items": int(hkv.size(model.item.embed.table.get_value())),
        "hit_rate": counts["hits"] / counts["unique"],
        "evicted": counts["evicted"],
        "examples": examples,
        "examples_per_second": round(examples / seconds, 1),
        "seed": args.seed,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code: 2 for a mistake of the user's."""
    parser = ArgumentParser(description="Train two towers to retrieve items for users.")
    add = parser.add_argument
    add("--data", type=Path, help="a user and an item per line (default: a list made up here)")
    add("--epochs", type=count, default=10, help="passes over the training part (%(default)s)")
    add("--batch", type=count, default=1024, help="interactions in a step (%(default)s)")
    add("--dim", type=count, default=32, help="numbers in a row (%(default)s)")
    add("--capacity", type=count, default=16_384, help="rows of each table (%(default)s)")
    add("--lr", type=rate, default=0.01, help="learning rate (%(default)s)")
    add("--seed", type=seed, default=0, help="of everything that is random (%(default)s)")
    return report(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
