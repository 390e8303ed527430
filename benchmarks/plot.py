"""Draws what the records of table.py (a picture a number of candidate buckets) and scaling.py hold.

python benchmarks/plot.py [RESULTS.json] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import measure

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402


def draw(record: dict[str, Any], choices: int, path: Path) -> None:
    """A panel an operation: keys a second against the load factor, a line a dim."""
    cases = [case for case in record["cases"] if case["choices"] == choices]
    names = list(dict.fromkeys(name for case in cases for name in case["operations"]))
    columns = 4
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(14, 3 * lines), squeeze=False, sharex=True)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        for dim in sorted({case["dim"] for case in cases}):
            own = [case for case in cases if case["dim"] == dim and name in case["operations"]]
            loads = [case["reached"] for case in own]
            rates = [case["operations"][name]["keys_per_second"] / 1e9 for case in own]
            axis.plot(loads, rates, marker="o", label=f"dim {dim}")
        axis.set_title(name)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("billion keys/s")
        axis.set_xlabel("load factor")
    axes.flat[0].legend()
    batch, commit = record["batch"], record["commit"][:9]
    figure.suptitle(f"{record['device']}, batch {batch:,}, choices={choices}, commit {commit}")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def draw_scaling(record: dict[str, Any], path: Path) -> None:
    """Two panels: keys a second against the slots of the table, and against the keys of a batch."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    for axis, sweep in zip(axes, ("slots", "batch"), strict=True):
        points = record[sweep]
        for name in dict.fromkeys(name for point in points for name in point["operations"]):
            rates = [point["operations"][name]["keys_per_second"] / 1e9 for point in points]
            axis.plot([point[sweep] for point in points], rates, marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel({"slots": "slots of the table", "batch": "keys of a batch"}[sweep])
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("billion keys/s")
    axes[0].legend()
    figure.suptitle(f"{record['device']}, dim {record['dim']}, commit {record['commit'][:9]}")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=measure.RESULTS / "table.json")
    parser.add_argument("--out", type=Path, default=measure.RESULTS)
    options = parser.parse_args()
    record = json.loads(options.results.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    if "cases" not in record:
        draw_scaling(record, options.out / "scaling.png")
        print(options.out / "scaling.png")
        return
    for choices in sorted({case["choices"] for case in record["cases"]}):
        path = options.out / f"table_choices_{choices}.png"
        draw(record, choices, path)
        print(path)


if __name__ == "__main__":
    main()
