"""What the kernels' warps do for a batch, counted where there is no GPU.

    python benchmarks/count_traffic.py [--buckets 16384] [--out FILE] [--program FILE]

Batches of as many keys as the table has buckets, for sums and updates a third of them, three times
each; nvcc's instructions (PTX) for compute capability 9.0, carried out one by one by
tests/cpp/ptx_machine.cc. Of each key: instructions of a warp; bytes that warps' instructions ask
for, in different sectors of 32; bytes of the different sectors that a launch reads or writes, which
memory moves if caches keep them for a launch and no longer. Needs nvcc and c++filt. What a memset
writes is moved, but asked for by no instruction.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from static_report import DRIVER, ROOT, names_of, run, sources

SECTOR = 32  # bytes
CASE = ("choices", "load", "hits", "width", "operation")
COUNTS = ("launches", "instructions", "requested", "read", "written")
TESTS = DRIVER.parent
RESULT = ROOT / "benchmarks" / "results" / "counted_sm_90.json"


# As tests/test_native.py compiles the programs of tests/cpp.
NVCC = ("nvcc", "-std=c++20", "-fmad=false", "--expt-relaxed-constexpr", "--threads=0")
NVCC += ("--Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off")
NVCC += (f"-I{ROOT}/ffi", f"-I{TESTS}")


def build(folder: str) -> str:
    """The driver of all operations with a device without silicon; nvcc's PTX lies beside it."""
    device = [str(path) for path in (*sorted(TESTS.glob("ptx_*.cc")), TESTS / "runtime.cc")]
    run(*NVCC, "-O2", "-c", f"-odir={folder}", *device)
    program = f"{folder}/{DRIVER.stem}"
    # What of it runs on the host takes the compiler longer to make fast than it runs.
    run(
        *(*NVCC, "-O0", "-gencode=arch=compute_90,code=compute_90", "-cudart=none"),
        *("--keep", f"--keep-dir={folder}", str(DRIVER)),
        *(f"{folder}/{Path(source).stem}.o" for source in device),
        *("-o", program),
    )
    return program


def lines_of(program: str, buckets: int) -> list[dict[str, Any]]:
    """What tests/cpp/ptx_traffic.cc prints."""
    printed = run(program, "traffic", str(buckets))
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def by_operation(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The counts of each operation's kernels, those of CUB together."""
    names = names_of(sorted({line["kernel"] for line in lines}))
    operations: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        case = {name: line[name] for name in CASE}
        operation = operations.setdefault(tuple(case.values()), {**case, "kernels": {}})
        name = names.get(line["kernel"], "memset" if line["kernel"] == "memset" else "CUB")
        kernel = operation["kernels"].setdefault(name, dict.fromkeys(COUNTS, 0))
        for count in COUNTS:
            kernel[count] += line[count]
    return list(operations.values())


def of_a_key(operation: dict[str, Any], keys: int) -> dict[str, float]:
    """All kernels of an operation: launches, and the rest of it for each key, sectors as bytes."""
    sums = {n: sum(kernel[n] for kernel in operation["kernels"].values()) for n in COUNTS}
    return {
        "launches": sums["launches"],
        "instructions": sums["instructions"] / keys,
        "requested": SECTOR * sums["requested"] / keys,
        "moved": SECTOR * (sums["read"] + sums["written"]) / keys,
    }


def main() -> None:
    """Prints a table and writes the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--buckets", type=int, default=16_384)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--program", help="what `build` has made, if it has been called")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = lines_of(options.program or build(folder), options.buckets)
    operations = by_operation(lines)
    head = {**sources(), "buckets": options.buckets, "keys": options.buckets}
    columns = ["operation", "candidates", *CASE[1:-1], "launches", "instructions"]
    print("| " + " | ".join([*columns, "requested", "moved"]) + " |")
    print("|---" * 9 + "|")
    for operation in operations:
        counts = of_a_key(operation, options.buckets)
        cells = [operation[name] for name in ("operation", *CASE[:-1])]
        cells += [counts["launches"], f"{counts['instructions']:.0f}"]
        cells += [f"{counts['requested']:.0f}", f"{counts['moved']:.0f}"]
        print("| " + " | ".join(map(str, cells)) + " |")
    listed = ",\n  ".join(json.dumps(operation) for operation in operations)
    opening = json.dumps(head, indent=1).removesuffix("\n}")
    options.out.write_text(f'{opening},\n "operations": [\n  {listed}\n ]\n}}\n')


if __name__ == "__main__":
    main()
