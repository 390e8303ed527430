"""Which kernels the time of a table's operations goes to, by JAX's profiler.

    python benchmarks/profile_table.py [--dims 8 64] [--out results/profile_table.json]

Tables, batches and operations are those of table.py. Each operation is called with several batches,
one after the other on one table: what inserts, evicts or erases finds a table that the call before
it has left. Seconds are those of the device, kernel by kernel; what lies between kernels is not in
them. Elsewhere than on a GPU there is nothing to see, as the record says.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import measure
import numpy as np
import profile_step
import table as of_table


def kernels_of(call: Any, table: Any, keys: list[Any], rest: Any) -> tuple[dict[str, Any], Any]:
    """Microseconds of a call's kernels, and the table after the calls."""

    def after(batches: list[Any]) -> Any:
        nonlocal table
        for batch in batches:
            table, result = call(table, batch, *rest)
        return table, result

    jax.block_until_ready(after(keys[:1]))
    profile = profile_step.profile_of(lambda: after(keys[1:]))
    return profile_step.by_kernel(profile, len(keys) - 1), table


def profiled(case: of_table.Case, options: Any) -> dict[str, Any]:
    """Of one table, operation by operation."""
    slots = of_table.slots_for(case.dim, options)
    rng = np.random.default_rng(0)
    table, offered = of_table.filled(case, slots, options.batch)
    record: dict[str, Any] = {**case._asdict(), "slots": table.capacity, "operations": {}}

    def profile(name: str, does: Any, keys: list[Any], rest: Any) -> None:
        nonlocal table
        found, table = kernels_of(jax.jit(does, donate_argnums=0), table, keys, rest)
        record["operations"][name] = found
        total = sum(kernel["microseconds"] for kernel in found.values())
        print(f"  {name}: {total:.0f} us", flush=True)
        for kernel, of in found.items():
            print(f"    {of['launches']:5.1f} x {of['microseconds']:8.1f} us  {kernel[:90]}")

    fresh = offered
    for operation in of_table.operations(case.dim, options.batch):
        is_absent = operation.pattern == "absent"  # to all operations before this one, too
        draw = functools.partial(of_table.batches, operation.pattern, table)
        first = fresh if is_absent else offered
        keys = [draw(first, options.batch, rng, number) for number in range(of_table.BATCHES + 1)]
        fresh += len(keys) * options.batch if is_absent else 0
        if all(each.shape[0] == options.batch for each in keys):
            profile(operation.name, operation.does, keys, operation.rest)
    places = of_table.places_of(table, options.batch, of_table.BATCHES + 1)
    profile("export", functools.partial(of_table.export_as_call, count=options.batch), places, ())
    return record


def main() -> None:
    """Records and prints case by case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dims", type=int, nargs="+", default=[8, 64])
    add("--loads", type=float, nargs="+", default=[1.0, 0.75])
    add("--choices", type=int, nargs="+", default=[1, 2])
    add("--slots", type=int, default=2**27, help="half as many from dim 64 on (%(default)s)")
    add("--batch", type=int, default=2**20)
    add("--out", type=Path, default=measure.RESULTS / "profile_table.json")
    options = parser.parse_args()
    profile_step.launch_as_always()
    record = measure.apart(measure.surroundings) | {"batch": options.batch, "cases": []}
    for choices in options.choices:
        for dim in options.dims:
            for load in options.loads:
                case = of_table.Case(dim, load, choices)
                print(f"dim {dim}, load factor {load}, {choices} choice(s)", flush=True)
                record["cases"].append(measure.apart(profiled, case, options))
                measure.write(options.out.stem, record, options.out.parent)


if __name__ == "__main__":
    main()
