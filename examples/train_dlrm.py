"""Trains a DLRM on a click log through one embedding table that evicts as it goes.

    python examples/train_dlrm.py                      # a log that is made up on the spot
    python examples/train_dlrm.py --data day_0.gz      # a log in the Criteo TSV format
    python examples/train_dlrm.py --devices 4          # table and batches over four devices
    python examples/train_dlrm.py --capacity 32768 --store 524288   # two tables, one on the host

The last line of standard output is a JSON object with the figures; the curves go to `--out`. To
judge the table, run the same with `--embedding dense` and with `--embedding frozen`.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from clicks import ClickLog
from criteo import CriteoFile, UserError
from dlrm import INITIAL_STDDEV
from learners import Learner, dense_learner, table_learner
from options import DEFAULT_ROWS, make_optimizer, parse, report
from sharded import placement_on, sharded_learner
from tiered import tiered_learner
from training import split_of, train_and_evaluate

import jax_hkv as hkv

CURVES_FILE = "curves.png"
POLICY_EPOCHS = 10  # how often a policy with epochs starts a new one in a pass over the log
VOCABULARY_ROWS = 65_536  # at a time, when the distinct keys of a log are collected


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example and returns its exit code: 2 for a mistake of the user's."""
    return report(run, parse(arguments))


def run(args: Namespace) -> dict[str, object]:
    """Trains on the log's first part, evaluates on its last, and returns the figures.

    Raises:
        UserError: if the data, the folder for the results or an option cannot be used.
    """
    _check_table(args)
    _make_folder(args)
    log = _open_log(args)
    _, rows = split_of(args, log)
    try:
        learner = _make_learner(args, log, rows)
    except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
        raise UserError(f"--capacity {args.capacity} --dim {args.dim}: {error}") from error
    figures, progress = train_and_evaluate(args, learner, log)
    progress.save(args.out / CURVES_FILE)
    return figures


def _make_folder(args: Namespace) -> None:
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / CURVES_FILE).open("ab").close()  # not after minutes of training
    except OSError as error:
        raise UserError(f"--out: cannot write to {args.out}: {error.strerror}") from error


def _open_log(args: Namespace) -> ClickLog | CriteoFile:
    if args.data is None:
        return ClickLog(args.seed, args.rows or DEFAULT_ROWS)
    return CriteoFile.scan(args.data, args.skip_bad_rows)


def _make_learner(args: Namespace, log: ClickLog | CriteoFile, rows: int) -> Learner:
    optimizer = make_optimizer(args)
    if args.embedding == "dense":
        return dense_learner(_vocabulary(log, rows), args.dim, optimizer, seed=args.seed)
    make_table = partial(
        hkv.create,
        dim=args.dim,
        policy=hkv.Policy[args.policy.upper()],
        choices=args.choices,
        init=hkv.initializers.normal(stddev=INITIAL_STDDEV),
        seed=args.seed,
    )
    options: dict[str, Any] = {
        "seed": args.seed,
        "epoch_steps": max(1, rows // args.batch // POLICY_EPOCHS),
        "is_frozen": args.embedding == "frozen",
    }
    if args.devices == 1:
        table = make_table(args.capacity)
        print(table)
        learner = table_learner(table, optimizer, **options)
        if args.store is None:
            return learner
        try:
            return tiered_learner(learner, args.store)
        except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
            raise UserError(f"--store {args.store} --dim {args.dim}: {error}") from error
    placement = placement_on(args.devices, args.mode)
    print(f"{args.capacity:,} rows over {args.devices} devices, {args.mode}")
    return sharded_learner(
        make_table, placement, optimizer, capacity=args.capacity, dim=args.dim, **options
    )


def _check_table(args: Namespace) -> None:
    if args.devices > 1 and args.embedding == "dense":
        raise UserError("--devices: a dense embedding is on one device; use --embedding table")
    if args.store and (args.devices > 1 or args.embedding == "dense"):
        raise UserError("--store: stands behind a table of one device; use --embedding table")
    if args.batch % args.devices:
        raise UserError(f"--batch {args.batch}: must be a multiple of --devices {args.devices}")


def _vocabulary(log: ClickLog | CriteoFile, rows: int) -> np.ndarray:
    """Returns every key of a log's first rows, sorted: what a dense embedding must know before."""
    vocabulary = np.empty(0, np.uint64)
    for batch in log.batches(0, rows, VOCABULARY_ROWS):
        vocabulary = np.union1d(vocabulary, batch.keys)
    return vocabulary


if __name__ == "__main__":
    sys.exit(main())
