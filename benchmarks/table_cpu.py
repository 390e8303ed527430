"""The table on a CPU against NumPy, a Python dict, dense Adam, and another table where installed.

    python benchmarks/table_cpu.py [--rows 10000000] [--batch 1000000] [--peer-python PYTHON]

Everything is measured in one run, since only ratios mean something on a shared machine. Results are
checked on a sample before they are timed, and go to benchmarks/results/table_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax

import jax_hkv as hkv

DIM = 64
ADAM_DIM = 16
ADAM_BATCH = 100_000
PEER_KEYS = 2_000_000
# One candidate bucket evicts from about 65 % on, two (in batches of 10 %) from 97 %: all rows fit.
SLOTS_PER_ROW = {1: 1.7, 2: 1.1}
# Of PERFORMANCE: what is measured, the least ratio, and against what.
TARGETS = {
    "find / numpy": 0.8,
    "find_or_insert / numpy": 0.5,
    "insert_or_assign / numpy": 0.5,
    "find / dict": 4.0,
    "find_or_insert / dict": 4.0,
    "insert_or_assign / dict": 4.0,
    "two threads / one": 1.7,
    "sparse adam / dense adam": 20.0,
    "lookup / peer": 2.0,
    "insert / peer": 2.0,
    "update / peer": 1.5,
}


def key_of(rows: np.ndarray) -> np.ndarray:
    """Row numbers as keys that look like hashes: an odd multiplier permutes the 64-bit words."""
    return rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def filled_table(rows: int, batch: int, choices: int) -> hkv.Table:
    """A table that holds `rows` keys; the row of key number i is i everywhere."""
    table = hkv.create(int(rows * SLOTS_PER_ROW[choices]), DIM, choices=choices)
    insert = jax.jit(hkv.insert_or_assign, donate_argnums=0)
    for start in range(0, rows, batch):
        numbers = np.arange(start, min(start + batch, rows))
        values = jnp.broadcast_to(jnp.asarray(numbers, jnp.float32)[:, None], (len(numbers), DIM))
        table, _ = insert(table, hkv.Keys.from_numpy(key_of(numbers)), values)
    assert int(hkv.size(table)) == rows, f"only {int(hkv.size(table))} of {rows} rows fit"
    return table


class Timed:
    """Times operations that thread a table through."""

    def __init__(self, table: hkv.Table, rows: int, batch: int, rng: np.random.Generator):
        self.table, self.rows, self.batch, self.rng = table, rows, batch, rng

    def __call__(self, operation: Any, *more: Any) -> list[float]:
        compiled = jax.jit(operation, donate_argnums=0)

        def prepare() -> Any:
            numbers = self.rng.integers(0, self.rows, self.batch)
            return numbers, jax.device_put(hkv.Keys.from_numpy(key_of(numbers)))

        def run(prepared: Any) -> Any:
            self.table, self.result = compiled(self.table, prepared[1], *more)
            return self.table, self.result

        prepared = prepare()
        run(prepared)
        values = getattr(self.result, "values", None)
        if values is not None:
            expected = prepared[0][:1000].astype(np.float32)
            np.testing.assert_array_equal(np.asarray(values[:1000, 0]), expected)
        del values, self.result
        return measure.seconds(run, prepare)


def table_times(rows: int, batch: int, choices: int, rng: np.random.Generator) -> dict[str, Any]:
    """Seconds a batch of find, find_or_insert and insert_or_assign, all keys present."""
    timed = Timed(filled_table(rows, batch, choices), rows, batch, rng)
    values = jnp.asarray(rng.standard_normal((batch, DIM), np.float32))
    times = {"find": timed(hkv.find), "find_or_insert": timed(hkv.find_or_insert)}
    times["insert_or_assign"] = timed(hkv.insert_or_assign, values)
    return times


def numpy_times(rows: int, batch: int, rng: np.random.Generator) -> list[float]:
    """W[ids] of a dense array."""
    dense = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None], (rows, DIM)).copy()
    return measure.seconds(lambda ids: dense[ids], lambda: rng.integers(0, rows, batch))


def dict_times(rows: int, batch: int, rng: np.random.Generator) -> list[float]:
    """A Python dict from key to row view; the rows found are stacked, as a model needs them."""
    dense = np.ones((rows // 10, DIM), np.float32)
    keys = key_of(np.arange(len(dense))).tolist()
    views = dict(zip(keys, dense, strict=True))
    out = np.empty((batch // 10, DIM), np.float32)

    def run(chosen: list[int]) -> None:
        for i, key in enumerate(chosen):
            out[i] = views[key]

    def prepare() -> list[int]:
        return key_of(rng.integers(0, len(dense), batch // 10)).tolist()

    return [10 * t for t in measure.seconds(run, prepare)]


def adam_times(rows: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """A sparse Adam step on distinct rows of a table, and Adam on a dense array of all rows."""
    opt = hkv.optim.adam(1e-3)
    table = hkv.create(int(rows * SLOTS_PER_ROW[1]), ADAM_DIM)
    insert = jax.jit(hkv.find_or_insert, donate_argnums=0)
    for start in range(0, rows, 10 * ADAM_BATCH):
        table, _ = insert(
            table, hkv.Keys.from_numpy(key_of(np.arange(start, start + 10 * ADAM_BATCH)))
        )
    state = {"table": opt.init(table)}
    del table
    gradients = jnp.asarray(rng.standard_normal((ADAM_BATCH, ADAM_DIM), np.float32))
    update = jax.jit(opt.update, donate_argnums=0)
    find = jax.jit(hkv.find_or_insert, donate_argnums=0)

    def prepare() -> Any:
        distinct = rng.choice(rows, ADAM_BATCH, replace=False)
        state["table"], result = find(state["table"], hkv.Keys.from_numpy(key_of(distinct)))
        return result

    def run(result: Any) -> Any:
        state["table"] = update(state["table"], result, gradients)
        return state["table"]

    sparse = measure.seconds(run, prepare)
    state.clear()

    adam = optax.adam(1e-3)
    params = jnp.asarray(rng.standard_normal((rows, ADAM_DIM), np.float32))

    def dense_step(params: jax.Array, moments: Any, gradients: jax.Array) -> Any:
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    step = jax.jit(dense_step, donate_argnums=(0, 1))
    dense = {"state": (params, adam.init(params))}
    ones = jnp.asarray(rng.standard_normal((rows, ADAM_DIM), np.float32))
    del params

    def run_dense(_: Any) -> Any:
        dense["state"] = step(*dense["state"], ones)
        return dense["state"]

    return {"sparse": sparse, "dense": measure.seconds(run_dense)}


def peer_times(python: str | None, rng: np.random.Generator) -> dict[str, Any] | None:
    """TensorFlow Recommenders-Addons' CPU table beside ours, where an interpreter has it."""
    if python is None:
        return None
    peer = measure.peer(python, "peer_tfra.py", PEER_KEYS, DIM)

    keys = jax.device_put(hkv.Keys.from_numpy(rng.permutation(PEER_KEYS)))
    values = jnp.asarray(rng.standard_normal((PEER_KEYS, DIM), np.float32))
    insert = jax.jit(hkv.insert_or_assign, donate_argnums=0)
    # Without the table, which would be copied: it is not donated.
    find = jax.jit(lambda table, keys: hkv.find(table, keys)[1])
    state: dict[str, Any] = {}

    def run(table: Any) -> Any:
        state["table"], _ = insert(table, keys, values)
        return state["table"]

    capacity = int(PEER_KEYS * SLOTS_PER_ROW[1])
    ours = {"insert": measure.seconds(run, lambda: hkv.create(capacity, DIM))}
    ours["update"] = measure.seconds(lambda _: run(state["table"]))
    ours["lookup"] = measure.seconds(lambda _: find(state["table"], keys))
    np.testing.assert_array_equal(find(state["table"], keys[:1000]).values, values[:1000])
    return {
        "keys": PEER_KEYS,
        "peer": peer["seconds"],
        "versions": peer["versions"],
        "jax_hkv": ours,
    }


def on_one_core(rows: int, batch: int) -> float | None:
    """Median seconds of find in another process that has one core, or None without taskset."""
    if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2:
        return None
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, sys.executable, str(Path(__file__).resolve())]
    command += ["--only-find", "--rows", str(rows), "--batch", str(batch)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return measure.median(json.loads(output.splitlines()[-1]))


def ratios_of(raw: dict[str, Any]) -> dict[str, float]:
    """Speeds by speeds."""
    ratios = {}
    for name, times in raw["table"]["choices=1"].items():
        for other in ("numpy", "dict"):
            ratios[f"{name} / {other}"] = measure.median(raw[other]) / measure.median(times)
    if raw["one_core"] is not None:
        two = measure.median(raw["table"]["choices=1"]["find"])
        ratios["two threads / one"] = raw["one_core"] / two
    adam = raw["adam"]
    ratios["sparse adam / dense adam"] = measure.median(adam["dense"]) / measure.median(
        adam["sparse"]
    )
    if raw["peer"] is not None:
        for name, times in raw["peer"]["peer"].items():
            ours = measure.median(raw["peer"]["jax_hkv"][name])
            ratios[f"{name} / peer"] = measure.median(times) / ours
    return ratios


def main() -> None:
    """Measures, prints a table of ratios and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="a folder")
    parser.add_argument("--peer-python", help="an interpreter with tensorflow_recommenders_addons")
    parser.add_argument("--only-find", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows < 10 * ADAM_BATCH:
        parser.error(f"--rows must be {10 * ADAM_BATCH} or more, got {options.rows}")
    rng = np.random.default_rng(0)
    rows, batch = options.rows, options.batch
    if options.only_find:
        print(json.dumps(Timed(filled_table(rows, batch, 1), rows, batch, rng)(hkv.find)))
        return
    record = measure.surroundings() | {"rows": rows, "batch": batch, "dim": DIM}
    raw: dict[str, Any] = {
        "numpy": numpy_times(rows, batch, rng),
        "dict": dict_times(rows, batch, rng),
    }
    raw["table"] = {f"choices={c}": table_times(rows, batch, c, rng) for c in SLOTS_PER_ROW}
    raw["one_core"] = on_one_core(rows, batch)
    raw["adam"] = adam_times(rows, rng)
    raw["peer"] = peer_times(options.peer_python, rng)
    record |= {"seconds": raw, "ratios": ratios_of(raw), "targets": TARGETS}
    for choices, times in raw["table"].items():
        for name, runs in times.items():
            print(f"{name:18} {choices}  {batch / measure.median(runs) / 1e6:6.2f} million keys/s")
    for name, ratio in record["ratios"].items():
        print(f"{name:28} {ratio:7.2f}   target {TARGETS.get(name, float('nan')):5.1f}")
    print(measure.write("table_cpu", record, options.out))


if __name__ == "__main__":
    main()
