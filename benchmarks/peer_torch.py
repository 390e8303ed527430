"""Times PyTorch's sparse embedding with its optimizers; the benchmarks of training steps run it.

    python benchmarks/peer_torch.py FILE --rate RATE [--optimizers adam sgd] [--device cuda]

FILE has `batches` (row numbers), and either `start` (rows) and `gradients`, or their shapes as
`shape` (rows, dim): then both are random. Prints one JSON object: seconds a step by optimizer. The
rows that the first optimizer makes of `start` in one pass over the batches go to FILE's .npy.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

WARM_UPS = 3


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--in-a-row", type=int, default=1, help="steps a run")
    parser.add_argument("--optimizers", nargs="+", choices=("adam", "sgd"), default=["adam"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = np.load(options.file)
    on = {"device": options.device}
    batches = [torch.from_numpy(batch.reshape(-1, 1)).to(**on) for batch in data["batches"]]
    seconds = {}
    for name in options.optimizers:
        if "start" in data:
            start = torch.from_numpy(data["start"])
            gradients = torch.from_numpy(data["gradients"]).to(**on)
            embedding = torch.nn.EmbeddingBag.from_pretrained(
                start.to(**on), freeze=False, mode="sum", sparse=True
            )
        else:
            rows, dim = data["shape"].tolist()
            embedding = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, **on)
            gradients = torch.randn(len(batches[0]), dim, **on)
        kind = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}[name]
        optimizer = kind(embedding.parameters(), lr=options.rate)

        def step(number, embedding=embedding, optimizer=optimizer, gradients=gradients) -> None:
            optimizer.zero_grad()
            rows = embedding(batches[number % len(batches)])
            rows.backward(gradients)
            optimizer.step()

        for number in range(len(batches)):
            step(number)
        if name == options.optimizers[0] and "start" in data:
            np.save(options.file.with_suffix(".npy"), embedding.weight.detach().cpu().numpy())
        seconds[name] = timed(step, options)
        del embedding, optimizer, gradients, step
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    versions = {"torch": torch.__version__}
    print(json.dumps({"seconds": seconds, "versions": versions, "device": device}))


def timed(step, options: argparse.Namespace) -> list[float]:
    """Seconds a step, of each run after the warm-ups."""

    def now() -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for run in range(WARM_UPS + options.runs):
        start = now()
        for number in range(options.in_a_row):
            step(run * options.in_a_row + number)
        times.append((now() - start) / options.in_a_row)
    return times[WARM_UPS:]


if __name__ == "__main__":
    main()
