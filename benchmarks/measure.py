"""What all benchmarks share: timing, and a record of what ran where."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")

RESULTS = Path(__file__).parent / "results"
WARM_UPS = 3
RUNS = 5


def seconds(
    run: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None, runs: int = RUNS
) -> list[float]:
    """Wall time of every run after the warm-ups; what `prepare` makes is not counted."""
    times = []
    for number in range(WARM_UPS + runs):
        prepared = jax.block_until_ready(prepare())
        start = time.perf_counter()
        jax.block_until_ready(run(prepared))
        if number >= WARM_UPS:
            times.append(time.perf_counter() - start)
    return times


def median(times: list[float]) -> float:
    """Of the raw runs."""
    return statistics.median(times)


def peer(python: str, script: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    """What a script beside this one prints as JSON, run by another interpreter."""
    command = [python, str(Path(__file__).with_name(script)), *map(str, arguments)]
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{finished.stderr[-3000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def apart(part: Callable[..., Result], *arguments: Any) -> Result:
    """What a part returns, in a process of its own: JAX keeps the memory that it had."""
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawning) as pool:
        return pool.submit(part, *arguments).result()


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def surroundings() -> dict[str, Any]:
    """Device, versions and commit."""
    packages = ("jax_hkv", "jax", "jaxlib", "numpy", "optax")
    here = Path(__file__).parent
    named = os.environ.get("COMMIT")  # of sources that lie in another repository, or in none
    commit = _first_line("git", "-C", str(here), "rev-parse", "HEAD")
    changed = _first_line("git", "-C", str(here), "status", "--porcelain", "../ffi", "../jax_hkv")
    return {
        "device": str(jax.devices()[0].device_kind),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": named or commit,
        "uncommitted": bool(changed) if commit and not named else None,
    }


def begun(path: Path, is_resumed: bool, record: dict[str, Any]) -> dict[str, Any]:
    """The record to add to: what an earlier call wrote there, if that is gone on with."""
    if not is_resumed or not path.exists():
        return record
    return record | json.loads(path.read_text())


def write(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a record as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    unfinished = path.with_suffix(".unfinished")  # whoever is stopped here leaves the one before
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    return unfinished.replace(path)
