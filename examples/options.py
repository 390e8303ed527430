"""The command line of the examples."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

import optax
from criteo import UserError

import jax_hkv as hkv

# The optimizers with the learning rates that suit them here: measured on the built-in log. Adagrad
# begins with next to nothing accumulated, because the gradient of a row is a mean over the batch.
OPTIMIZERS: dict[str, tuple[Callable[[optax.Schedule], optax.GradientTransformation], float]] = {
    "adagrad": (lambda rate: optax.adagrad(rate, initial_accumulator_value=1e-8), 0.05),
    "adam": (optax.adam, 0.003),
}
# The first steps of both are as long as the rate, whatever the gradient: at the full rate the loss
# would jump to 5 on the built-in log.
WARM_UP_STEPS = 20
EMBEDDINGS = ("table", "frozen", "dense")
EMBEDDING_HELP = (
    "table: rows in a hash table; frozen: its rows keep their random first values; "
    "dense: a row for every key there is, without a table"
)
DEFAULT_ROWS = 600_000  # of the built-in log; 13 s on two idle cores
DEFAULT_CAPACITY = 131_072  # less than half of the 300,000 distinct keys of that log
MAX_SEED = 2**32 - 1

Number = TypeVar("Number", int, float)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; exits with code 2 and a line that names the option if one is wrong."""
    parser = log_parser("Train a DLRM through a table that evicts.", DEFAULT_ROWS)
    add = parser.add_argument
    add("--embedding", choices=EMBEDDINGS, default="table", help=EMBEDDING_HELP)
    add("--capacity", type=count, default=DEFAULT_CAPACITY, help="rows of the table (%(default)s)")
    add("--store", type=count, help="rows of a larger table behind it, in the host's memory")
    add("--dim", type=count, default=16, help="numbers in a row (%(default)s)")
    policies = [policy.name.lower() for policy in hkv.Policy]
    add("--policy", choices=policies, default="lru", help="who is evicted first (%(default)s)")
    add("--choices", type=int, choices=(1, 2), default=1, help="buckets a key may be in")
    add("--batch", type=count, default=2048, help="rows in a step (%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="adagrad", help="of rows and dense parameters")
    add("--lr", type=rate, help="learning rate (default: one that suits the optimizer)")
    add("--devices", type=count, default=1, help="to spread table and batches over (%(default)s)")
    modes = get_args(hkv.sharding.Mode)
    add("--mode", choices=modes, default="shard_map", help="of several devices (%(default)s)")
    add("--out", type=Path, default=Path("dlrm_run"), help="folder for curves.png (%(default)s)")
    return parser.parse_args(arguments)


def log_parser(description: str, default_rows: int) -> argparse.ArgumentParser:
    """Returns a parser of the options that say which log is read, and how."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data", type=Path, help="a Criteo TSV file, plain, .gz or .xz (default: a built-in log)")
    add("--rows", type=count, help=f"use only the first ROWS (built-in log: {default_rows:,})")
    add("--skip-bad-rows", action="store_true", help="count rows that cannot be read, and go on")
    add("--epochs", type=count, default=1, help="passes over the training part (%(default)s)")
    add("--eval-fraction", type=fraction, default=0.1, help="the log's last part (%(default)s)")
    add("--seed", type=seed, default=0, help="of everything that is random (%(default)s)")
    return parser


def report(run: Callable[[argparse.Namespace], dict[str, object]], args: argparse.Namespace) -> int:
    """Runs an example, prints its figures, and returns its exit code: 2 for a user's mistake."""
    try:
        figures = run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, allow_nan=False))
    return 0


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Returns the optimizer that was asked for; its rate grows over the first steps."""
    make, suitable_rate = OPTIMIZERS[args.optimizer]
    rate = args.lr or suitable_rate
    return make(optax.linear_schedule(rate / WARM_UP_STEPS, rate, WARM_UP_STEPS))


def count(text: str) -> int:
    """Returns a whole number of at least 1."""
    return _checked(text, int, lambda number: number >= 1, "a whole number of at least 1")


def seed(text: str) -> int:
    """Returns a whole number of 32 bits."""
    return _checked(text, int, lambda n: 0 <= n <= MAX_SEED, f"a whole number from 0 to {MAX_SEED}")


def fraction(text: str) -> float:
    """Returns a number between 0 and 1, both excluded."""
    return _checked(text, float, lambda number: 0 < number < 1, "a number between 0 and 1")


def rate(text: str) -> float:
    """Returns a finite number above 0."""
    return _checked(text, float, lambda number: 0 < number < float("inf"), "a number above 0")


def _checked(
    text: str, kind: Callable[[str], Number], is_right: Callable[[Number], bool], expected: str
) -> Number:
    try:
        number = kind(text)
    except ValueError:
        number = None
    if number is None or not is_right(number):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return number
