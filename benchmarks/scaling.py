"""Keys a second against the size of the table, and against the size of the batch.

    python benchmarks/scaling.py [--out results/scaling.json] [--budget SECONDS]

Tables of 2^20 to 2^29 slots with batches of 2^20 keys, and one table with batches of 2^10 to 2^24,
at load factor 0.75: find and find_or_insert of present keys. benchmarks/plot.py draws the record.
What does not fit into the budget is left out and said, and measured by the next call with
`--resume`. Small sizes run on a CPU too, to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
from table import BATCHES, Case, batches, call_of, check, filled, timed

import jax_hkv as hkv

LOAD = 0.75
FILLING = 2**20  # keys of a batch that fills


def point(slots: int, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One table and one size of batch."""
    rng = np.random.default_rng(0)
    table, offered = filled(Case(options.dim, LOAD, 1), slots, min(FILLING, slots // 16))
    check(table, offered, rng)
    record: dict[str, Any] = {"slots": table.capacity, "batch": batch, "operations": {}}
    for name, operation in (("find", hkv.find), ("find_or_insert", hkv.find_or_insert)):
        # Together more than the L2 holds only where one is large: small batches stay there.
        keys = [batches("present", table, offered, batch, rng) for _ in range(BATCHES)]
        call = call_of(operation)
        wall, device, table = timed(call, table, keys, (), options, is_fresh=False)
        rate = batch / measure.median(device)
        record["operations"][name] = {"wall": wall, "device": device, "keys_per_second": rate}
        print(f"2^{np.log2(slots):.0f} slots, {batch:,} keys, {name}: {rate / 1e9:.3f} billion/s")
    return record


def main() -> None:
    """Measures point by point, and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dim", type=int, default=8)
    add("--slots", type=int, nargs=2, default=[20, 29], help="powers of two (%(default)s)")
    add("--batch", type=int, nargs=2, default=[10, 24], help="powers of two (%(default)s)")
    add("--fixed", type=int, nargs=2, default=[27, 20], help="of the other sweep (%(default)s)")
    add("--runs", type=int, default=measure.RUNS)
    add("--budget", type=float, default=120.0, help="seconds (%(default)s)")
    add("--resume", action="store_true", help="go on with what --out has")
    add("--out", type=Path, default=measure.RESULTS / "scaling.json")
    options = parser.parse_args()
    begin = time.perf_counter()
    record = measure.begun(options.out, options.resume, {"slots": [], "batch": []})
    record |= measure.surroundings() | {"dim": options.dim, "impossible": [], "left_out": []}
    slots, batch = options.fixed
    by_slots = [("slots", power, batch) for power in range(options.slots[0], options.slots[1] + 1)]
    by_batch = [("batch", slots, power) for power in range(options.batch[0], options.batch[1] + 1)]
    # The sweeps take turns, so that a short budget says something of both.
    sweeps = [one for pair in itertools.zip_longest(by_slots, by_batch) for one in pair if one]
    for sweep, slot_power, batch_power in sweeps:
        sizes = (2**slot_power, 2**batch_power)
        if sizes in [(found["slots"], found["batch"]) for found in record[sweep]]:
            continue
        if batch_power > slot_power - 1:  # keys of a batch are different ones out of the table
            record["impossible"].append([sweep, *sizes])
            continue
        if time.perf_counter() - begin > options.budget:
            record["left_out"].append([sweep, *sizes])
            continue
        record[sweep].append(point(*sizes, options))
        record[sweep].sort(key=lambda found: found[sweep])
        measure.write(options.out.stem, record, options.out.parent)
    measure.write(options.out.stem, record, options.out.parent)


if __name__ == "__main__":
    main()
