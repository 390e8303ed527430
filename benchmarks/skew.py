"""Batches that are not uniform: what they cost beside uniform ones of as many distinct keys.

    python benchmarks/skew.py [--out results/skew.json]

Half of a batch is one key; a power law; all keys fall into one bucket, which keeps 128 of them.
Each is compared with a batch of the same size that has as many distinct keys, equally often and
spread over all buckets. Timed are a lookup, an upsert (its keys are present after the first call,
or refused), and an upsert with an update by Adam; and an upsert whose keys are all refused for
their scores, by one full bucket or by all. Small sizes run on a CPU too, to try the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
from table import BATCHES, GOLDEN, Call, call_of, keys_of, timed
from train_step import EXPONENT, power_law

import jax_hkv as hkv

ADAM = hkv.optim.adam(1e-3)
IDS = 10**8  # that the power law is cut at
ONE_BUCKET, REFUSED = "one bucket", "all refused"
IN_FIRST_BUCKET = 44  # bits: hashes below 2^44 belong there in tables of up to 2^20 buckets
# The hash of docs/semantics.md, section 2, is a bijection: it can be undone.
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def unshifted(x: np.ndarray, by: int) -> np.ndarray:
    """The y of which x is ``y ^ (y >> by)``."""
    y = x
    for _ in range(64 // by):
        y = x ^ (y >> np.uint64(by))
    return y


def of_hashes(hashes: np.ndarray) -> np.ndarray:
    """The keys that have the given hashes."""
    x = unshifted(hashes, 31) * np.uint64(pow(SECOND, -1, 2**64))
    x = unshifted(x, 27) * np.uint64(pow(FIRST, -1, 2**64))
    return unshifted(x, 30) - GOLDEN


def patterns(batch: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Names and keys."""
    half = rng.integers(0, 2**63, batch, np.uint64)
    half[rng.permutation(batch)[: batch // 2]] = 7
    yield "half is one key", half
    ids = np.asarray(power_law(jax.random.key(0), (batch,), IDS)).astype(np.uint64)
    yield f"power law of {EXPONENT}", ids * GOLDEN
    yield ONE_BUCKET, of_hashes(rng.integers(0, 2**IN_FIRST_BUCKET, batch, np.uint64))


def calls() -> dict[str, Call]:
    """By name, from a table, keys and gradients to a table and a result."""

    def train(table: hkv.Table, keys: hkv.Keys, gradients: jax.Array) -> Any:
        table, result = hkv.find_or_insert(table, keys)
        return ADAM.update(table, result, gradients), result.counts

    return {
        "find": call_of(lambda table, keys, _: hkv.find(table, keys)),
        "find_or_insert": call_of(lambda table, keys, _: hkv.find_or_insert(table, keys)),
        "find_or_insert, adam": call_of(train),
    }


def measured(
    timed_calls: dict[str, Call], keys: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Every call on a table of its own."""
    record = {}
    rng = np.random.default_rng(0)
    turns = [keys_of(rng.permutation(keys)) for _ in range(BATCHES)]
    gradients = jax.random.normal(jax.random.key(1), (options.batch, options.dim))
    for name, call in timed_calls.items():
        table = hkv.create(options.slots, options.dim, init=hkv.initializers.uniform(-1, 1))
        table = ADAM.init(table)
        table, inserted = timed_calls["find_or_insert"].once(table, turns[0], gradients)
        found = {"distinct": int(inserted.counts.unique), "size": int(hkv.size(table))}
        wall, device, _ = timed(call, table, turns, (gradients,), options, is_fresh=False)
        record[name] = {"wall": wall, "device": device} | found
    return record


def refused(is_skewed: bool, rng: np.random.Generator, options: argparse.Namespace) -> Any:
    """An upsert of keys that score less than all entries of their buckets, which are full."""
    limit = IN_FIRST_BUCKET if is_skewed else 64
    # So many that no bucket has a lane left: 192 keys for each of them all, give or take 14.
    offers = options.batch if is_skewed else options.slots * 3 // 2
    table = hkv.create(options.slots, options.dim, policy=hkv.Policy.CUSTOM)
    call = call_of(lambda table, keys, scores: hkv.find_or_insert(table, keys, scores=scores))

    def drawn() -> hkv.Keys:
        return keys_of(of_hashes(rng.integers(0, 2**limit, options.batch, np.uint64)))

    def scores(number: int) -> hkv.Keys:
        return keys_of(np.full(options.batch, number))

    for _ in range(-(-offers // options.batch)):
        table, _ = call.once(table, drawn(), scores(2))
    turns = [drawn() for _ in range(BATCHES)]
    table, result = call.once(table, turns[0], scores(1))
    assert int(result.counts.refused) == int(result.counts.unique)
    wall, device, table = timed(call, table, turns, (scores(1),), options, is_fresh=False)
    sizes = {"distinct": int(result.counts.unique), "size": int(hkv.size(table))}
    return {"find_or_insert": {"wall": wall, "device": device} | sizes}


def print_ratios(name: str, sides: dict[str, Any]) -> None:
    """Of each call's times."""
    for call, skewed in sides["skewed"].items():
        ratio = measure.median(skewed["device"]) / measure.median(sides["uniform"][call]["device"])
        print(f"{name:20} {call:22} {ratio:6.2f} times the uniform batch's time", flush=True)


def main() -> None:
    """Measures pattern by pattern, each beside its uniform batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--slots", type=int, default=2**24)
    add("--dim", type=int, default=32)
    add("--batch", type=int, default=2**20)
    add("--runs", type=int, default=measure.RUNS)
    add("--out", type=Path, default=measure.RESULTS / "skew.json")
    options = parser.parse_args()
    if options.slots > 128 * 2**20:
        parser.error(f"--slots must be at most 2^27 (one bucket's keys), got {options.slots}")
    rng = np.random.default_rng(0)
    sizes = {"slots": options.slots, "dim": options.dim, "batch": options.batch}
    record = measure.surroundings() | sizes | {"patterns": {}}
    timed_calls = calls()
    for name, keys in patterns(options.batch, rng):
        distinct = len(np.unique(keys))
        spread = rng.permutation(np.arange(options.batch) % distinct).astype(np.uint64)
        skewed = measured(timed_calls, keys, options)
        plain = measured(timed_calls, spread * GOLDEN, options)
        for call in skewed:
            assert skewed[call]["distinct"] == plain[call]["distinct"] == distinct
            assert name != ONE_BUCKET or skewed[call]["size"] == min(distinct, 128)
        record["patterns"][name] = {"skewed": skewed, "uniform": plain}
        print_ratios(name, record["patterns"][name])
        measure.write(options.out.stem, record, options.out.parent)
    sides = {"skewed": True, "uniform": False}
    record["patterns"][REFUSED] = {
        side: refused(is_skewed, rng, options) for side, is_skewed in sides.items()
    }
    print_ratios(REFUSED, record["patterns"][REFUSED])
    measure.write(options.out.stem, record, options.out.parent)


if __name__ == "__main__":
    main()
