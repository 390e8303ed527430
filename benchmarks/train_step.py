"""Training steps on a GPU: ten tables by themselves, and the whole of MLPerf's DLRM-DCNv2.

    python benchmarks/train_step.py [--peer-python PYTHON] [--out results/train_step.json]

Ten tables: dim 128, 1,048,570 ids a step from a power law, forward, backward and update, with SGD
and with Adam; the gradients of the rows are given, and a sample of the rows is compared with double
precision after the last step. Beside them, on the same ids: a dense array of XLA's with a scatter
for SGD, and with ``--peer-python`` PyTorch's ``nn.EmbeddingBag`` with SGD and SparseAdam, each with
a row for every id there may be. DLRM-DCNv2: the model of examples/dcnv2.py in bfloat16 with float32
rows, fused Adagrad, ids made on the device. What it leaves out: the input pipeline, all but one
device, and rows beyond `--capacity-factor` (MLPerf's 40 million rows a table do not fit beside
their optimizer's; ids of rows that were evicted start anew). Both are timed as XLA compiles them,
and with what does not wait for each other side by side in a CUDA graph. After the steps that are
timed some are watched by JAX's profiler: which kernels their time goes to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expected
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
import profile_step

import jax_hkv as hkv

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from dcnv2 import EPSILON_INSIDE_ROOT, LEARNING_RATE, DlrmDcnV2, Shape, embeddings  # noqa: E402
from dlrm import Inputs, mean_loss  # noqa: E402

from jax_hkv._compat import without_rematerialization  # noqa: E402

TABLES, DIM = 10, 128
POSITIONS = 1_048_570  # of a step
EXPONENT = 1.05
BATCHES = 4
IN_A_ROW = 10
# Of each table, so that a step has the published number of distinct ids (TorchRec's ten tables).
IDS, DISTINCT = 1_685_000, 350_280
SETTINGS = ("positions", "ids", "batch", "capacity_factor", "runs")
RATE = 1e-3
SAMPLE = 8  # ids of each of ten tables, looked for in all of them
LARGEST_ERROR = 1e-4  # of a sampled row, by one more than its size: sums of thousands are rounded
# Of XLA: kernels one after the other, but for what hides latencies, or as operands allow.
SCHEDULES = {"": "LHS", ", concurrent": "CONCURRENT"}


def power_law(key: jax.Array, shape: tuple[int, ...], most: int) -> jax.Array:
    """The floor of a power law from 1 to `most`, less one."""
    power = 1.0 - EXPONENT
    drawn = (1.0 + jax.random.uniform(key, shape) * (float(most) ** power - 1.0)) ** (1.0 / power)
    return jnp.minimum(drawn, most).astype(jnp.int32) - 1


def compiled(step: Any, schedule: str, *arguments: Any) -> tuple[Any, dict[str, int]]:
    """A step for arguments like these, and the bytes that it needs beside them."""
    options = {"xla_gpu_command_buffer_scheduling_mode": schedule}
    lowered = step.lower(*arguments)
    with without_rematerialization():  # as train_step, when it is called
        made = lowered.compile(options)
    memory = made.memory_analysis()
    return made, {"temporary_bytes": 0 if memory is None else memory.temp_size_in_bytes}


def a_row(step: Callable[[Any, int], Any], state: Any) -> Any:
    """The state after some steps."""
    for number in range(IN_A_ROW):
        state = step(state, number % BATCHES)
    return state


def in_a_row(step: Callable[[Any, int], Any], state: Any, runs: int) -> tuple[list[float], Any]:
    """Seconds a step, of steps that wait for each other on the device only."""
    for number in range(BATCHES):
        state = step(state, number)
    times = []
    for _ in range(runs):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(a_row(step, state))
        times.append((time.perf_counter() - start) / IN_A_ROW)
    return times, state


def watched(step: Callable[[Any, int], Any], state: Any) -> tuple[dict[str, Any], Any]:
    """What a step's kernels take, by JAX's profiler, and the state after some."""

    def steps() -> Any:
        nonlocal state
        state = a_row(step, state)
        return state

    profile = profile_step.profile_of(steps)
    return profile_step.by_kernel(profile, IN_A_ROW), state


def make_ids(options: argparse.Namespace) -> jax.Array:
    """The ids of each batch and table, ``int32[batches, tables, positions]``."""
    shape = (BATCHES, TABLES, options.positions // TABLES)
    return power_law(jax.random.key(0), shape, options.ids)


def row_gradients(options: argparse.Namespace) -> jax.Array:
    """Of the rows of all tables, table by table."""
    return jax.random.normal(jax.random.key(1), (options.positions // TABLES * TABLES, DIM))


def ten_tables(name: str, schedule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Forward, backward and update of ten tables that are one."""
    every = make_ids(options)
    optimizer = getattr(hkv.optim, name)(RATE)
    names = [f"table {number}" for number in range(TABLES)]
    capacity = int(1.7 * options.ids)
    collection = hkv.Collection(
        [hkv.TableConfig(name, capacity, DIM, optimizer=optimizer) for name in names],
        [hkv.Feature(name, name) for name in names],
    )
    (group,) = collection.groups
    ids = [dict(zip(names, batch, strict=True)) for batch in every]
    gradients = row_gradients(options)

    def one(table: hkv.Table, before: Any, inputs: Any, gradients: jax.Array) -> Any:
        del before  # rows of the step before, whose memory those of this one take
        tables, found = collection.lookup({group.name: table}, inputs, train=True)
        result = found.results[group.name]
        assert result is not None
        # All features' rows as they lie: apart, as results, each would be copied.
        rows = found.rows[group.name]
        return optimizer.update(tables[group.name], result, gradients), rows, result.counts

    table, before = collection.create()[group.name], jnp.zeros(gradients.shape)
    step = jax.jit(one, donate_argnums=(0, 1), keep_unused=True)
    step, memory = compiled(step, schedule, table, before, ids[0], gradients)
    unique, order = [], []

    def run(state: Any, number: int) -> Any:
        table, rows, counts = step(*state, ids[number], gradients)
        unique.append(counts.unique)
        order.append(number)
        return table, rows

    sample = np.unique(np.asarray(every[0, :, :SAMPLE]))

    def sampled(table: hkv.Table) -> np.ndarray:
        inputs = dict.fromkeys(names, jnp.asarray(sample))
        _, found = collection.lookup({group.name: table}, inputs)
        rows = collection.spread(found.rows, found.parts)
        return np.concatenate([np.asarray(rows[name]) for name in names])

    start = sampled(table)
    runs, state = in_a_row(run, (table, before), options.runs)
    kernels, (table, _) = watched(run, state)
    assert int(table.optimizer.skipped[0]) == 0
    if options.ids == IDS and options.positions == POSITIONS:
        assert abs(int(unique[0]) / DISTINCT - 1) < 0.005, int(unique[0])
    sums = sampled_sums(np.asarray(every), sample, np.asarray(gradients))
    expect = {"sgd": expected.sgd, "adam": expected.adam}[name]
    should = expect(start, (sums[number] for number in order), RATE)
    error = float(np.max(np.abs(sampled(table) - should) / (1 + np.abs(should))))
    assert error < LARGEST_ERROR, error
    found = {"unique": int(unique[0]), "rows": should.shape[0], "error": error}
    return {"seconds": runs, **found, **memory, "kernels": kernels}


def sampled_sums(
    every: np.ndarray, sample: np.ndarray, gradients: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each batch, which rows of the sample of each table it touches, and with what."""
    found = []
    for batch in every:
        numbers = np.searchsorted(sample, batch).clip(max=len(sample) - 1)
        is_sampled = (sample[numbers] == batch).reshape(-1)
        rows = (numbers + len(sample) * np.arange(TABLES)[:, None]).reshape(-1)
        found.append(expected.sums_of(rows[is_sampled], gradients[is_sampled]))
    return found


def dense_places(options: argparse.Namespace) -> jax.Array:
    """Rows of the ids in an array that has one for each id of each table."""
    tables = jnp.arange(TABLES)[:, None]
    return (make_ids(options) + options.ids * tables).reshape(BATCHES, -1)


def dense_tables(options: argparse.Namespace) -> dict[str, Any]:
    """The same ids in a dense array with a row for each: XLA's gather, and its scatter for SGD."""
    places = dense_places(options)
    gradients = row_gradients(options)

    def one(rows: jax.Array, before: jax.Array, places: jax.Array, gradients: jax.Array) -> Any:
        del before
        return rows.at[places].add(-RATE * gradients), rows[places]

    step = jax.jit(one, donate_argnums=(0, 1), keep_unused=True)
    state = jnp.ones((TABLES * options.ids, DIM)), jnp.zeros(gradients.shape)
    runs, _ = in_a_row(lambda state, n: step(*state, places[n], gradients), state, options.runs)
    return {"seconds": runs}


def torch_tables(device: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same ids in PyTorch, which gets the device's memory for itself."""
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.npz"
        places = np.asarray(dense_places(options))
        np.savez(path, batches=places, shape=np.array([TABLES * options.ids, DIM]))
        return measure.peer(
            options.peer_python,
            "peer_torch.py",
            path,
            rate=RATE,
            runs=options.runs,
            in_a_row=IN_A_ROW,
            optimizers=["sgd", "adam"],
            device=device,
        )


def dcnv2(schedule: str, options: argparse.Namespace) -> dict[str, Any]:
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
    step, memory = compiled(step, schedule, state, made[0])
    losses = []

    def run(state: Any, number: int) -> Any:
        state, info = step(state, made[number])
        losses.append(info.loss)
        return state

    runs, state = in_a_row(run, state, options.runs)
    kernels, state = watched(run, state)
    assert float(losses[-1]) < float(losses[0]), "it does not learn its batches"
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    return {
        "seconds": runs,
        "samples_per_second": shape.batch / measure.median(runs),
        "capacity": table.capacity,
        "load": float(hkv.load_factor(table)),
        "left_out": "input pipeline, several devices, rows beyond the capacity",
        **memory,
        "kernels": kernels,
    }


def main() -> None:
    """Measures, prints and writes the record after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--positions", type=int, default=POSITIONS, help="ids a step, of ten tables")
    add("--ids", type=int, default=IDS, help="different ones of each of ten tables")
    add("--batch", type=int, default=6_912, help="samples a step of DLRM-DCNv2")
    add("--capacity-factor", type=float, default=0.25, help="rows of MLPerf's tables kept")
    add("--runs", type=int, default=measure.RUNS)
    add("--peer-python", help="an interpreter with torch")
    add("--resume", action="store_true", help="go on with what --out has")
    add("--out", type=Path, default=measure.RESULTS / "train_step.json")
    options = parser.parse_args()
    profile_step.launch_as_always()
    settings = {name: value for name, value in vars(options).items() if name in SETTINGS}
    record = measure.begun(options.out, options.resume, {})
    if record.get("settings") != settings:
        record = {}
    record |= measure.apart(measure.surroundings) | {"settings": settings}

    def measured(part: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """A part that the record does not have; each of its medians is printed."""
        if part in record:
            return
        record[part] = found = measure.apart(function, *arguments, options)
        seconds = found["seconds"]
        runs = seconds if isinstance(seconds, dict) else {"": seconds}
        for name, times in runs.items():
            print(f"{part} {name}: {1e3 * measure.median(times):.3f} ms a step", flush=True)
        measure.write(options.out.stem, record, options.out.parent)

    for suffix, schedule in SCHEDULES.items():
        for name in ("sgd", "adam"):
            measured(f"ten tables {name}{suffix}", ten_tables, name, schedule)
        measured(f"dcnv2{suffix}", dcnv2, schedule)
    measured("dense sgd", dense_tables)
    if options.peer_python:
        measured("torch", torch_tables, "cpu" if record["device"] == "cpu" else "cuda")
    print(options.out)


if __name__ == "__main__":
    main()
