"""What a device and its host really do in training steps: copies, graphs, synchronisations.

    python benchmarks/profile_step.py [--out results/profile_step.json]

Steps of a linen model are recorded by JAX's profiler. On a GPU it must show that no table is
copied, that each step launches a CUDA graph in which the table's kernels are, and that the host
never waits for the device between steps. Elsewhere there is nothing to see, as the record says.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax

import jax_hkv as hkv

MOST_NAMES = 400
OUR_KERNELS = "hkv::"  # in their names
# While it is watched XLA launches one kernel after the other, if it is not told to do as always.
AS_ALWAYS = "--xla_enable_command_buffers_during_profiling=true"


def of_profile(profile: Any) -> dict[str, Any]:
    """What a profile has of GPUs.

    Names and stats are those of XLA's CUPTI collector (xla/backends/profiler/gpu): device planes
    hold kernels and copies, host planes the calls of the CUDA driver.
    """
    nanoseconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    copies: list[int] = []
    ours = {"in graphs": 0, "outside": 0}
    devices = 0
    for plane in profile.planes:
        is_device = plane.name.startswith("/device:GPU:")
        devices += is_device
        for event in (event for line in plane.lines for event in line.events):
            name = re.sub(r" \(CudaGraph:\d+\)", "", event.name)
            if is_device:
                stats = dict(event.stats)
                if not stats.keys() & {"kernel_details", "memcpy_details", "memset_details"}:
                    continue  # lines that XLA derives: steps, modules, operations
                counts[name] += 1
                nanoseconds[name] += int(event.duration_ns)
                size = re.search(r"size:(\d+)", str(stats.get("memcpy_details", "")))
                copies += [int(size[1])] if size else []
                if OUR_KERNELS in name:
                    ours["in graphs" if stats.get("cuda_graph_id") else "outside"] += 1
            elif plane.name.startswith("/host:") and re.match(r"cu[A-Z]", name):
                calls[name] += 1
    return {
        "devices": devices,
        "events": {
            name: {"count": counts[name], "seconds": time * 1e-9}
            for name, time in nanoseconds.most_common(MOST_NAMES)
        },
        "driver_calls": dict(calls.most_common(MOST_NAMES)),
        "copies": {"count": len(copies), "largest": max(copies, default=0)},
        "own_kernels": ours,
        "graph_launches": calls["cuGraphLaunch"],
        # A step whose results lie elsewhere has each traced call recorded again.
        "graph_updates": sum(n for name, n in calls.items() if "SetParams" in name),
        "captures": sum(n for name, n in calls.items() if name.startswith("cuStreamBeginCapture")),
        "synchronisations": sum(n for name, n in calls.items() if name.endswith("Synchronize")),
    }


def name_of(kernel: str) -> str:
    """What tells a kernel from others: of ours the step, of CUB's the function."""
    pattern = r"run_step<hkv::(.*?)\s?>\(|hkv::(\w+<\d+>)\(|::(\w+Kernel)<"
    found = re.search(pattern, kernel)
    return found[found.lastindex or 0] if found else kernel


def by_kernel(profile: dict[str, Any], calls: int) -> dict[str, dict[str, float]]:
    """Launches and microseconds of each kernel in one of so many calls."""
    found: dict[str, dict[str, float]] = {}
    for name, event in profile["events"].items():
        own = found.setdefault(name_of(name), {"launches": 0.0, "microseconds": 0.0})
        own["launches"] += event["count"] / calls
        own["microseconds"] += 1e6 * event["seconds"] / calls
    return found


def profile_of(run: Callable[[], Any]) -> dict[str, Any]:
    """What a profile has of a call, until its result is there."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        return of_profile(jax.profiler.ProfileData.from_file(str(path)))


def launch_as_always() -> None:
    """Before JAX begins."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {AS_ALWAYS}".strip()


def complaints(found: dict[str, Any], steps: int, table_bytes: int) -> list[str]:
    """What a profile of so many steps shows that must not be."""
    wrong = []
    if found["copies"]["largest"] >= table_bytes:
        wrong.append(f"{found['copies']['largest']} bytes were copied at once: a table")
    if found["graph_launches"] < steps:
        wrong.append(f"{found['graph_launches']} graphs were launched in {steps} steps")
    if not found["own_kernels"]["in graphs"] or found["own_kernels"]["outside"]:
        wrong.append(f"the table's kernels ran {found['own_kernels']}")
    if found["synchronisations"] >= steps:
        wrong.append(f"{found['synchronisations']} waits for the device in {steps} steps")
    return wrong


class Model(nn.Module):
    """A table and two dense layers."""

    capacity: int
    dim: int

    @nn.compact
    def __call__(self, keys: hkv.Keys, *, train: bool) -> jax.Array:
        """A logit for each example."""
        table = hkv.linen.Embed(self.capacity, self.dim, optimizer=hkv.optim.adam(1e-3))
        rows = table(keys, train=train)
        hidden = nn.relu(nn.Dense(64)(rows.reshape(rows.shape[0], -1)))
        return nn.Dense(1)(hidden)[:, 0]


def recorded(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The profile of steps that nobody waits for, and the bytes of the table's rows."""
    rng = np.random.default_rng(0)
    shape = (options.batch, 8)
    batches = [
        (
            jax.device_put(hkv.Keys.from_numpy(ids.astype(np.uint64) % options.capacity)),
            jnp.asarray(rng.integers(0, 2, options.batch), jnp.float32),
        )
        for ids in (rng.zipf(1.2, shape) for _ in range(4))
    ]
    model = Model(options.capacity, options.dim)
    state = hkv.linen.TrainState.create(
        model, jax.random.key(0), batches[0][0], train=False, tx=optax.adam(1e-3)
    )

    def loss(apply: Any, keys: hkv.Keys, labels: jax.Array) -> jax.Array:
        logits = apply(keys, train=True)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    step = hkv.linen.train_step(loss)
    for batch in batches:
        state, info = step(state, *batch)
    jax.block_until_ready((state, info))
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    table_bytes = table.values.nbytes
    del table

    def steps() -> Any:
        nonlocal state
        for number in range(options.steps):
            state, info = step(state, *batches[number % len(batches)])
        return state, info

    return profile_of(steps), table_bytes


def main() -> None:
    """Records, prints and judges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--capacity", type=int, default=2**21)
    add("--dim", type=int, default=64)
    add("--batch", type=int, default=8192)
    add("--steps", type=int, default=50)
    add("--out", type=Path, default=measure.RESULTS / "profile_step.json")
    options = parser.parse_args()
    launch_as_always()
    found, table_bytes = recorded(options)
    settings = {name: getattr(options, name) for name in ("capacity", "dim", "batch", "steps")}
    record = measure.surroundings() | {"settings": settings, "table_bytes": table_bytes} | found
    record["complaints"] = complaints(found, options.steps, table_bytes) if found["devices"] else []
    for name, event in found["events"].items():
        print(f"{event['count']:7} times  {1e3 * event['seconds']:9.3f} ms  {name[:100]}")
    print(measure.write(options.out.stem, record, options.out.parent))
    if not found["devices"]:
        print("no GPU was recorded: nothing is shown")
        if jax.devices()[0].platform == "gpu":
            raise SystemExit("there is a GPU, of which the profiler has seen nothing")
    if record["complaints"]:
        raise SystemExit("\n".join(record["complaints"]))


if __name__ == "__main__":
    main()
