"""The table part of a training step on a CPU, against a dense XLA embedding and PyTorch.

    python benchmarks/train_step_cpu.py [--peer-python PYTHON]

26 features of one id each, looked up in one physical table, and one Adam step on what they touched;
the gradients of the looked-up rows are given. Dense: `W[ids]`, a scatter of the gradients and Adam
over all rows. PyTorch: `nn.EmbeddingBag(sparse=True)` with `SparseAdam`, in an interpreter that has
torch. Everything is measured in one run; results go to benchmarks/results/train_step_cpu.json.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import expected
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax

import jax_hkv as hkv

RATE = 1e-3
BATCHES = 8
HASH = 2_654_435_761  # an odd factor (Knuth, The Art of Computer Programming 3, 6.4)
# One candidate bucket evicts from about 65 % on: all rows fit.
SLOTS_PER_ROW = 1.7
# What is measured, and the least ratio.
TARGETS = {"dense": 3.0, "torch": 1.5}


def power_law(exponent: float, most: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """The floor of a power law from 1 to `most`."""
    power = 1.0 - exponent
    drawn = (1.0 + rng.random(size) * (most**power - 1.0)) ** (1.0 / power)
    return np.minimum(drawn.astype(np.int64), most)


def make_batches(options: argparse.Namespace, rng: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of a dense array, `int64[batch, features]`; each feature has its own rows.

    The ids are hashed to them, because a dense array cannot hold a row for each of them.
    """
    rows = options.rows // options.features
    first = np.arange(options.features) * rows
    shape = (options.batch, options.features)
    size = int(np.prod(shape))
    return [
        (power_law(options.exponent, options.ids, size, rng) * HASH % rows).reshape(shape) + first
        for _ in range(BATCHES)
    ]


def own_times(
    options: argparse.Namespace, batches: list[np.ndarray], gradients: Any, start: Any
) -> tuple[list[float], np.ndarray]:
    """Seconds a step, and the rows after the checked steps, by dense row number."""
    features = range(options.features)
    optimizer = hkv.optim.adam(RATE)
    capacity = int(options.rows // options.features * SLOTS_PER_ROW)
    collection = hkv.Collection(
        [
            hkv.TableConfig(f"table {f}", capacity, options.dim, optimizer=optimizer)
            for f in features
        ],
        [hkv.Feature(f"feature {f}", f"table {f}") for f in features],
    )
    (group,) = collection.groups
    table = collection.create()[group.name]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(table: hkv.Table, inputs: Any, gradients: Any) -> Any:
        tables, found = collection.lookup({group.name: table}, inputs, train=True)
        result = found.results[group.name]
        table = optimizer.update(tables[group.name], result, gradients)
        return table, collection.spread(found.rows, found.parts)

    # A collection's rows are those of its first feature, then those of its second, ...
    gradients = gradients.reshape(-1, options.features, options.dim).swapaxes(0, 1)
    gradients = gradients.reshape(-1, options.dim)

    def inputs_of(rows: np.ndarray) -> dict[str, hkv.Keys]:
        return {f"feature {f}": hkv.Keys.from_numpy(rows[:, f]) for f in features}

    insert = jax.jit(lambda table, keys, rows: hkv.insert_or_assign(table, keys, rows)[0],
                     donate_argnums=0)  # fmt: skip
    everything = physical_keys(collection, np.arange(options.rows), options)
    for part in np.array_split(np.arange(options.rows), 10):
        table = insert(table, everything[part], start[part])
    assert int(hkv.size(table)) == options.rows, "not all rows fit"
    state = {"table": table}
    del table
    prepared = iter(range(10**9))

    def run(number: int) -> Any:
        inputs = inputs_of(batches[number % BATCHES])
        state["table"], rows = step(state["table"], inputs, gradients)
        return state["table"], rows

    for number in range(BATCHES):
        run(number)
    rows = np.asarray(hkv.find(state["table"], everything)[1].values)
    keys = jax.device_put([inputs_of(batch) for batch in batches])

    def run_ready(number: int) -> Any:
        state["table"], rows = step(state["table"], keys[number % BATCHES], gradients)
        return state["table"], rows

    return measure.seconds(run_ready, lambda: next(prepared), runs=options.runs), rows


def physical_keys(
    collection: hkv.Collection, rows: np.ndarray, options: argparse.Namespace
) -> hkv.Keys:
    """The keys of dense row numbers in the collection's physical table."""
    (group,) = collection.groups
    number = np.minimum(rows // (options.rows // options.features), options.features - 1)
    return hkv.Keys.from_numpy(
        rows.astype(np.uint64) | number.astype(np.uint64) << np.uint64(64 - group.bits)
    )


def dense_times(
    options: argparse.Namespace, batches: list[np.ndarray], gradients: Any, start: Any
) -> list[float]:
    """Adam over all rows, touched or not, as `nn.Embed` with optax does it."""
    adam = optax.adam(RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(rows: Any, moments: Any, ids: Any, gradients: Any) -> Any:
        found = rows[ids]
        dense = jnp.zeros_like(rows).at[ids].add(gradients)
        updates, moments = adam.update(dense, moments, rows)
        return optax.apply_updates(rows, updates), moments, found

    rows = jnp.array(start, copy=True)
    state = {"rows": rows, "moments": adam.init(rows)}
    ready = [jnp.asarray(batch.reshape(-1), jnp.int32) for batch in batches]
    numbers = iter(range(10**9))
    del rows

    def run(number: int) -> Any:
        state["rows"], state["moments"], found = step(
            state["rows"], state["moments"], ready[number % BATCHES], gradients
        )
        return state["rows"], found

    return measure.seconds(run, lambda: next(numbers), runs=options.runs)


def torch_times(
    python: str | None, options: argparse.Namespace, batches: Any, gradients: Any, start: Any
) -> dict[str, Any] | None:
    """The same batches in another interpreter, and the rows it ends with."""
    if python is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.npz"
        np.savez(path, batches=np.stack(batches), gradients=gradients, start=start)
        found = measure.peer(python, "peer_torch.py", path, rate=RATE, runs=options.runs)
        return found | {"rows": np.load(path.with_suffix(".npy"))}


def check(batches: Any, gradients: Any, start: Any, rows: Any) -> float:
    """The largest difference from lazy Adam in double precision, after all batches."""
    steps = (expected.sums_of(batch, gradients) for batch in batches)
    return float(np.abs(expected.adam(start, steps, RATE) - rows).max())


def main() -> None:
    """Measures, checks, prints ratios and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=100_000_000, help="of each feature")
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    parser.add_argument("--peer-python", help="an interpreter with torch")
    options = parser.parse_args()
    options.rows -= options.rows % options.features
    rng = np.random.default_rng(0)
    batches = make_batches(options, rng)
    positions = options.batch * options.features
    gradients = jnp.asarray(rng.standard_normal((positions, options.dim), np.float32))
    start = jnp.asarray(0.1 * rng.standard_normal((options.rows, options.dim), np.float32))

    seconds: dict[str, Any] = {}
    seconds["jax_hkv"], rows = own_times(options, batches, gradients, start)
    errors = {"jax_hkv": check(batches, gradients, start, rows)}
    seconds["dense"] = dense_times(options, batches, gradients, start)
    peer = torch_times(options.peer_python, options, batches, gradients, start)
    record = measure.surroundings()
    if peer is not None:
        seconds["torch"] = peer["seconds"]["adam"]
        record["versions"] |= peer["versions"]
        errors["torch"] = check(batches, gradients, start, peer["rows"])
    # Where a gradient is next to zero PyTorch's eps, which is not corrected for its bias, shows.
    assert errors["jax_hkv"] < 1e-5 and errors.get("torch", 0.0) < RATE, errors
    medians = {name: measure.median(runs) for name, runs in seconds.items()}
    ratios = {n: medians[n] / medians["jax_hkv"] for n in medians if n != "jax_hkv"}
    settings = {
        n: getattr(options, n) for n in ("rows", "ids", "features", "batch", "dim", "exponent")
    }
    settings["unique"] = int(np.mean([len(np.unique(batch)) for batch in batches]))
    record |= settings | {"seconds": seconds, "errors": errors}
    record |= {"ratios": ratios, "targets": TARGETS}
    for name, median in medians.items():
        ratio = f"{ratios[name]:5.2f} times, target {TARGETS[name]:.1f}" if name in ratios else ""
        print(f"{name:10} {1e3 * median:7.1f} ms a step   {ratio}")
    print(f"{settings['unique']} distinct rows a step")
    print(measure.write("train_step_cpu", record, options.out))


if __name__ == "__main__":
    main()
