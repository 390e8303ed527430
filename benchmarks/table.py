"""Every operation of one table on a GPU: keys a second, and which share of the memory that is.

    python benchmarks/table.py [--out results/table.json] [--budget SECONDS]

The recipe of the peer (HierarchicalKV's own benchmark): the table is filled with consecutive keys
until its load factor is reached, then batches of 2^20 keys are timed, of which 60 % are among those
inserted last and 40 % are absent, or all of which are present. A call is timed twice: alone, until
its result is there (wall), and in a row of calls that wait for each other on the device only
(device). Calls that change what they measure start from a fresh copy of the table each, which is
not timed: a row of them has as many calls as copies fit into the memory.

What does not fit into the budget is left out and said, and measured by the next call with
`--resume`. Tables are made half as large until two of them fit into the device's memory. Small
sizes run on a CPU too, to try the script.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_hkv as hkv
from jax_hkv import index, rows

IN_A_ROW = 10  # calls of one device measurement, at most
RECENT = 8  # batches: hits of the mixed pattern are among the keys of so many last ones
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Bytes of the index that a key moves at least: 128 of digests, 32 each of keys and scores.
DIGESTS, SECTOR = 128, 32


class Case(NamedTuple):
    """A table to be measured."""

    dim: int
    load: float
    choices: int


class Timed(NamedTuple):
    """Raw seconds of an operation's runs, and the bytes that it moves by count."""

    wall: list[float]
    device: list[float]
    bytes: int


def keys_of(numbers: np.ndarray) -> hkv.Keys:
    """Keys of consecutive numbers, on the device."""
    return jax.device_put(hkv.Keys.from_numpy(numbers.astype(np.uint64)))


def copy_of(table: hkv.Table) -> hkv.Table:
    """In memory of its own, so that it can be donated."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), table))


def filled(case: Case, slots: int, batch: int) -> tuple[hkv.Table, int]:
    """A table at its load factor, and how many keys were offered: 0, 1, 2, ..."""
    table = hkv.create(slots, case.dim, choices=case.choices, init=hkv.initializers.uniform(-1, 1))
    insert = jax.jit(lambda table, keys: hkv.find_or_insert(table, keys)[0], donate_argnums=0)
    offered = 0
    while True:
        load = float(hkv.load_factor(table))
        full = case.load == 1 and offered >= 1.18 * slots and load > 0.99
        if (case.load < 1 and load >= case.load) or full or offered >= 2 * slots:
            return table, offered
        table = insert(table, keys_of(np.arange(offered, offered + batch)))
        offered += batch


def batches(pattern: str, table: hkv.Table, offered: int, batch: int, rng: Any) -> hkv.Keys:
    """A batch of different keys: all "present", "mixed" (60 % present), or all "absent"."""
    absent = (np.arange(offered, offered + batch).astype(np.uint64) * GOLDEN) | np.uint64(1 << 63)
    if pattern == "absent":
        return keys_of(absent)
    if pattern == "mixed":
        first = max(0, offered - RECENT * batch)
        hits = first + rng.permutation(offered - first)[: batch * 6 // 10]
        return keys_of(rng.permutation(np.concatenate([hits, absent[: batch - len(hits)]])))
    places = rng.integers(0, max(1, table.capacity - 4 * batch))
    entries = hkv.export_batch(table, int(places), min(table.capacity, 4 * batch))
    found = entries.keys.to_numpy()[: int(entries.count)]
    return keys_of(rng.permutation(found)[:batch])


def copies_of(table: hkv.Table) -> list[hkv.Table]:
    """As many as there is room for beside the table and some results."""
    stats = jax.local_devices()[0].memory_stats() or {}
    room = stats.get("bytes_limit", 0) * 9 // 10 - stats.get("bytes_in_use", 0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(table))
    return [copy_of(table) for _ in range(max(1, min(IN_A_ROW, room // size - 1)))]


def timed(
    call: Callable[..., Any], table: hkv.Table, rest: Any, options: Any, is_fresh: bool
) -> tuple[list[float], list[float], hkv.Table]:
    """Wall and device seconds of a call from (table, *rest) to (table, result); it is donated."""
    wall, device = [], []
    for number in range(measure.WARM_UPS + options.runs):
        start_from = copy_of(table) if is_fresh else table
        start = time.perf_counter()
        after = jax.block_until_ready(call(start_from, *rest))
        seconds = time.perf_counter() - start
        if not is_fresh:
            table = after[0]
        del after, start_from
        if number >= measure.WARM_UPS:
            wall.append(seconds)
    for _ in range(options.runs):
        copies = copies_of(table) if is_fresh else []
        calls = len(copies) or IN_A_ROW
        start = time.perf_counter()
        for number in range(calls):
            after = call(copies[number] if is_fresh else table, *rest)
            if not is_fresh:
                table = after[0]
        jax.block_until_ready(after)
        device.append((time.perf_counter() - start) / calls)
        del after, copies
    return wall, device, table


def find_in_two_steps(table: hkv.Table, keys: hkv.Keys) -> tuple[hkv.Table, Any]:
    """What `find` does in one native call, as two."""
    valid = jnp.ones(keys.shape, jnp.bool_)
    changed, slots = index.find(table.index, keys, valid)
    clock, values = rows.gather(changed.clock, table.values, slots, name=table.name)
    after = dataclasses.replace(table, index=dataclasses.replace(changed, clock=clock))
    return after, (values, slots)


def operations(dim: int, batch: int) -> Iterator[tuple[str, str, bool, Callable[..., Any], int]]:
    """Name, pattern of keys, whether each call needs a fresh table, the call, bytes a key."""
    new = jax.random.normal(jax.random.key(0), (batch, dim))
    exists = jnp.ones((batch,), jnp.bool_)
    row = 4 * dim

    def of(function: Callable[..., Any], *rest: Any) -> Callable[..., Any]:
        return jax.jit(lambda table, keys: function(table, keys, *rest), donate_argnums=0)

    probe = DIGESTS + SECTOR
    for pattern in ("mixed", "present"):
        yield f"find {pattern}", pattern, False, of(hkv.find), probe + 2 * row
        yield f"find in two {pattern}", pattern, False, of(find_in_two_steps), probe + 2 * row
        yield f"contains {pattern}", pattern, False, of(hkv.contains), probe
    yield (
        "find_or_insert present",
        "present",
        False,
        of(hkv.find_or_insert),
        probe + SECTOR + 2 * row,
    )
    yield (
        "insert_or_assign present",
        "present",
        False,
        of(hkv.insert_or_assign, new),
        (probe + SECTOR + 2 * row),
    )
    yield "assign present", "present", False, of(hkv.assign, new), probe + 2 * row
    yield (
        "accum_or_assign present",
        "present",
        False,
        of(hkv.accum_or_assign, new, exists),
        (probe + SECTOR + 3 * row),
    )
    yield (
        "find_or_insert absent",
        "absent",
        True,
        of(hkv.find_or_insert),
        probe + 2 * SECTOR + 2 * row,
    )
    yield (
        "insert_or_assign absent",
        "absent",
        True,
        of(hkv.insert_or_assign, new),
        (probe + 2 * SECTOR + 2 * row),
    )
    yield (
        "insert_and_evict absent",
        "absent",
        True,
        of(hkv.insert_and_evict, new),
        (probe + 2 * SECTOR + 4 * row),
    )
    yield "erase present", "present", True, of(hkv.erase), probe + SECTOR


def slots_for(dim: int, options: Any) -> int:
    """As many as asked for, or a power of two less: a table, a copy, and results must fit."""
    slots = options.slots if dim < 64 else options.slots // 2
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    while limit and 2.15 * slots * (4 * dim + DIGESTS // hkv.table.LANES + 16) > limit:
        slots //= 2
    return slots


def ceilings(dim: int, options: Any) -> dict[str, float]:
    """Bytes a second of a plain copy, and of XLA's gather of random rows."""
    slots, batch = slots_for(dim, options), options.batch
    values = jnp.ones((slots, dim), jnp.float32)
    places = jax.random.randint(jax.random.key(1), (batch,), 0, slots)
    gather = jax.jit(lambda values, places: values[places])
    copy = jax.jit(lambda values: values + 1.0)

    def fastest(call: Callable[[], Any]) -> float:
        runs = measure.seconds(lambda _: [call() for _ in range(IN_A_ROW)], runs=options.runs)
        return measure.median(runs) / IN_A_ROW

    part = values[: min(slots, 2**28 // (4 * dim))]
    return {
        "slots": slots,
        "copy": 2 * part.nbytes / fastest(lambda: copy(part)),
        "xla gather": 2 * 4 * dim * batch / fastest(lambda: gather(values, places)),
    }


def plain_gather(program: Path, dim: int, slots: int, batch: int) -> float:
    """Bytes a second of a kernel that does nothing but gather random rows."""
    command = [str(program), str(dim), str(slots), str(batch)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def check(table: hkv.Table, offered: int, rng: Any) -> None:
    """Rows are those that their keys begin with, and no key is there that was never offered."""
    numbers = rng.integers(0, offered, 1000)
    _, found = hkv.find(table, keys_of(numbers))
    first = np.asarray(hkv.initial_rows(table, keys_of(numbers)))
    here = np.asarray(found.found)
    assert here.any()
    np.testing.assert_array_equal(np.asarray(found.values)[here], first[here])
    assert not np.asarray(hkv.contains(table, keys_of(numbers + 2**40))[1]).any()


def measured(case: Case, calls: list[Any], options: Any) -> dict[str, Any]:
    """All operations on one table."""
    slots = slots_for(case.dim, options)
    rng = np.random.default_rng(0)
    table, offered = filled(case, slots, options.batch)
    check(table, offered, rng)
    record: dict[str, Any] = {
        **case._asdict(), "slots": table.capacity, "reached": float(hkv.load_factor(table)),
        "operations": {},
    }  # fmt: skip
    for name, pattern, is_fresh, call, bytes_a_key in calls:
        keys = batches(pattern, table, offered, options.batch, rng)
        if keys.shape[0] < options.batch:
            continue  # a table this empty has no batch of present keys
        wall, device, table = timed(call, table, (keys,), options, is_fresh)
        result = Timed(wall, device, bytes_a_key * options.batch)
        rate = options.batch / measure.median(device)
        record["operations"][name] = result._asdict() | {"keys_per_second": rate}
        print(f"  {name:26} {rate / 1e9:7.3f} billion keys/s", flush=True)
    export = jax.jit(functools.partial(hkv.export_batch, count=options.batch))
    runs = measure.seconds(lambda at: export(table, at), lambda: jnp.int32(0), runs=options.runs)
    record["operations"]["export"] = {
        "wall": runs, "bytes": options.batch * (49 + 8 * case.dim),
        "keys_per_second": options.batch / measure.median(runs),
    }  # fmt: skip
    return record


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """The record of a case that could not be measured."""
    return {**case._asdict(), "operations": {}, "error": str(error)[:500]}


def seen_in(record: dict[str, Any]) -> set[Case]:
    """The cases that a record has."""
    return {Case(case["dim"], case["load"], case["choices"]) for case in record["cases"]}


def until(deadline: float, cases: list[Case], options: Any) -> list[dict[str, Any]]:
    """What was measured of cases that differ in their load, and so share compiled programs."""
    calls = list(operations(cases[0].dim, options.batch))
    found = []
    for case in cases:
        if time.time() > deadline:
            break
        print(f"dim {case.dim}, load factor {case.load}, {case.choices} choice(s)", flush=True)
        try:
            found.append(measured(case, calls, options))
        except jax.errors.JaxRuntimeError as error:
            found.append(failed(case, error))
    return found


def main() -> None:
    """Measures case by case, and writes the record after those of one dim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dims", type=int, nargs="+", default=[8, 32, 64, 128])
    add("--loads", type=float, nargs="+", default=[0.5, 1.0, 0.75, 0.95])
    add("--choices", type=int, nargs="+", default=[1, 2])
    add("--slots", type=int, default=2**27, help="half as many from dim 64 on (%(default)s)")
    add("--batch", type=int, default=2**20)
    add("--runs", type=int, default=measure.RUNS)
    add("--budget", type=float, default=400.0, help="seconds (%(default)s)")
    add("--resume", action="store_true", help="go on with what --out has")
    add("--gather", type=Path, help="the program of random_gather.cu, for the ceiling")
    add("--out", type=Path, default=measure.RESULTS / "table.json")
    options = parser.parse_args()
    deadline = time.time() + options.budget
    groups = [
        [Case(dim, load, choices) for load in options.loads]
        for choices in options.choices
        for dim in options.dims
    ]
    # Every part in a process of its own, none of which is this one: JAX keeps the memory it had.
    record = measure.begun(options.out, options.resume, {"ceilings": {}, "cases": []})
    record |= measure.apart(measure.surroundings) | {"batch": options.batch}
    for dim in options.dims:
        if str(dim) in record["ceilings"]:
            continue
        record["ceilings"][str(dim)] = found = measure.apart(ceilings, dim, options)
        if options.gather is not None:
            rate = plain_gather(options.gather, dim, int(found["slots"]), options.batch)
            found["random gather"] = rate
        measure.write(options.out.stem, record, options.out.parent)
    record["cases"] = [case for case in record["cases"] if "error" not in case]
    seen = seen_in(record)
    for group in groups:
        missing = [case for case in group if case not in seen]
        if missing and time.time() < deadline:
            try:
                record["cases"] += measure.apart(until, deadline, missing, options)
            except BrokenProcessPool as error:  # it died, and what it had measured with it
                record["cases"] += [failed(case, error) for case in missing]
            measure.write(options.out.stem, record, options.out.parent)
    seen = seen_in(record)
    record["left_out"] = [case._asdict() for group in groups for case in group if case not in seen]
    print(f"{len(record['left_out'])} cases left out; {options.out}")
    measure.write(options.out.stem, record, options.out.parent)
    if any("error" in case for case in record["cases"]):
        raise SystemExit("a case failed: see its error in the record")


if __name__ == "__main__":
    main()
