"""Training through a store in the host's memory: what a prefetch costs beside its step.

    python benchmarks/tiers.py [--out results/tiers.json]

Ids of a power law, more of them than the table on the device has slots, one Adam step a batch.
Timed are a prefetch and the step behind it, one after the other and overlapped (the host works
while the device trains), and the step of one table that holds everything, if the device has the
memory; all of them over the same batches, after as many others. A record has the entries that moved
each way and their bytes. Small sizes run on a CPU too, where host and device are the same cores.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
from table import GOLDEN, keys_of
from train_step import EXPONENT, IN_A_ROW, power_law

import jax_hkv as hkv
from jax_hkv import tiered

ADAM = hkv.optim.adam(1e-3)
SCORE_AND_KEY = 16  # bytes
STATES = 2  # of Adam, as long as a row


@jax.jit(donate_argnums=0)
def train(table: hkv.Table, keys: hkv.Keys) -> Any:
    """A step of one lookup, whose rows are pulled to zero."""
    table, result = hkv.find_or_insert(table, keys)
    return ADAM.update(table, result, 0.5 * result.values), result.counts


def batches(options: argparse.Namespace, first: int) -> Iterator[hkv.Keys]:
    """Different ones for every number, hashed to 64 bits."""
    for number in itertools.count(first):
        ids = np.asarray(power_law(jax.random.key(number), (options.batch,), options.ids))
        yield keys_of(ids.astype(np.uint64) * GOLDEN)


def one_after_the_other(tiers: tiered.Tiers, keys: hkv.Keys, _: hkv.Keys) -> Any:
    """A prefetch, and a step."""
    tiers, counts = tiered.prefetch(tiers, keys)
    cache, of_step = train(tiers.cache, keys)
    return tiers._replace(cache=cache), counts, of_step


def overlapped(tiers: tiered.Tiers, keys: hkv.Keys, coming: hkv.Keys) -> Any:
    """A step, and what the next one wants; its own ids are there."""
    return tiered.step_and_prefetch(lambda cache: train(cache, keys), tiers, keys, coming)


def timed(
    step: Callable[[Any, hkv.Keys, hkv.Keys], Any], state: Any, options: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """The state after all steps, seconds a step, and what was counted, run by run."""
    given = itertools.pairwise(batches(options, 0))
    for keys, coming in itertools.islice(given, options.steps):
        state, _, _ = step(state, keys, coming)
    times, sums = [], []
    for _ in range(options.runs):
        some, counted = list(itertools.islice(given, IN_A_ROW)), []
        jax.block_until_ready(state)
        start = time.perf_counter()
        for keys, coming in some:
            state, *counts = step(state, keys, coming)
            counted.append(counts)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / IN_A_ROW)
        sums.append(jax.tree.map(lambda *each: int(sum(each)), *jax.device_get(counted)))
    fields = sums[0][0]._fields
    by_run = {name: [getattr(counts, name) for counts, _ in sums] for name in fields}
    of_steps = {
        name: sum(getattr(of_step, name) for _, of_step in sums) for name in ("hits", "inserted")
    }
    return state, {"seconds": times, "counts": by_run, "of_steps": of_steps}


def bytes_moved(found: dict[str, Any], dim: int) -> dict[str, list[int]]:
    """Of entries, by count: what they are padded with is not in it."""
    entry = SCORE_AND_KEY + (1 + STATES) * 4 * dim
    names = {"to_the_host": "evicted", "to_the_device": "restored"}
    return {way: [entry * n for n in found["counts"][name]] for way, name in names.items()}


def large(options: argparse.Namespace) -> tuple[dict[str, Any] | None, int]:
    """One table of the store's size on the device, and its entries; None if it has no room."""
    try:
        table = ADAM.init(hkv.create(options.store, options.dim))

        def step(table: hkv.Table, keys: hkv.Keys, _: hkv.Keys) -> Any:
            table, counts = train(table, keys)
            return table, counts, counts

        table, found = timed(step, table, options)
        return found, int(hkv.size(table))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, 0


def main() -> None:
    """Measures both ways, and one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache", type=int, default=2**21, help="slots")
    add("--store", type=int, default=2**24, help="slots")
    add("--ids", type=int, default=10**8, help="that the power law is cut at")
    add("--dim", type=int, default=32)
    add("--batch", type=int, default=2**17)
    add("--steps", type=int, default=50, help="before those that are timed")
    add("--runs", type=int, default=measure.RUNS, help=f"of {IN_A_ROW} steps")
    add("--out", type=Path, default=measure.RESULTS / "tiers.json")
    options = parser.parse_args()
    names = ("cache", "store", "ids", "dim", "batch", "steps", "runs")
    record = measure.surroundings() | {name: getattr(options, name) for name in names}
    record |= {"exponent": EXPONENT, "ways": {}}
    for name, step in {
        "one after the other": one_after_the_other,
        "overlapped": overlapped,
    }.items():
        cache = ADAM.init(hkv.create(options.cache, options.dim))
        tiers = tiered.Tiers(cache, tiered.create_store(cache, options.store))
        if step is overlapped:
            tiers, _ = tiered.prefetch(tiers, next(batches(options, 0)))
        tiers, found = timed(step, tiers, options)
        assert not found["of_steps"]["inserted"] and not any(found["counts"]["absent"])
        record["ways"][name] = found | {
            "bytes": bytes_moved(found, options.dim),
            "size": tiered.size(tiers),
        }
        print(f"{name:20} {1e3 * measure.median(found['seconds']):8.2f} ms a step", flush=True)
        del tiers, cache
        measure.write(options.out.stem, record, options.out.parent)
    record["one table"], record["size"] = large(options)
    if record["one table"]:
        milliseconds = 1e3 * measure.median(record["one table"]["seconds"])
        print(f"{'one table':20} {milliseconds:8.2f} ms a step", flush=True)
    measure.write(options.out.stem, record, options.out.parent)


if __name__ == "__main__":
    main()
