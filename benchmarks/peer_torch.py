"""Times PyTorch's sparse embedding and SparseAdam; train_step_cpu.py runs it.

Arguments: a file with batches, gradients and first rows; the learning rate; runs. The rows after
one pass over the batches are written beside the file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

WARM_UPS = 3


def main() -> None:
    """See above."""
    path, rate, runs = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    data = np.load(path)
    batches = [torch.from_numpy(batch.reshape(-1, 1)) for batch in data["batches"]]
    gradients = torch.from_numpy(data["gradients"])
    embedding = torch.nn.EmbeddingBag.from_pretrained(
        torch.from_numpy(data["start"]), freeze=False, mode="sum", sparse=True
    )
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=rate)

    def step(ids) -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        rows = embedding(ids)
        rows.backward(gradients)
        optimizer.step()
        return time.perf_counter() - start

    for batch in batches:
        step(batch)
    np.save(path.with_suffix(".npy"), embedding.weight.detach().numpy())
    seconds = [step(batches[number % len(batches)]) for number in range(WARM_UPS + runs)]
    print(json.dumps({"seconds": seconds[WARM_UPS:], "versions": {"torch": torch.__version__}}))


if __name__ == "__main__":
    main()
