"""Training steps on a GPU: ten tables by themselves, and the whole of MLPerf's DLRM-DCNv2.

    python benchmarks/train_step.py [--out results/train_step.json]

Ten tables: dim 128, 1,048,570 ids a step from a power law, forward, backward and update, with SGD
and with Adam; the gradients of the rows are given. DLRM-DCNv2: the model of examples/dcnv2.py in
bfloat16 with float32 rows, fused Adagrad, ids made on the device. What it leaves out: the input
pipeline, all but one device, and rows beyond `--capacity-factor` (MLPerf's 40 million rows a table
do not fit beside their optimizer's; ids of rows that were evicted start anew).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import optax

import jax_hkv as hkv

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from dcnv2 import EPSILON_INSIDE_ROOT, LEARNING_RATE, DlrmDcnV2, Shape, embeddings  # noqa: E402
from dlrm import Inputs, mean_loss  # noqa: E402

TABLES, DIM = 10, 128
EXPONENT = 1.05
BATCHES = 4
IN_A_ROW = 10


def power_law(key: jax.Array, shape: tuple[int, ...], most: int) -> jax.Array:
    """The floor of a power law from 1 to `most`, less one."""
    power = 1.0 - EXPONENT
    drawn = (1.0 + jax.random.uniform(key, shape) * (float(most) ** power - 1.0)) ** (1.0 / power)
    return jnp.minimum(drawn, most).astype(jnp.int32) - 1


def in_a_row(step: Callable[[Any, int], Any], state: Any, runs: int) -> tuple[list[float], Any]:
    """Seconds a step, of steps that wait for each other on the device only."""
    for number in range(BATCHES):
        state = step(state, number)
    times = []
    for _ in range(runs):
        jax.block_until_ready(state)
        start = time.perf_counter()
        for number in range(IN_A_ROW):
            state = step(state, number % BATCHES)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / IN_A_ROW)
    return times, state


def ten_tables(optimizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Forward, backward and update of ten tables that are one."""
    names = [f"table {number}" for number in range(TABLES)]
    capacity = int(1.7 * options.ids)
    collection = hkv.Collection(
        [hkv.TableConfig(name, capacity, DIM, optimizer=optimizer) for name in names],
        [hkv.Feature(name, name) for name in names],
    )
    (group,) = collection.groups
    shape = (options.positions // TABLES,)
    keys = jax.random.split(jax.random.key(0), (BATCHES, TABLES))
    ids = [
        {name: power_law(key, shape, options.ids) for name, key in zip(names, row, strict=True)}
        for row in keys
    ]
    gradients = jax.random.normal(jax.random.key(1), (TABLES * shape[0], DIM))

    def one(table: hkv.Table, inputs: Any, gradients: jax.Array) -> Any:
        tables, found = collection.lookup({group.name: table}, inputs, train=True)
        result = found.results[group.name]
        assert result is not None
        rows = collection.spread(found.rows, found.parts)
        return optimizer.update(tables[group.name], result, gradients), rows, result.counts

    step = jax.jit(one, donate_argnums=0)
    unique = []

    def run(table: hkv.Table, number: int) -> hkv.Table:
        table, _, counts = step(table, ids[number], gradients)
        unique.append(counts.unique)
        return table

    runs, table = in_a_row(run, collection.create()[group.name], options.runs)
    assert int(table.optimizer.skipped[0]) == 0
    return {"seconds": runs, "unique": int(unique[0]), "positions": TABLES * shape[0]}


def dense_tables(options: argparse.Namespace) -> dict[str, Any]:
    """The same ids in a dense array with a row for each: XLA's gather, and its scatter for SGD."""
    places = [
        power_law(key, (options.positions // TABLES * TABLES,), options.ids)
        + jnp.arange(options.positions // TABLES * TABLES) % TABLES * options.ids
        for key in jax.random.split(jax.random.key(0), BATCHES)
    ]
    gradients = jax.random.normal(jax.random.key(1), (len(places[0]), DIM))

    def one(rows: jax.Array, places: jax.Array, gradients: jax.Array) -> Any:
        return rows.at[places].add(-0.01 * gradients), rows[places]

    step = jax.jit(one, donate_argnums=0)
    rows = jnp.ones((TABLES * options.ids, DIM))
    runs, _ = in_a_row(lambda rows, n: step(rows, places[n], gradients)[0], rows, options.runs)
    return {"seconds": runs}


def dcnv2(options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of DLRM-DCNv2."""
    shape = Shape(batch=options.batch)
    tables = embeddings(shape, options.capacity_factor)
    model = DlrmDcnV2(shape, tables, jnp.bfloat16)

    def batch(key: jax.Array) -> Inputs:
        columns = jax.random.split(key, len(shape.rows) + 2)
        ids = [
            power_law(column, (shape.batch, hot), rows)
            for column, hot, rows in zip(columns, shape.hotness, shape.rows, strict=False)
        ]
        words = jnp.concatenate(ids, axis=1).astype(jnp.uint32)
        keys = hkv.Keys(jnp.stack([words, jnp.zeros_like(words)], axis=-1))
        labels = jax.random.bernoulli(columns[-1], 0.3, (shape.batch,)).astype(jnp.float32)
        integers = jax.random.poisson(columns[-2], 5.0, (shape.batch, 13)).astype(jnp.float32)
        return Inputs(labels, integers, keys, jnp.ones((shape.batch,), jnp.bool_))

    made = [jax.jit(batch)(key) for key in jax.random.split(jax.random.key(2), BATCHES)]
    dense = optax.adagrad(LEARNING_RATE, 0.0, EPSILON_INSIDE_ROOT)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), made[0], tx=dense)
    step = hkv.linen.train_step(lambda apply, x: mean_loss(apply(x, train=True), x))
    losses = []

    def run(state: Any, number: int) -> Any:
        state, info = step(state, made[number])
        losses.append(info.loss)
        return state

    runs, state = in_a_row(run, state, options.runs)
    assert float(losses[-1]) < float(losses[0]), "it does not learn its batches"
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    return {
        "seconds": runs,
        "samples_per_second": shape.batch / measure.median(runs),
        "capacity": table.capacity,
        "load": float(hkv.load_factor(table)),
        "left_out": "input pipeline, several devices, rows beyond the capacity",
    }


def main() -> None:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--positions", type=int, default=1_048_570, help="ids a step, of ten tables")
    add("--ids", type=int, default=1_000_000, help="different ones of each of ten tables")
    add("--batch", type=int, default=6_912, help="samples a step of DLRM-DCNv2")
    add("--capacity-factor", type=float, default=0.25, help="rows of MLPerf's tables kept")
    add("--runs", type=int, default=measure.RUNS)
    add("--out", type=Path, default=measure.RESULTS / "train_step.json")
    options = parser.parse_args()
    record: dict[str, Any] = measure.surroundings() | {"settings": vars(options) | {"out": None}}
    for name, optimizer in (("sgd", hkv.optim.sgd(0.01)), ("adam", hkv.optim.adam(1e-3))):
        record[f"ten tables {name}"] = found = ten_tables(optimizer, options)
        milliseconds = 1e3 * measure.median(found["seconds"])
        print(f"ten tables, {name}: {milliseconds:.3f} ms a step, {found['unique']} distinct ids")
        measure.write(options.out.stem, record, options.out.parent)
    record["dense sgd"] = dense_tables(options)
    print(f"dense, sgd: {1e3 * measure.median(record['dense sgd']['seconds']):.3f} ms a step")
    record["dcnv2"] = found = dcnv2(options)
    print(f"DLRM-DCNv2: {found['samples_per_second']:.0f} samples/s")
    print(measure.write(options.out.stem, record, options.out.parent))


if __name__ == "__main__":
    main()
