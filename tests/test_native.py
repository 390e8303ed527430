"""The C++ tests of tests/cpp: warp code on host threads, watched by sanitizers."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jaxlib
import pytest
from combinations import seldom

HERE = Path(__file__).parent / "cpp"
SOURCES = Path(__file__).parent.parent / "ffi"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-pthread"]
INCLUDES = [f"-I{SOURCES}", f"-I{HERE}"]
# Ends where something undefined is done, without a word: words take the compiler long, and after
# them a program would go on.
TRAP = "-fsanitize-undefined-trap-on-error"
ADDRESSES = "address,undefined"
# What of the undefined takes the compiler no time; where pointers point does.
RACES = "thread,bool,bounds,enum,float-cast-overflow,integer-divide-by-zero,shift"
RACES += ",signed-integer-overflow"


def find_compiler():
    configured = (sysconfig.get_config_var("CXX") or "").split()
    for name in ["g++", "clang++", *configured[:1]]:
        if shutil.which(name):
            return name
    pytest.skip("no C++ compiler: none of g++, clang++ and Python's own was found")


def run(command):
    """Runs a command; members of a tile that wait for each other for ever end with the limit.

    Where a machine has other work they take longer, however little.
    """
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


def tail(result):
    return (result.stdout + result.stderr)[-4000:]


@pytest.fixture
def sanitizer(request, tmp_path):
    """The flags of a sanitizer of this compiler that can start here."""
    source, program = tmp_path / "empty.cc", tmp_path / "empty"
    source.write_text("int main() { return 0; }\n")
    flags = [f"-fsanitize={request.param}", TRAP]
    for command in ([find_compiler(), *flags, str(source), "-o", str(program)], [str(program)]):
        result = run(command)
        if result.returncode != 0:
            pytest.skip(f"no {request.param} sanitizer here: {tail(result).strip()[:300]}")
    return flags


def assert_all_passed(result):
    assert result.returncode == 0, tail(result)
    closing = result.stdout.splitlines()[-1]
    assert closing.endswith(" passed, 0 failed") and not closing.startswith("0 "), tail(result)


def assert_program_passes(name, tmp_path, *flags, size=()):
    program = str(tmp_path / name)
    built = run(
        [find_compiler(), *FLAGS, *flags, *INCLUDES, str(HERE / f"{name}.cc"), "-o", program]
    )
    assert built.returncode == 0, tail(built)
    assert_all_passed(run([program, *size]))


def watched():
    """Every program by each sanitizer; before a release what takes longest."""
    for name in ("test_groups", "test_lockstep", "test_numbers", "test_operations"):
        slow = [pytest.mark.slow] * (name != "test_lockstep")
        if name == "test_operations":
            yield name, RACES, ["small"]
            yield pytest.param(name, RACES, [], marks=slow)
        else:
            yield name, RACES, []
        yield pytest.param(name, ADDRESSES, [], marks=slow)


@pytest.mark.parametrize(("name", "sanitizer", "size"), [*watched()], indirect=["sanitizer"])
def test_the_native_code_has_no_race_and_agrees_with_itself(name, sanitizer, size, tmp_path):
    vectors = ["-O3", "-fno-math-errno", "-fno-trapping-math"] if name == "test_numbers" else []
    addresses = any(ADDRESSES in flag for flag in sanitizer)
    # The checks of addresses take GCC longer to optimize than the program runs.
    sooner = ["-O0"] if name == "test_operations" and addresses else []
    assert_program_passes(name, tmp_path, *sanitizer, *vectors, *sooner, size=size)


@pytest.fixture(scope="module")
def on_arm():
    """The compiler and the emulator of a host with a Grace CPU."""
    names = ["aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{n}" for n in (14, 13, 12))]
    compiler = next(filter(shutil.which, names), None)
    emulator = next(filter(shutil.which, ["qemu-aarch64", "qemu-aarch64-static"]), None)
    if not compiler or not emulator:
        pytest.skip("no aarch64-linux-gnu-g++ or no qemu-aarch64 (CONTRIBUTING.md)")
    return compiler, emulator


@pytest.mark.parametrize(
    "name", seldom(["test_numbers", "test_groups", "test_operations"], ["test_operations"])
)
def test_the_native_code_agrees_with_itself_on_aarch64(name, on_arm, tmp_path):
    compiler, emulator = on_arm
    program, size = str(tmp_path / name), ["small"] * (name == "test_operations")
    flags = ["-static", "-O2", "-fno-math-errno", "-fno-trapping-math"]
    built = run([compiler, *FLAGS, *flags, *INCLUDES, str(HERE / f"{name}.cc"), "-o", program])
    assert built.returncode == 0, tail(built)
    assert_all_passed(run([emulator, program, *size]))


@pytest.mark.parametrize("sanitizer", [ADDRESSES, RACES], indirect=True)
def test_a_program_that_does_what_is_undefined_ends(sanitizer, tmp_path):
    source, program = tmp_path / "overflow.cc", str(tmp_path / "overflow")
    source.write_text("int main(int n, char**) { return 2147483647 + n == 0; }\n")
    built = run([find_compiler(), *sanitizer, str(source), "-o", program])
    assert built.returncode == 0, tail(built)
    assert run([program]).returncode != 0


def test_a_call_that_is_wrong_is_refused_and_a_failure_told(tmp_path):
    """By the handlers' own checks, behind those of Python, against the headers of this jaxlib."""
    headers = f"-isystem{Path(jaxlib.__file__).parent / 'include'}"
    assert_program_passes("test_handler", tmp_path, headers)


def test_the_build_forbids_contraction(count_traffic):
    """With it a GPU would have other last bits than the CPU."""
    build = (SOURCES.parent / "CMakeLists.txt").read_text()
    assert re.search(r"^set\(HKV_CUDA_FLAGS [^)]*-fmad=false", build, re.MULTILINE)
    assert re.search(r"^set\(HKV_CXX_FLAGS [^)]*-ffp-contract=off", build, re.MULTILINE)
    assert "-fmad=false" in count_traffic.NVCC  # as the programs here


def test_members_of_a_tile_that_part_ways_are_found_out(tmp_path):
    """In lockstep, as all Python tests can run the CUDA backend's steps (CONTRIBUTING.md)."""
    assert_program_passes("test_lockstep", tmp_path)


@pytest.fixture(scope="module")
def gpu():
    listed = run(["nvidia-smi", "-L"]).stdout if shutil.which("nvidia-smi") else ""
    return listed.startswith("GPU")


@pytest.fixture(scope="module")
def count_traffic():
    """The benchmark, which knows how kernels are compiled."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: the CUDA kernels cannot be compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("count_traffic")


def compile_kernels(nvcc, program, sources, flags):
    built = run([*nvcc, *flags, *(str(HERE / name) for name in sources), "-o", program])
    assert built.returncode == 0, tail(built)
    return program


def test_operations_launch_kernels_and_do_nothing_else(count_traffic, tmp_path):
    """With a runtime that has nothing else; and CUB takes no more storage than is reserved."""
    # CUB asks on the host, by what there are kernels for; no kernel runs, however slow it would be.
    architectures = [f"-gencode=arch=compute_{n},code=compute_{n}" for n in (80, 90, 100)]
    if "--Ofast-compile" in run([count_traffic.NVCC[0], "--help"]).stdout:
        architectures.append("--Ofast-compile=max")
    program = compile_kernels(
        count_traffic.NVCC,
        str(tmp_path / "test_launches"),
        ["test_launches.cu", "no_device.cc", "runtime.cc"],
        [*architectures, "-cudart=none"],
    )
    assert_all_passed(run([program]))


@pytest.fixture(scope="module")
def device_driver(gpu, count_traffic, tmp_path_factory):
    """Runs all operations on a GPU and on the host; where there is none, on ptx_device.cc's."""
    folder = str(tmp_path_factory.mktemp("cuda"))
    if gpu:
        program, flags = f"{folder}/device_driver", ["-arch=native", "-O2"]
        return compile_kernels(count_traffic.NVCC, program, ["device_driver.cu"], flags)
    return count_traffic.build(folder)


def test_the_device_agrees_with_the_host_bit_for_bit(device_driver):
    """Without a GPU, the very instructions that nvcc made of the kernels, one by one."""
    assert_all_passed(run([device_driver, "small"]))  # benchmarks/gpu_check.sh runs all of it


def test_a_lookup_asks_memory_for_a_line_of_digests_and_the_rows(gpu, device_driver, tmp_path):
    """Counted in nvcc's instructions; a row more costs its own bytes, read and written, exactly."""
    if gpu:
        pytest.skip("there is a GPU: nothing interprets the kernels")
    out = tmp_path / "counted.json"
    script = [sys.executable, str(BENCHMARKS / "count_traffic.py"), "--program", device_driver]
    counted = run([*script, "--buckets", "64", "--out", str(out)])
    assert counted.returncode == 0, tail(counted)
    found = {
        operation["width"]: sum(kernel["requested"] for kernel in operation["kernels"].values())
        for operation in json.loads(out.read_text())["operations"]
        if (operation["operation"], operation["load"], operation["hits"]) == ("find_rows", 1, 1)
    }
    line, sector, keys = 128, 32, 64
    assert line < sector * found[8] / keys - 2 * 8 * 4 < 2 * line
    for width in (32, 64, 128):
        assert sector * (found[width] - found[8]) == keys * 2 * 4 * (width - 8)


MISTAKES = {
    "a store that is lost": (r"(st\.global\.)", r"// \1", "device"),
    "an address that is not aligned": (
        r"(ld\.global\.v4\.u32[^[]*\[%rd\d+)",
        r"\1+4",
        "misaligned",
    ),
    "an address elsewhere": (
        r"(ld\.global\.v4\.u32[^[]*\[%rd\d+)",
        rf"\1+{2**44}",
        "outside of all arrays",
    ),
    "a thread that does not come to an exchange": (
        r"(shfl\.sync[^;]*;)",
        "{.reg .pred q; .reg .u32 l; mov.u32 l, %laneid; setp.ne.u32 q, l, 3; @q " + r"\1}",
        "wait for others",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_device_without_silicon_sees_what_a_kernel_does_wrong(mistake, gpu, device_driver):
    """A mistake in the first place of the kernel that fills buckets."""
    if gpu:
        pytest.skip("there is a GPU: nothing interprets the kernels")
    pattern, replacement, complaint = MISTAKES[mistake]
    listing = Path(f"{device_driver}.ptx")
    whole = listing.read_text()
    begin = whole.index(".entry _ZN3hkv8run_stepINS_10FillBucket")
    kernel, count = re.subn(pattern, replacement, whole[begin:], count=1)
    assert count == 1
    try:
        listing.write_text(whole[:begin] + kernel)
        result = run([device_driver, "broken"])
    finally:
        listing.write_text(whole)
    assert result.returncode == 1 and complaint in result.stdout, tail(result)
