"""Row operations and fused optimizers on a GPU, as shares of a plain gather of random rows.

    python benchmarks/row_operations.py [--dims 8 32] [--out results/row_operations.json]

A table is filled to load factor .75, and batches of keys that are present are looked up once: each
key once, or repeated by a power law. Timed are then gathering their rows, scattering rows to them,
sums of bags of eight of them, and one update by an optimizer from gradients drawn by chance: in a
row of calls (device), with all that is done besides (bags are looked up; of an update equal keys
are found and slots verified), and by JAX's profiler kernel by kernel. Bytes are counted: a row that
is read or written, a gradient, and the optimizer's rows. The share is that of the kernels that move
them, once each key is known and verified (of repeated keys those that add gradients up, too): of
the bytes a second of `random_gather.cu` (`--gather`), else of XLA's gather, with as many rows.
Small sizes run on a CPU too, where there are no kernels to see, and XLA finds the equal keys of a
row's updates once for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
import profile_step
import profile_table
import table as of_table
from train_step import power_law

import jax_hkv as hkv
from jax_hkv import rows
from jax_hkv.table import with_clock

LOAD = 0.75
RATE = 1e-3
HOTNESS = 8  # keys of a bag


class Kind(NamedTuple):
    """An optimizer, and how many of its numbers a row of so many elements has beside it."""

    make: Any
    numbers: Any


OPTIMIZERS = {
    "sgd": Kind(hkv.optim.sgd, lambda dim: 0),
    "rowwise_adagrad": Kind(hkv.optim.rowwise_adagrad, lambda dim: 1),
    "adagrad": Kind(hkv.optim.adagrad, lambda dim: dim),
    "rowwise_adam": Kind(hkv.optim.rowwise_adam, lambda dim: dim + 1),
    "adam": Kind(hkv.optim.adam, lambda dim: 2 * dim),
}


def gather(table: hkv.Table, result: hkv.InsertResult) -> tuple[hkv.Table, Any]:
    """Rows of the keys of a lookup."""
    clock, values = rows.gather(table.clock, table.values, result.slots, name=table.name)
    return with_clock(table, clock), values


def scatter(
    table: hkv.Table, result: hkv.InsertResult, new: jax.Array
) -> tuple[hkv.Table, jax.Array]:
    """Other rows for the keys of a lookup."""
    order = rows.positions(result.slots.shape[0])
    clock, values = rows.scatter(
        table.clock, table.values, result.slots, order, new, name=table.name
    )
    return dataclasses.replace(with_clock(table, clock), values=values), clock


def update(
    optimizer: Any, table: hkv.Table, result: hkv.InsertResult, gradients: jax.Array
) -> tuple[hkv.Table, jax.Array]:
    """A step of an optimizer on the rows of a lookup."""
    table = optimizer.update(table, result, gradients)
    return table, table.clock


class Part(NamedTuple):
    """What is measured of a table.

    Attributes:
      name: of the operation.
      does: of (table, batch, *rest), to the table and a result.
      batches: the table's, that it takes turns with.
      rest: of the arguments.
      kernels: parts of the names of those that move rows.
      bytes: that one batch moves, by count.
    """

    name: str
    does: Any
    batches: list[Any]
    rest: tuple[Any, ...]
    kernels: tuple[str, ...]
    bytes: int


def measured_part(part: Part, table: hkv.Table, options: Any) -> tuple[dict[str, Any], hkv.Table]:
    """Seconds and kernels of an operation, and the table after it."""
    call, given = of_table.call_of(part.does), (part.batches, part.rest)
    wall, device, table = of_table.timed(call, table, *given, options, is_fresh=False)
    kernels, table = profile_table.kernels_of(call.once, table, *given)
    moving = [
        own["microseconds"]
        for title, own in kernels.items()
        if any(name in title for name in part.kernels) and "Prepare" not in title
    ]
    found = {
        "wall": wall, "device": device, "bytes": part.bytes, "kernels": kernels,
        "keys_per_second": options.batch / measure.median(device),
        "microseconds_of_rows": sum(moving) if moving else None,
    }  # fmt: skip
    return found, table


def measured(dim: int, names: list[str], deadline: float, options: Any) -> dict[str, Any]:
    """Operations on rows of one size, those with these names, on one table after the other."""
    most = max(OPTIMIZERS[name].numbers(dim) for name in options.optimizers)
    slots, batch = of_table.fitting(options.slots, 4 * (dim + most), 0.6), options.batch
    table, offered = of_table.filled(of_table.Case(dim, LOAD, 1), slots, batch)
    rng = np.random.default_rng(dim)
    draw = functools.partial(of_table.batches, "present", table, offered, batch, rng)
    keys = [draw(number) for number in range(of_table.BATCHES)]
    if any(each.shape[0] < batch for each in keys):
        raise SystemExit("a table this small has no batch of present keys: give less --batch")
    places = [power_law(jax.random.key(n), (batch,), batch) for n in range(len(keys))]
    repeated = [own[place] for own, place in zip(keys, places, strict=True)]
    distinct = [len(np.unique(place)) for place in places]
    look_up = jax.jit(hkv.find_or_insert, donate_argnums=0)
    looked_up: list[list[Any]] = [[], []]
    for kept, own in zip(looked_up, (keys, repeated), strict=True):
        for each in own:
            table, found = look_up(table, each)
            assert not np.asarray(found.status == hkv.Status.INSERTED).any()
            kept.append(found)
    given = jnp.asarray(rng.standard_normal((batch, dim), np.float32))
    row = 4 * dim
    bags = [own.reshape(batch // HOTNESS, HOTNESS) for own in keys]
    pooled_bytes = batch // HOTNESS * (HOTNESS + 1) * row
    parts = [
        Part("gather", gather, looked_up[0], (), ("GatherRows",), 2 * row * batch),
        Part("scatter", scatter, looked_up[0], (given,), ("ScatterRows",), 2 * row * batch),
        Part("find_pooled", hkv.find_pooled, bags, (), ("PoolRows",), pooled_bytes),
    ]
    record: dict[str, Any] = {"slots": slots, "distinct": distinct, "left_out": []}
    record["operations"] = operations = {}
    for name in names:
        if time.time() > deadline:
            record["left_out"].append(name)
            continue
        if name not in OPTIMIZERS:
            (part,) = (each for each in parts if each.name == name)
            operations[name], table = measured_part(part, table, options)
            continue
        kind = OPTIMIZERS[name]
        optimizer = kind.make(RATE)
        table = optimizer.init(dataclasses.replace(table, optimizer=None))
        table = checked(optimizer, table, looked_up[0][0], given)
        step = functools.partial(update, optimizer)
        of_key = 2 * row + 8 * kind.numbers(dim)
        some = int(measure.median(list(map(float, distinct))))
        for title, results, count in (
            (name, looked_up[0], batch),
            (f"{name}, keys repeated", looked_up[1], some),
        ):
            bytes_ = batch * row + count * of_key
            part = Part(title, step, results, (given,), ("UpdateRows", "SumTree"), bytes_)
            operations[title], table = measured_part(part, table, options)
    return record


def checked(
    optimizer: Any, table: hkv.Table, result: hkv.InsertResult, given: jax.Array
) -> hkv.Table:
    """The table after an update that changed the rows, those of SGD as it should."""
    some = np.asarray(result.slots[:1000])
    before = np.asarray(table.values[some])
    table, _ = jax.jit(functools.partial(update, optimizer), donate_argnums=0)(table, result, given)
    changed = np.asarray(table.values[some])
    assert (changed != before).any(axis=-1).all(), "rows were not updated"
    if optimizer.rule.name == "sgd":
        step = np.float32(RATE) * np.asarray(given[:1000])
        np.testing.assert_allclose(changed, before - step, rtol=1e-5, atol=1e-6)
    return table


def report(record: dict[str, Any], dim: int) -> None:
    """Adds shares of the gather to what was found of a row size, and prints it."""
    ceilings = record["ceilings"][str(dim)]
    ceiling = ceilings.get("random gather", ceilings["xla gather"])
    for name, own in record["dims"][str(dim)]["operations"].items():
        rate, taken = own["keys_per_second"] / 1e9, own["microseconds_of_rows"]
        own["share"] = None if taken is None else own["bytes"] / (1e-6 * taken) / ceiling
        seen = "" if taken is None else f"; rows {taken:.1f} us, {100 * own['share']:.1f} %"
        print(f"  dim {dim:3} {name:31} {rate:6.3f} billion keys/s{seen}", flush=True)


def main() -> None:
    """Measures row size by row size, and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = of_table.add_arguments(parser, 150.0, "row_operations.json")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--slots", type=int, default=2**26, help="at most (%(default)s)")
    options = parser.parse_args()
    deadline = time.time() + options.budget
    profile_step.launch_as_always()
    record = measure.begun(options.out, options.resume, {"ceilings": {}, "dims": {}})
    record |= measure.apart(measure.surroundings) | {"batch": options.batch}
    names = ["gather", "scatter", "find_pooled", *options.optimizers]
    for dim in options.dims:
        found = record["dims"].setdefault(str(dim), {"operations": {}, "left_out": names})
        if found["left_out"] and time.time() < deadline:
            new = measure.apart(measured, dim, found["left_out"], deadline, options)
            record["dims"][str(dim)] = new | {"operations": found["operations"] | new["operations"]}
            if str(dim) not in record["ceilings"]:
                record["ceilings"][str(dim)] = of_table.ceilings_of(dim, options, new["slots"])
            report(record, dim)
        measure.write(options.out.stem, record, options.out.parent)
    left_out = sum(len(own["left_out"]) for own in record["dims"].values())
    print(f"{left_out} left out; {options.out}")


if __name__ == "__main__":
    main()
