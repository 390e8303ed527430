"""Trains MLPerf's DLRM-DCNv2, scaled down, with its 26 multi-hot tables in one hash table.

    python examples/dlrm_dcnv2.py                        # a multi-hot log, made up on the spot
    python examples/dlrm_dcnv2.py --data day_0.gz        # a log in the Criteo TSV format, one-hot
    python examples/dlrm_dcnv2.py --capacity-factor 0.1  # room for a tenth: it evicts
    python examples/dlrm_dcnv2.py --scale 1              # MLPerf's own size: 213 GB of tables

The last line of standard output is a JSON object with the figures.
"""

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from clicks import ID_EXPONENT, ONE_HOT, ClickLog
from criteo import INTEGERS, CriteoFile, UserError
from dcnv2 import EPSILON_INSIDE_ROOT, LEARNING_RATE, DlrmDcnV2, Shape, embeddings, scaled
from dlrm import Inputs, mean_loss
from learners import Learner, Outcome
from options import count, log_parser, rate, report
from training import train_and_evaluate

import jax_hkv as hkv
from jax_hkv.linen import TrainState, train_step

DEFAULT_ROWS = 600_000
DEFAULT_SCALE = 64  # whose square root is whole
SCALE_HELP = (
    "divide the rows of tables and of a batch by SCALE, and all widths by its square root; the "
    "hotness stays (%(default)s)"
)
CAPACITY_HELP = "rows there is room for, as a share of the ids that MLPerf has (%(default)s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code: 2 for a mistake of the user's."""
    parser = log_parser("Train MLPerf's DLRM-DCNv2, scaled down.", DEFAULT_ROWS)
    add = parser.add_argument
    add("--scale", type=count, default=DEFAULT_SCALE, help=SCALE_HELP)
    add("--capacity-factor", type=rate, default=1.0, help=CAPACITY_HELP)
    add("--bfloat16", action="store_true", help="compute in bfloat16; rows stay float32")
    add("--lr", type=rate, default=LEARNING_RATE, help="learning rate (%(default)s, as MLPerf)")
    return report(run, parser.parse_args(arguments))


def run(args: Namespace) -> dict[str, object]:
    """Trains on the log's first part, evaluates on its last, and returns the figures.

    Raises:
        UserError: if the data or an option cannot be used.
    """
    shape = scaled(args.scale)
    if args.data is not None:
        shape = dataclasses.replace(shape, hotness=ONE_HOT)
    model = make_model(args, shape)
    try:
        _check_memory(args, model)
        log = _open_log(args, shape)
        learner = make_learner(args, model)
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        given = f"--scale {args.scale} --capacity-factor {args.capacity_factor}"
        raise UserError(f"{given}: {error}") from error
    print(table_of(learner.state))
    figures, _ = train_and_evaluate(Namespace(**vars(args), batch=shape.batch), learner, log)
    return figures | {"scale": args.scale, "dtype": jnp.dtype(model.dtype).name}


def make_model(args: Namespace, shape: Shape) -> DlrmDcnV2:
    """Returns the model of a shape, as the options want it."""
    tables = embeddings(shape, args.capacity_factor, args.lr, args.seed)
    return DlrmDcnV2(shape, tables, jnp.bfloat16 if args.bfloat16 else jnp.float32)


def first_state(learning_rate: float, seed: int, model: DlrmDcnV2) -> TrainState:
    """Returns the untrained model: dense parameters, an empty table, and both optimizers."""
    ids = hkv.Keys(jnp.zeros((1, sum(model.shape.hotness), 2), jnp.uint32))
    inputs = Inputs(jnp.zeros(1), jnp.zeros((1, INTEGERS)), ids, jnp.ones(1, jnp.bool_))
    dense = optax.adagrad(learning_rate, 0.0, EPSILON_INSIDE_ROOT)
    return TrainState.create(model, jax.random.key(seed), inputs, tx=dense)


def make_learner(args: Namespace, model: DlrmDcnV2) -> Learner:
    """Returns the model with its train step, which updates rows and parameters in place."""
    state = first_state(args.lr, args.seed, model)

    def loss_of(apply: Any, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        logits = apply(inputs, train=True)
        return mean_loss(logits, inputs), logits

    train = train_step(loss_of, has_aux=True)

    def step(state: TrainState, inputs: Inputs) -> tuple[TrainState, Outcome]:
        state, info = train(state, inputs)
        (seen,) = info.tables.values()
        counts = hkv.Counts(**{name: getattr(seen, name) for name in hkv.Counts._fields})
        return state, Outcome(info.aux, info.loss, counts, hkv.size(table_of(state)))

    logits = jax.jit(TrainState.apply)
    return Learner(state, step, logits, hkv.Keys.from_numpy, table_of(state).capacity)


def table_of(state: TrainState) -> hkv.Table:
    """Returns the one table that the 26 share."""
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    return table


def _check_memory(args: Namespace, model: DlrmDcnV2) -> None:
    """Finds out before the machine is brought to its knees, which a CPU would be."""
    state = jax.eval_shape(partial(first_state, args.lr, args.seed, model))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    stats = jax.local_devices()[0].memory_stats()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = stats["bytes_limit"] if stats else pages
    if needed > room:
        raise MemoryError(
            f"tables and parameters need {needed / 2**30:.1f} GiB, this machine has "
            f"{room / 2**30:.1f}: raise --scale, or lower --capacity-factor"
        )


def _open_log(args: Namespace, shape: Shape) -> ClickLog | CriteoFile:
    if args.data is not None:
        return CriteoFile.scan(args.data, args.skip_bad_rows)
    print(f"{sum(shape.hotness)} ids a row, by power laws of exponent {ID_EXPONENT}")
    return ClickLog(args.seed, args.rows or DEFAULT_ROWS, shape.rows, shape.hotness)


if __name__ == "__main__":
    sys.exit(main())
