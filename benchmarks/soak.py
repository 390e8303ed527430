"""Random operations on a GPU against the same ones on the CPU, bit for bit, a million by default.

    python benchmarks/soak.py [--steps N] [--seconds BUDGET] [--out results/soak.json]

Each step is one of ten operations, drawn with its keys, masks and rows from the step's number.
Both machines run chunks of steps in one compiled loop; after each chunk the digests of the table,
and of every result since the beginning, must be equal. The record says how far it came, and what
the memory in use was after the first chunk and after the last, which must be equal too. Without a
GPU two CPU devices are compared, to try the script.
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

    def pooled(table: Any, keys: Any, valid: Any, rows: Any, flags: Any) -> Any:
        ids, mask = keys.reshape(-1, 4), valid.reshape(-1, 4)
        table, result = hkv.find_or_insert_pooled(table, ids, valid=mask, combiner="sum")
        return OPTIMIZER.update(table, result, rows[: BATCH // 4]), result

    def with_rows(operation: Any) -> Any:
        return lambda table, keys, valid, rows, flags: operation(table, keys, rows, valid=valid)

    return [
        find_or_insert,
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


def main() -> None:
    """Runs until a difference, the last step, or the end of the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=1_000_000)
    add("--chunk", type=int, default=1000, help="steps of one compiled loop (%(default)s)")
    add("--seconds", type=float, default=500.0, help="budget (%(default)s)")
    add("--out", type=Path, default=measure.RESULTS / "soak.json")
    options = parser.parse_args()
    begin, compared = time.perf_counter(), machines()
    states = [start(device) for device in compared]
    record = measure.surroundings() | {"compared": [str(d) for d in compared], "steps": 0}
    while record["steps"] < options.steps and time.perf_counter() - begin < options.seconds:
        first = jnp.int32(record["steps"])
        states = [run(state, jax.device_put(first, d), steps=options.chunk)
                  for state, d in zip(states, compared, strict=True)]  # fmt: skip
        seen = [(digest(table).tolist(), results.tolist()) for table, results in states]
        if seen[0] != seen[1]:
            raise SystemExit(f"different after step {record['steps'] + options.chunk}: {seen}")
        record["steps"] += options.chunk
        record |= {"digest": seen[0], "seconds": time.perf_counter() - begin}
        record.setdefault("bytes_in_use", [in_use(compared[0])] * 2)[1] = in_use(compared[0])
        measure.write(options.out.stem, record, options.out.parent)
    before, after = record["bytes_in_use"]
    if before is not None and after > before + MOST_UNFREED:
        raise SystemExit(f"the memory in use went from {before} to {after} bytes")
    print(f"{record['steps']:,} steps, no difference; {options.out}")


if __name__ == "__main__":
    main()
