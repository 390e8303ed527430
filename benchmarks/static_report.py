"""What the compiler says of our kernels for a GPU that need not be there.

    python benchmarks/static_report.py [--architecture sm_90] [--out FOLDER]

Registers, stack and spills are ptxas' own words; memory instructions are counted in the PTX, and
all instructions in the machine code, a loop's body once; warps are how many a multiprocessor holds
at once, as far as registers allow, in blocks of the kernel's size. Kernels of CUB are left out.
Needs nvcc, c++filt, cuobjdump and nvdisasm (packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm where a toolkit has none).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "tests" / "cpp" / "device_driver.cu"
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr")
REGISTERS, WARPS, GRANULE = 65_536, 64, 256  # of a multiprocessor; registers come by the warp
TOOLS = ("nvcc", "c++filt", "cuobjdump", "nvdisasm")
COUNTED = {
    "loads": r"\bld\.global", "wide loads": r"\bld\.global[.\w]*\.v[24]",
    "stores": r"\bst\.global", "wide stores": r"\bst\.global[.\w]*\.v[24]",
    "atomics": r"\b(?:atom|red)\.", "shuffles": r"\bshfl\.", "votes": r"\b(?:vote|match)\.",
}  # fmt: skip


def run(*command: str) -> str:
    """What a command prints, both streams."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{result.stderr[-2000:]}")
    return result.stdout + result.stderr


def sources() -> dict[str, str]:
    """Which compiler was asked, and about what."""
    version = re.search(r"release [\d.]+, V[\d.]+", run("nvcc", "--version"))
    commit = run("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    return {"nvcc": version[0] if version else "", "commit": commit}


def names_of(mangled: list[str]) -> dict[str, str]:
    """Short names: the operation, and the step of it that the kernel does, or what a block does."""
    plain = run("c++filt", *mangled).splitlines()
    short = {}
    for name, text in zip(mangled, plain, strict=True):
        match = re.search(r"run_step<hkv::(.*?)>\(|hkv::(\w+_by_block<\d+>)\(", text)
        if match:
            short[name] = (match[1] or match[2]).replace("hkv::", "").strip()
    return short


def ptxas(architecture: str, folder: str) -> dict[str, dict[str, int]]:
    """Registers, stack and spills by mangled name."""
    text = run(
        *("nvcc", *FLAGS, f"-arch={architecture}", f"-I{ROOT}/ffi", f"-I{DRIVER.parent}"),
        *("-cubin", "-Xptxas", "-v", str(DRIVER), "-o", f"{folder}/driver.cubin"),
    )
    pattern = (
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return {
        name: {"registers": int(used), "stack": int(stack), "spills": int(stores) + int(loads)}
        for name, stack, stores, loads, used in re.findall(pattern, text, re.DOTALL)
    }


def ptx(architecture: str, folder: str) -> dict[str, dict[str, int]]:
    """Threads of a block, and instructions of each kind, by mangled name."""
    path = Path(folder) / "driver.ptx"
    virtual = architecture.replace("sm_", "compute_")
    run(*("nvcc", *FLAGS, f"-arch={virtual}", f"-I{ROOT}/ffi", f"-I{DRIVER.parent}"),
        *("-ptx", str(DRIVER), "-o", str(path)))  # fmt: skip
    counts = {}
    for part in re.split(r"\.visible \.entry |\.entry ", path.read_text())[1:]:
        name = re.match(r"\w+", part)
        body = part[: part.index("\n}\n")]
        threads = re.search(r"\.maxntid (\d+)", body)
        if name and threads:
            counts[name[0]] = {kind: len(re.findall(p, body)) for kind, p in COUNTED.items()}
            counts[name[0]]["threads"] = int(threads[1])
    return counts


def sass(folder: str) -> dict[str, int]:
    """Instructions by mangled name, padding left out, of what :func:`ptxas` has compiled."""
    text = run("cuobjdump", "-sass", f"{folder}/driver.cubin")
    parts = re.split(r"Function : (\S+)", text)[1:]
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?!NOP\b)[A-Z]")
    return {
        name: len(instruction.findall(body))
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def main() -> None:
    """Prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="sm_90")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise SystemExit(f"not found: {', '.join(missing)}, see above\n\n{__doc__}")
    with tempfile.TemporaryDirectory() as folder:
        used = ptxas(options.architecture, folder)
        counted = ptx(options.architecture, folder)
        instructions = sass(folder)
    names = names_of(list(used))
    kernels: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for mangled, name in sorted(names.items(), key=lambda pair: pair[1]):
        of_warp = -(-32 * used[mangled]["registers"] // GRANULE) * GRANULE
        block = counted[mangled]["threads"] // 32  # warps that come and go together
        warps = min(WARPS, REGISTERS // of_warp) // block * block
        kernels[name] = used[mangled] | {"warps": warps} | counted[mangled]
        if mangled in instructions:
            kernels[name]["instructions"] = instructions[mangled]
    record = {"architecture": options.architecture, **sources(), "kernels": kernels}
    columns = ["registers", "threads", "warps", "stack", "spills", "instructions", *COUNTED]
    print("| kernel | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, found in kernels.items():
        print(f"| `{name}` | " + " | ".join(str(found.get(c, "")) for c in columns) + " |")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"static_{options.architecture}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
