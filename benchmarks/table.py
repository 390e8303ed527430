"""Every operation of one table on a GPU: keys a second, and which share of the memory that is.

    python benchmarks/table.py [--out results/table.json] [--budget SECONDS]

The recipe of the peer (HierarchicalKV's own benchmark): the table is filled with consecutive keys
until its load factor is reached, then batches of 2^20 keys are timed, of which 60 % are among those
inserted last and 40 % are absent, or all of which are present. A call is timed twice: alone, until
its result is there (wall), and in one program that makes a row of calls (device), so that the host
starts a row and not a call: memory of other addresses has XLA record a CUDA graph anew. The calls
of a row take turns with several batches, so that nothing can be done once for all of them; each
turn is written out, since cutting a batch out of an array would be timed with the call. Calls
that change what they measure start from a fresh copy of the table, which is not timed and lies
where the one before it lay (a training step, too, finds its table there), and each has a batch of
its own: at load factor .75 a row of them ends at .78 in 2^27 slots, at .81 in 2^26. What
it takes to start a row and to hear of its end is not taken off: "start" in the record, of which
each of 64 calls has its share, and of those that change the table each of 4.

What does not fit into the budget is left out and said, and measured by the next call with
`--resume`. Tables are made half as large until two of them fit into the device's memory. Small
sizes run on a CPU too, to try the script.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_hkv as hkv
from jax_hkv import index, rows
from jax_hkv.table import with_clock

IN_A_ROW = 64  # calls of one device measurement that leave a table as it was
BATCHES = 4  # that they take turns with, and as many calls insert or erase in a row
RECENT = 8  # batches: hits of the mixed pattern are among the keys of so many last ones
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Bytes of the index that a key moves at least: 128 of digests, 32 each of keys and scores.
DIGESTS, SECTOR = 128, 32


class Case(NamedTuple):
    """A table to be measured."""

    dim: int
    load: float
    choices: int


def keys_of(numbers: np.ndarray) -> hkv.Keys:
    """Keys of consecutive numbers, on the device."""
    return jax.device_put(hkv.Keys.from_numpy(numbers.astype(np.uint64)))


def copy_of(table: hkv.Table) -> hkv.Table:
    """In memory of its own, so that it can be donated."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), table))


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def copied_over(used: hkv.Table, table: hkv.Table) -> hkv.Table:
    """A copy of a table in the memory of one that has been used."""
    return jax.tree.map(jnp.copy, table)


def created(case: Case, slots: int) -> hkv.Table:
    """An empty table of a case."""
    return hkv.create(slots, case.dim, choices=case.choices, init=hkv.initializers.uniform(-1, 1))


def filled(case: Case, slots: int, batch: int) -> tuple[hkv.Table, int]:
    """A table at its load factor, and how many keys were offered: 0, 1, 2, ..."""
    table = created(case, slots)
    insert = jax.jit(lambda table, keys: hkv.find_or_insert(table, keys)[0], donate_argnums=0)
    offered = 0
    while True:
        load = float(hkv.load_factor(table))
        full = case.load == 1 and offered >= 1.18 * slots and load > 0.99
        if (case.load < 1 and load >= case.load) or full or offered >= 2 * slots:
            return table, offered
        table = insert(table, keys_of(np.arange(offered, offered + batch)))
        offered += batch


def some_of(limit: int, count: int, rng: Any) -> np.ndarray:
    """Different numbers below a limit, without a permutation of all of them."""
    step = int(rng.integers(limit))
    while math.gcd(step, limit) != 1:
        step += 1
    numbers = int(rng.integers(limit)) + step * np.arange(min(count, limit), dtype=np.uint64)
    return numbers % np.uint64(limit)


def batches(
    pattern: str, table: hkv.Table, offered: int, batch: int, rng: Any, number: int = 0
) -> hkv.Keys:
    """A batch of different keys: all "present", "mixed" (60 % present), or all "absent".

    The absent ones of batches of different numbers are different ones.
    """
    first = offered + number * batch
    absent = (np.arange(first, first + batch).astype(np.uint64) * GOLDEN) | np.uint64(1 << 63)
    if pattern == "absent":
        return keys_of(absent)
    if pattern == "mixed":
        first = max(0, offered - RECENT * batch)
        hits = first + some_of(offered - first, batch * 6 // 10, rng)
        return keys_of(rng.permutation(np.concatenate([hits, absent[: batch - len(hits)]])))
    # Out of all buckets: those of an export's neighbouring slots would stay in the L2.
    offers = some_of(offered, 2 * batch, rng)
    is_there = np.asarray(hkv.contains(table, keys_of(offers))[1])
    return keys_of(offers[is_there][:batch])


class Call(NamedTuple):
    """An operation from (table, batch, *rest) to (table, result); the table is donated.

    Attributes:
      once: of one batch.
      in_a_row: of a tuple of batches, all of which are taken in each of some turns.
      calls: in a row.
    """

    once: Any
    in_a_row: Any
    calls: int


def call_of(operation: Callable[..., Any], turns: int = IN_A_ROW // BATCHES) -> Call:
    """The two programs that are timed. Large arrays are arguments: captured ones are constants."""

    def row(table: hkv.Table, batches: tuple[Any, ...], *rest: Any) -> Any:
        def turn(_: Any, state: Any) -> Any:
            for batch in batches:
                state = operation(state[0], batch, *rest)
            return state

        if turns == 1:
            return turn(0, (table,))
        _, result = jax.eval_shape(operation, table, batches[0], *rest)
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
        return jax.lax.fori_loop(0, turns, turn, (table, empty))

    return Call(
        jax.jit(operation, donate_argnums=0), jax.jit(row, donate_argnums=0), turns * BATCHES
    )


def compiled(call: Call, table: Any, batch: Any, rest: Any, pool: Any) -> Call:
    """The same for arrays of these shapes, once the pool has come to it."""
    programs = (
        call.once.lower(table, batch, *rest),
        call.in_a_row.lower(table, (batch,) * BATCHES, *rest),
    )
    made = [pool.submit(program.compile) for program in programs]
    return Call(*(lambda *given, own=own: own.result()(*given) for own in made), call.calls)


def timed(
    call: Call, table: hkv.Table, batches: list[Any], rest: Any, options: Any, is_fresh: bool
) -> tuple[list[float], list[float], hkv.Table]:
    """Wall and device seconds of a call, and the table after those that leave it as it was."""

    def seconds(run: Callable[[hkv.Table], Any]) -> list[float]:
        nonlocal table
        times = []
        used = copy_of(table) if is_fresh else table
        for _ in range(measure.WARM_UPS + options.runs):
            used = jax.block_until_ready(copied_over(used, table)) if is_fresh else used
            start = time.perf_counter()
            after = jax.block_until_ready(run(used))
            times.append(time.perf_counter() - start)
            used = after[0]
            del after
        if not is_fresh:
            table = used
        return times[measure.WARM_UPS :]

    wall = seconds(lambda table: call.once(table, batches[0], *rest))
    device = seconds(lambda table: call.in_a_row(table, tuple(batches), *rest))
    return wall, [each / call.calls for each in device], table


def find_in_two_steps(table: hkv.Table, keys: hkv.Keys) -> tuple[hkv.Table, Any]:
    """What `find` does in one native call, as two."""
    valid = jnp.ones(keys.shape, jnp.bool_)
    changed, slots = index.find(table.index, keys, valid)
    clock, values = rows.gather(changed.clock, table.values, slots, name=table.name)
    after = dataclasses.replace(table, index=dataclasses.replace(changed, clock=clock))
    return after, (values, slots)


class Operation(NamedTuple):
    """What is done to a table."""

    name: str
    pattern: str  # of keys
    changes: bool  # what is there, so that each measurement needs a fresh table
    does: Callable[..., Any]
    rest: tuple[Any, ...]
    bytes: int  # a key


def operations(dim: int, batch: int) -> list[Operation]:
    """All of a dim and a batch."""
    new = (jax.random.normal(jax.random.key(0), (batch, dim)),)
    exists = jnp.ones((batch,), jnp.bool_)
    row, probe = 4 * dim, DIGESTS + SECTOR
    hit, inserted = probe + SECTOR, probe + 2 * SECTOR
    reads = [
        Operation(f"{name} {pattern}", pattern, False, does, (), bytes_a_key)
        for pattern in ("mixed", "present")
        for name, does, bytes_a_key in (
            ("find", hkv.find, probe + 2 * row),
            ("find in two", find_in_two_steps, probe + 2 * row),
            ("contains", hkv.contains, probe),
        )
    ]
    present, absent = "present", "absent"
    return [
        *reads,
        Operation("find_or_insert present", present, False, hkv.find_or_insert, (), hit + 2 * row),
        Operation(
            "insert_or_assign present", present, False, hkv.insert_or_assign, new, hit + 2 * row
        ),
        Operation("assign present", present, False, hkv.assign, new, probe + 2 * row),
        Operation(
            "accum_or_assign present",
            present,
            False,
            hkv.accum_or_assign,
            (*new, exists),
            hit + 3 * row,
        ),
        Operation(
            "find_or_insert absent", absent, True, hkv.find_or_insert, (), inserted + 2 * row
        ),
        Operation(
            "insert_or_assign absent", absent, True, hkv.insert_or_assign, new, inserted + 2 * row
        ),
        Operation(
            "insert_and_evict absent", absent, True, hkv.insert_and_evict, new, inserted + 4 * row
        ),
        Operation("erase present", present, True, hkv.erase, (), hit),
    ]


def slots_for(dim: int, options: Any) -> int:
    """As many as asked for, or a power of two less: a table, a copy, and results must fit."""
    slots = options.slots if dim < 64 else options.slots // 2
    return fitting(slots, 4 * dim, 1 / 2.3)


def fitting(slots: int, row: int, share: float) -> int:
    """So many slots or a power of two less: with rows of so many bytes a share of the memory."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    while limit and slots * (row + DIGESTS // hkv.table.LANES + 16) > share * limit:
        slots //= 2
    return slots


def ceilings(dim: int, options: Any, slots: int = 0) -> dict[str, float]:
    """Seconds to start a row; bytes a second of a copy, and of XLA's gather of random rows."""
    slots, batch = slots or slots_for(dim, options), options.batch
    values = jnp.ones((slots, dim), jnp.float32)
    # Other rows each time: those of one batch of narrow rows would stay in the L2.
    places = jax.random.randint(jax.random.key(1), (IN_A_ROW, batch), 0, slots)
    part = values[: min(slots, 2**28 // (4 * dim))]

    @jax.jit
    def gathers(values: jax.Array, places: jax.Array) -> jax.Array:
        empty = jnp.zeros((batch, dim))
        return jax.lax.fori_loop(0, IN_A_ROW, lambda n, _: values[places[n]], empty)

    @jax.jit
    def copies(part: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, IN_A_ROW, lambda _, copied: copied + 1.0, part)

    def seconds(call: Callable[..., Any], *arguments: Any) -> float:
        return measure.median(measure.seconds(lambda _: call(*arguments), runs=options.runs))

    return {
        "slots": slots,
        "start": seconds(jax.jit(lambda one: one + 1), jnp.float32(0)),
        "copy": IN_A_ROW * 2 * part.nbytes / seconds(copies, part),
        "xla gather": IN_A_ROW * 2 * 4 * dim * batch / seconds(gathers, values, places),
    }


def plain_gather(program: Path, dim: int, slots: int, batch: int, *fetch: int) -> float:
    """Bytes a second of a kernel that does nothing but gather random rows."""
    command = [str(program), *map(str, (dim, slots, batch, *fetch))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def ceilings_of(dim: int, options: Any, slots: int = 0) -> dict[str, float]:
    """These, and bytes a second of the plain gather, where its program is given."""
    found = measure.apart(ceilings, dim, options, slots)
    if options.gather is not None and not dim & (dim - 1):  # powers of two only
        sizes = (dim, int(found["slots"]), options.batch)
        found["random gather"] = plain_gather(options.gather, *sizes)
        found["random gather, a sector fetched"] = plain_gather(options.gather, *sizes, SECTOR)
    return found


def check(table: hkv.Table, offered: int, rng: Any) -> None:
    """Rows are those that their keys begin with, and no key is there that was never offered."""
    numbers = rng.integers(0, offered, 1000)
    _, found = hkv.find(table, keys_of(numbers))
    first = np.asarray(hkv.initial_rows(table, keys_of(numbers)))
    here = np.asarray(found.found)
    assert here.any()
    np.testing.assert_array_equal(np.asarray(found.values)[here], first[here])
    assert not np.asarray(hkv.contains(table, keys_of(numbers + 2**40))[1]).any()


def measured(
    case: Case, of: list[Operation], calls: dict[Any, Call], options: Any
) -> dict[str, Any]:
    """All operations on one table."""
    slots = slots_for(case.dim, options)
    rng = np.random.default_rng(0)
    table, offered = filled(case, slots, options.batch)
    check(table, offered, rng)
    record: dict[str, Any] = {
        **case._asdict(), "slots": table.capacity, "reached": float(hkv.load_factor(table)),
        "operations": {},
    }  # fmt: skip
    made: dict[str, list[hkv.Keys]] = {}
    for operation in of:
        _, pattern, changes, does, rest, bytes_a_key = operation
        if pattern not in made:
            draw = functools.partial(batches, pattern, table, offered, options.batch, rng)
            made[pattern] = [draw(number) for number in range(BATCHES)]
        keys = made[pattern]
        if any(each.shape[0] < options.batch for each in keys):
            continue  # a table this empty has no batch of present keys
        call = calls[does, changes]
        wall, device, table = timed(call, table, keys, rest, options, changes)
        add_rate(record, operation.name, wall, device, bytes_a_key, options)
    places = places_of(table, options.batch, BATCHES)
    call = calls[export_as_call, False]
    wall, device, table = timed(call, table, places, (), options, is_fresh=False)
    add_rate(record, "export", wall, device, 49 + 8 * case.dim, options)
    return record


def places_of(table: hkv.Table, batch: int, count: int) -> list[jax.Array]:
    """Where so many exports of a batch of slots begin, one behind the other."""
    return [jnp.int32(number * batch % table.capacity) for number in range(count)]


def export_as_call(table: hkv.Table, offset: jax.Array, count: int) -> tuple[hkv.Table, Any]:
    """`export_batch` in the form of other operations; of the slots some are empty, as they come.

    The next call's offset asks the clock, and that something of every array: XLA does what is the
    same in all turns once for all, and what nobody reads not at all.
    """
    at = offset + (table.clock[1] == jnp.uint32(2**32 - 1)).astype(jnp.int32)
    entries = hkv.export_batch(table, at, count)
    some = [jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(entries)]
    clock = table.clock + (sum(some) > 0).astype(jnp.uint32)
    return with_clock(table, clock), entries


def calls_of(case: Case, of: list[Operation], options: Any) -> dict[Any, Call]:
    """The programs of a case's operations, which all cores compile at once."""
    table = jax.eval_shape(functools.partial(created, case, slots_for(case.dim, options)))
    keys = hkv.Keys(jax.ShapeDtypeStruct((options.batch, 2), jnp.uint32))
    kinds = {(each.does, each.changes): (keys, each.rest) for each in of}
    kinds[export_as_call, False] = jax.ShapeDtypeStruct((), jnp.int32), ()
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        calls = {}
        for (does, changes), (batch, rest) in kinds.items():
            turns = 1 if changes else IN_A_ROW // BATCHES
            made = functools.partial(does, count=options.batch) if does is export_as_call else does
            calls[does, changes] = compiled(call_of(made, turns), table, batch, rest, pool)
    return calls


def add_rate(
    record: dict[str, Any], name: str, wall: Any, device: Any, of_key: int, options: Any
) -> None:
    """Raw seconds, and the bytes that are moved by count, to the operations of a case."""
    rate = options.batch / measure.median(device)
    found = {"wall": wall, "device": device, "bytes": of_key * options.batch}
    record["operations"][name] = found | {"keys_per_second": rate}
    print(f"  {name:26} {rate / 1e9:7.3f} billion keys/s", flush=True)


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """The record of a case that could not be measured."""
    return {**case._asdict(), "operations": {}, "error": str(error)[:500]}


def seen_in(record: dict[str, Any]) -> set[Case]:
    """The cases that a record has."""
    return {Case(case["dim"], case["load"], case["choices"]) for case in record["cases"]}


def until(deadline: float, cases: list[Case], options: Any) -> list[dict[str, Any]]:
    """What was measured of cases that differ in their load, and so share compiled programs."""
    of = operations(cases[0].dim, options.batch)
    calls = calls_of(cases[0], of, options)
    found = []
    for case in cases:
        if time.time() > deadline:
            break
        print(f"dim {case.dim}, load factor {case.load}, {case.choices} choice(s)", flush=True)
        try:
            found.append(measured(case, of, calls, options))
        except jax.errors.JaxRuntimeError as error:
            found.append(failed(case, error))
    return found


def add_arguments(parser: argparse.ArgumentParser, budget: float, out: str) -> Any:
    """Those of benchmarks beside a ceiling; what adds more."""
    add = parser.add_argument
    add("--dims", type=int, nargs="+", default=[8, 32, 64, 128])
    add("--batch", type=int, default=2**20)
    add("--runs", type=int, default=measure.RUNS)
    add("--budget", type=float, default=budget, help="seconds (%(default)s)")
    add("--resume", action="store_true", help="go on with what --out has")
    add("--gather", type=Path, help="the program of random_gather.cu, for the ceiling")
    add("--out", type=Path, default=measure.RESULTS / out)
    return add


def main() -> None:
    """Measures case by case, and writes the record after those of one dim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = add_arguments(parser, 400.0, "table.json")
    add("--loads", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.95])
    add("--choices", type=int, nargs="+", default=[1, 2])
    add("--slots", type=int, default=2**27, help="half as many from dim 64 on (%(default)s)")
    options = parser.parse_args()
    deadline = time.time() + options.budget
    # The loads that say most first, of all tables.
    groups = [
        [Case(dim, load, choices) for load in loads]
        for loads in (options.loads[:2], options.loads[2:])
        for choices in options.choices
        for dim in options.dims
    ]
    # Every part in a process of its own, none of which is this one: JAX keeps the memory it had.
    record = measure.begun(options.out, options.resume, {"ceilings": {}, "cases": []})
    record |= measure.apart(measure.surroundings) | {"batch": options.batch}
    for dim in options.dims:
        if str(dim) in record["ceilings"]:
            continue
        record["ceilings"][str(dim)] = ceilings_of(dim, options)
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
