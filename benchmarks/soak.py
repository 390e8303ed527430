"""Random operations on a GPU against the same ones on the CPU, bit for bit, a million by default.

    python benchmarks/soak.py [--steps N] [--seconds BUDGET] [--resume] [--out results/soak.json]

Each step is one of eleven operations, drawn with its keys, masks and rows from the step's number.
Both machines run chunks of steps in one compiled loop; after each chunk the digests of the table,
and of every result since the beginning, must be equal. The record says how far it came, and of each
run where it began, on what, and the memory in use after its first chunk and after its last, which
must not have grown. The tables are kept beside it, so that `--resume` goes on where another run's
budget ended. Without a GPU two CPU devices are compared, to try the script.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_hkv as hkv
from jax_hkv.sharding import digest

CAPACITY, DIM, BATCH = 1024, 4, 64
UNIVERSE = 4096  # keys: four times the capacity, so that buckets fill, evict and refuse
OPTIMIZER = hkv.optim.adam(1e-2)
MOST_UNFREED = 2**20  # bytes: what finished work has held is given back a little later


def words(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random words: integers, which are the same on every backend."""
    return jax.random.bits(key, shape, jnp.uint32)


def draw(number: jax.Array) -> tuple[jax.Array, hkv.Keys, jax.Array, jax.Array, jax.Array]:
    """The operation, keys, mask, rows and flags of a step."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 5)
    low = words(keys[0], (BATCH,)) % UNIVERSE
    ids = hkv.Keys(jnp.stack([low, low * jnp.uint32(0x9E3779B9)], axis=-1))
    valid = words(keys[1], (BATCH,)) % 8 != 0
    rows = (words(keys[2], (BATCH, DIM)) >> 16).astype(jnp.float32) / 65536 - 0.5
    flags = words(keys[3], (BATCH,)) % 2 == 0
    operation = words(keys[4], ()) % 64
    return operation.astype(jnp.int32), ids, valid, rows, flags


def operations() -> list[Callable[..., tuple[hkv.Table, Any]]]:
    """From (table, keys, mask, rows, flags) to (table, what the operation returned)."""

    def find_or_insert(table: Any, keys: Any, valid: Any, rows: Any, flags: Any) -> Any:
        table, result = hkv.find_or_insert(table, keys, valid=valid, return_evicted=True)
        return OPTIMIZER.update(table, result, rows), result

    def twice(table: Any, keys: Any, valid: Any, rows: Any, flags: Any) -> Any:
        half = BATCH // 2
        table, first = hkv.find_or_insert(table, keys[:half], valid=valid[:half])
        table, second = hkv.find_or_insert(table, keys[half:], valid=valid[half:], pinned=first)
        results, gradients = [first, second], [rows[:half], rows[half:]]
        return OPTIMIZER.update(table, results, gradients), second

    def pooled(table: Any, keys: Any, valid: Any, rows: Any, flags: Any) -> Any:
        ids, mask = keys.reshape(-1, 4), valid.reshape(-1, 4)
        table, result = hkv.find_or_insert_pooled(table, ids, valid=mask, combiner="sum")
        return OPTIMIZER.update(table, result, rows[: BATCH // 4]), result

    def with_rows(operation: Any) -> Any:
        return lambda table, keys, valid, rows, flags: operation(table, keys, rows, valid=valid)

    return [
        find_or_insert,
        twice,
        pooled,
        with_rows(hkv.insert_or_assign),
        with_rows(hkv.insert_and_evict),
        with_rows(hkv.assign),
        lambda table, keys, valid, rows, flags: hkv.accum_or_assign(
            table, keys, rows, flags, valid=valid
        ),
        lambda table, keys, valid, rows, flags: hkv.find(table, keys, valid=valid, touch=True),
        lambda table, keys, valid, rows, flags: hkv.find(table, keys, valid=valid, fill="initial"),
        lambda table, keys, valid, rows, flags: hkv.erase(table, keys, valid=valid & flags),
        lambda table, keys, valid, rows, flags: (hkv.clear(table), None),
    ]


@functools.partial(jax.jit, static_argnames="steps", donate_argnums=0)
def run(state: tuple[hkv.Table, jax.Array], first: jax.Array, steps: int) -> Any:
    """A chunk of steps; the state is a table and the digest of all results."""

    def branch(operation: Any) -> Any:
        def call(table: hkv.Table, *batch: Any) -> tuple[hkv.Table, jax.Array]:
            table, result = operation(table, *batch)
            return table, digest(result)

        return call

    branches = [branch(operation) for operation in operations()]
    # Of 64 numbers one clears the table, the others share the rest.
    choice = jnp.array([number % (len(branches) - 1) for number in range(63)] + [len(branches) - 1])

    def step(number: jax.Array, state: tuple[hkv.Table, jax.Array]) -> Any:
        operation, *batch = draw(number)
        table, found = jax.lax.switch(choice[operation], branches, state[0], *batch)
        return table, state[1] * jnp.uint32(31) + found

    return jax.lax.fori_loop(first, first + steps, step, state)


def start(device: jax.Device) -> tuple[hkv.Table, jax.Array]:
    """An empty table on a device."""
    with jax.default_device(device):
        table = hkv.create(CAPACITY, DIM, policy=hkv.Policy.EPOCH_LFU, choices=2)
        return jax.device_put((OPTIMIZER.init(table), jnp.zeros((2,), jnp.uint32)), device)


def in_use(device: jax.Device) -> int | None:
    """Bytes of a device's memory; None where it does not say."""
    return (device.memory_stats() or {}).get("bytes_in_use")


def machines() -> tuple[jax.Device, jax.Device]:
    """What is compared: a GPU and the CPU, or two CPU devices."""
    host = jax.devices("cpu")
    try:
        return jax.devices("gpu")[0], host[0]
    except RuntimeError:
        return host[1], host[0]


def save(path: Path, states: list[Any], steps: int) -> None:
    """Keeps the states of all machines and how many steps they have behind them."""
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, *map(np.asarray, jax.tree.leaves(states)), steps=steps)
    unfinished.replace(path)


def load(path: Path, states: list[Any]) -> tuple[list[Any], int]:
    """What was saved, each array where the one is that it takes the place of."""
    leaves, tree = jax.tree.flatten(states)
    with np.load(path) as saved:
        leaves = [
            jax.device_put(saved[f"arr_{number}"], leaf.sharding)
            for number, leaf in enumerate(leaves)
        ]
        return tree.unflatten(leaves), int(saved["steps"])


def main() -> None:
    """Runs until a difference, the last step, or the end of the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=1_000_000)
    add("--chunk", type=int, default=1000, help="steps of one compiled loop (%(default)s)")
    add("--seconds", type=float, default=500.0, help="budget (%(default)s)")
    add("--resume", action="store_true", help="go on with what --out and its tables have")
    add("--out", type=Path, default=measure.RESULTS / "soak.json")
    options = parser.parse_args()
    begin, compared = time.perf_counter(), machines()
    kept, steps = options.out.with_suffix(".npz"), 0
    states = [start(device) for device in compared]
    record = measure.begun(options.out, options.resume and kept.exists(), {"runs": []})
    if record["runs"]:
        states, steps = load(kept, states)
    record["compared"] = [str(device) for device in compared]
    this: dict[str, Any] = {"first": steps} | measure.surroundings()
    if steps < options.steps:
        record["runs"].append(this)

    def write() -> None:
        record["left_out"] = [f"steps from {steps}"] if steps < options.steps else []
        measure.write(options.out.stem, record, options.out.parent)

    while steps < options.steps and time.perf_counter() - begin < options.seconds:
        states = [run(state, jax.device_put(jnp.int32(steps), device), steps=options.chunk)
                  for state, device in zip(states, compared, strict=True)]  # fmt: skip
        steps += options.chunk
        seen = [(digest(table).tolist(), results.tolist()) for table, results in states]
        if seen[0] != seen[1]:
            raise SystemExit(f"different after step {steps}: {seen}")
        used = in_use(compared[0])
        this |= {"seconds": time.perf_counter() - begin}
        this |= {"bytes_in_use": [this.get("bytes_in_use", [used])[0], used]}
        record |= {"steps": steps, "digest": seen[0]}
        save(kept, states, steps)
        write()
    write()
    for each in record["runs"]:
        before, after = each.get("bytes_in_use", [None, None])
        if before is not None and after > before + MOST_UNFREED:
            raise SystemExit(f"the memory in use went from {before} to {after} bytes")
    print(f"{steps:,} steps, no difference; {options.out}")


if __name__ == "__main__":
    main()
