"""The benchmarks that wait for a GPU run, in small, on what there is."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_hkv as hkv

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
ONCE = ("--runs", "1")


def run(script: str, out: Path, *options: str) -> dict:
    """The record that a benchmark writes."""
    command = [sys.executable, str(BENCHMARKS / script), "--out", str(out), *options]
    environment = os.environ | ({} if script == "soak.py" else {"JAX_PLATFORMS": "cpu"})
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_every_operation_of_a_table_is_measured_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--slots", "2048", "--batch", "128", "--dims", "8", "--loads", "0.5", "1"]
    record = run("table.py", tmp_path / "table.json", *ONCE, *sizes, "--choices", "2")
    assert [case["load"] for case in record["cases"]] == [0.5, 1.0] and not record["left_out"]
    assert record["cases"][1]["reached"] > 0.99
    for case in record["cases"]:
        assert len(case["operations"]) == 15
        assert all(found["keys_per_second"] > 0 for found in case["operations"].values())
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(tmp_path / "table.json")]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "table_choices_2.png").stat().st_size > 10_000


@pytest.mark.slow  # two minutes; before a run on a GPU
def test_training_steps_are_measured(tmp_path):
    sizes = ["--positions", "1000", "--ids", "500", "--batch", "32", "--capacity-factor", "1e-6"]
    record = run("train_step.py", tmp_path / "train_step.json", *ONCE, *sizes)
    del record["dense sgd"]
    (tmp_path / "train_step.json").write_text(json.dumps(record))
    again = run("train_step.py", tmp_path / "train_step.json", *ONCE, *sizes, "--resume")
    assert again["dense sgd"]["seconds"][0] > 0
    scheduled = [name for name in record if name.startswith(("ten tables", "dcnv2"))]
    assert len(scheduled) == 6 and "dcnv2, concurrent" in scheduled
    assert all(again[name] == record[name] for name in scheduled)
    assert 0 < record["ten tables adam"]["unique"] < 1000
    assert record["ten tables sgd"]["rows"] > 100
    assert record["dcnv2"]["samples_per_second"] > 0
    assert record["dcnv2"]["kernels"] == record["ten tables sgd"]["kernels"] == {}  # none here


@pytest.mark.slow
def test_optimizers_stand_beside_gathers_of_rows(tmp_path):
    sizes = ["--slots", "8192", "--batch", "512", "--dims", "4", "8"]
    record = run("row_operations.py", tmp_path / "rows.json", *ONCE, *sizes)
    for dim in ("4", "8"):
        found = record["dims"][dim]["operations"]
        assert list(found)[:5] == ["gather", "scatter", "find_pooled", "sgd", "sgd, keys repeated"]
        assert len(found) == 3 + 2 * 5
        assert all(each["device"][0] > 0 and each["share"] is None for each in found.values())
        row = 512 * 4 * int(dim)
        assert found["gather"]["bytes"] == 2 * row
        assert found["adam"]["bytes"] == 7 * row  # gradient, and three that are changed
        assert found["rowwise_adagrad"]["bytes"] == 512 * 8 + 3 * row
        assert found["find_pooled"]["bytes"] == row + row // 8
        distinct = sorted(record["dims"][dim]["distinct"])
        assert 50 < distinct[0] <= distinct[-1] < 300
        assert found["sgd, keys repeated"]["bytes"] < found["sgd"]["bytes"]
    assert record["ceilings"]["8"]["xla gather"] > 0
    call = ("row_operations.py", tmp_path / "less.json", *ONCE, *sizes[:-1], "--resume")
    assert len(run(*call, "--budget", "0")["dims"]["4"]["left_out"]) == 3 + 5
    again = run(*call)["dims"]["4"]
    assert again["left_out"] == [] and list(again["operations"]) == list(found)


@pytest.mark.slow
def test_uneven_batches_stand_beside_uniform_ones(tmp_path):
    """The keys that were made for one bucket are in one: it keeps 128 of them."""
    sizes = ["--slots", "8192", "--batch", "512", "--dim", "4"]
    record = run("skew.py", tmp_path / "skew.json", *ONCE, *sizes)
    assert record["patterns"]["one bucket"]["skewed"]["find"]["size"] == 128
    calls = {name: len(found["skewed"]) for name, found in record["patterns"].items()}
    assert list(calls.values()) == [3, 3, 3, 1] and "all refused" in calls
    sizes = record["patterns"]["all refused"]
    assert sizes["skewed"]["find_or_insert"]["size"] == 128
    assert sizes["uniform"]["find_or_insert"]["size"] == 8192
    for found in record["patterns"].values():
        assert found["skewed"].keys() == found["uniform"].keys()
        assert all(call["device"][0] > 0 for side in found.values() for call in side.values())


@pytest.mark.slow
def test_tiers_stand_beside_one_table(tmp_path):
    sizes = ["--cache", "2048", "--store", "16384", "--ids", "6000", "--batch", "512", "--dim", "4"]
    record = run("tiers.py", tmp_path / "tiers.json", *ONCE, *sizes, "--steps", "20")
    one = record["one table"]
    assert one["seconds"][0] > 0
    for way, found in record["ways"].items():
        counts = found["counts"]
        assert found["of_steps"]["inserted"] == 0 == sum(counts["refused"]) + sum(counts["dropped"])
        assert sum(counts["restored"]) > 100 and found["seconds"][0] > 0
        assert found["bytes"]["to_the_host"][0] == counts["evicted"][0] * (16 + 3 * 16)
        if way == "one after the other":
            assert found["size"] == record["size"] and counts["unique"] == one["counts"]["unique"]


@pytest.mark.slow
def test_the_sizes_of_tables_and_batches_are_swept_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--slots", "11", "12", "--batch", "6", "8", "--fixed", "12", "7", "--dim", "4"]
    call = ("scaling.py", tmp_path / "scaling.json", *ONCE, *sizes, "--resume", "--budget")
    assert len(run(*call, "0")["left_out"]) == 5
    record = run(*call, "100")
    assert [point["slots"] for point in record["slots"]] == [2**11, 2**12]
    assert [point["batch"] for point in record["batch"]] == [64, 128, 256]
    assert record["left_out"] == []
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(tmp_path / "scaling.json")]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_soak_compares_two_machines_and_notices_no_difference(tmp_path):
    record = run("soak.py", tmp_path / "soak.json", "--steps", "96", "--chunk", "32")
    assert record["steps"] == 96 and len(record["compared"]) == 2
    assert record["digest"][0] != record["digest"][1]
    assert record["left_out"] == [] and [begun["first"] for begun in record["runs"]] == [0]


@pytest.mark.slow  # what other tests show of smaller programs
def test_a_soak_goes_on_where_its_time_ended(tmp_path):
    chunks = ["--resume", "--chunk", "32", "--steps"]
    whole = run("soak.py", tmp_path / "whole.json", *chunks, "96")
    run("soak.py", tmp_path / "parts.json", *chunks, "64")
    record = run("soak.py", tmp_path / "parts.json", *chunks, "96")
    assert [begun["first"] for begun in record["runs"]] == [0, 64]
    assert record["steps"] == 96 and record["digest"] == whole["digest"]
    record = run("soak.py", tmp_path / "parts.json", *chunks, "128", "--seconds", "0")
    assert record["steps"] == 96 and record["left_out"] == ["steps from 96"]
    record["runs"][0]["bytes_in_use"] = [0, 2**24]  # what has grown is told again by each call
    (tmp_path / "parts.json").write_text(json.dumps(record))
    with pytest.raises(AssertionError, match="the memory in use went from 0 to 16777216 bytes"):
        run("soak.py", tmp_path / "parts.json", *chunks, "96")


STAND_IN = """#!/usr/bin/env bash
here=$(dirname "$0")
[[ $1 != -c ]] || exit 0
[[ $1 == *.py ]] || exit 1
calling=$1
basename "$1" >>"$here/calls"
status=0
[[ $1 != *skew.py || -e $here/repaired ]] || status=3
while [[ $1 != --out ]]; do shift; done
echo "{}" >"$2"
if [[ $calling == *scaling.py && ! -e $here/has_time ]]; then printf '"left_out": [\n' >"$2"; fi
exit $status
"""
COMPILER = """#!/usr/bin/env bash
while [[ $1 != -o ]]; do shift; done
install -m 755 /dev/null "$2"
"""
SANITIZER = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$2" >>"$here/calls"
[[ $2 != initcheck || -e $here/repaired ]]
"""
SLOW_SANITIZER = """#!/usr/bin/env bash
echo "$2" >>"$(dirname "$0")/calls"
[[ $2 != memcheck ]] || exit 9
sleep 60
"""
TOOLS = ("bash", "sha256sum", "timeout", "install")
needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"
)


@pytest.fixture
def check(tmp_path):
    """Runs a part of gpu_check.sh among programs that stand in: what they were called for."""
    programs = {"python": STAND_IN, "nvcc": COMPILER, "compute-sanitizer": SANITIZER}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    surroundings = os.environ | {"PATH": path, "PYTHON": "python", "TMPDIR": str(tmp_path)}

    def checked(part: str, verdict: str, **more: str) -> list[str]:
        (tmp_path / "calls").write_text("")
        command = ["bash", str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "out"), part]
        finished = subprocess.run(
            command, env=surroundings | more, capture_output=True, text=True, check=False
        )
        assert f"           {verdict}" in finished.stdout
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert part == "prepare" or summary["parts"][part].startswith(verdict)
        assert (finished.returncode == 0) == (verdict == "passed")
        return (tmp_path / "calls").read_text().split()

    return checked


@needs_tools
def test_a_check_on_a_gpu_goes_on_where_it_stopped(check, tmp_path):
    """Benchmarks that are done are not run again."""
    everything = [
        "profile_step.py",
        "profile_table.py",
        "table.py",
        "row_operations.py",
        "train_step.py",
        "skew.py",
        "tiers.py",
        "soak.py",
        "scaling.py",
    ]
    assert check("benchmarks", "failed") == everything
    assert check("benchmarks", "failed") == ["skew.py", "scaling.py"]
    (tmp_path / "repaired").touch()
    assert check("benchmarks", "out of time") == ["skew.py", "scaling.py"]
    (tmp_path / "has_time").touch()
    assert check("benchmarks", "passed") == ["scaling.py"]
    assert check("benchmarks", "passed") == []


@needs_tools
def test_a_tool_that_has_passed_is_not_asked_again_and_a_failure_is_told(check, tmp_path):
    tools = ["memcheck", "synccheck", "initcheck", "racecheck"]
    assert check("sanitizers", "failed") == tools
    assert check("sanitizers", "failed") == ["initcheck"]
    (tmp_path / "repaired").touch()
    assert check("sanitizers", "passed") == ["initcheck"]
    assert check("sanitizers", "passed") == []
    assert check("prepare", "failed") == []  # the stand-in installs nothing


@needs_tools
def test_a_tool_that_fails_is_told_though_the_others_have_no_time(check, tmp_path):
    """And a slow one is ended by its own limit, before that of the part."""
    (tmp_path / "compute-sanitizer").write_text(SLOW_SANITIZER)
    assert check("sanitizers", "failed", BUDGET="14") == ["memcheck", "synccheck"]


def test_calls_in_a_row_are_all_made(monkeypatch):
    """XLA leaves out what nobody reads, and does once what is the same in every turn."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("table")
    options = argparse.Namespace(slots=1024, batch=64)
    case = table.Case(dim=8, load=0.5, choices=1)
    empty = table.created(case, options.slots)
    keys = hkv.Keys(jax.ShapeDtypeStruct((64, 2), np.uint32))
    export = functools.partial(table.export_as_call, count=64)
    made = {(own.does, own.changes): (keys, own.rest) for own in table.operations(8, 64)}
    made[export, False] = jax.ShapeDtypeStruct((), np.int32), ()
    for (does, changes), (batch, rest) in made.items():
        call = table.call_of(does, turns=1 if changes else 3)
        lowered = call.in_a_row.lower(empty, (batch,) * table.BATCHES, *rest)
        targets = re.findall(r'custom_call_target="(jax_hkv[^"]*)"', lowered.compile().as_text())
        assert targets and set(Counter(targets).values()) == {table.BATCHES}, does


PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #14"
    events { metadata_id: 1 duration_ps: 4000000 stats { metadata_id: 1 ref_value: 10 }
             stats { metadata_id: 3 uint64_value: 7 } }
    events { metadata_id: 1 duration_ps: 4000000 stats { metadata_id: 1 ref_value: 10 } }
    events { metadata_id: 2 duration_ps: 1000000 stats { metadata_id: 2 ref_value: 11 } }
  }
  lines { name: "XLA Ops" events { metadata_id: 3 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "void hkv::cuda::find_kernel<8>()" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  event_metadata { key: 3 value { id: 3 name: "fusion" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
  stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }
  stat_metadata { key: 3 value { id: 3 name: "cuda_graph_id" } }
  stat_metadata { key: 10 value { id: 10 name: "regs:40" } }
  stat_metadata { key: 11 value { id: 11 name: "kind_src:device kind_dst:device size:4096" } }
}
planes {
  name: "/host:CPU"
  lines {
    name: "python"
    events { metadata_id: 1 } events { metadata_id: 2 } events { metadata_id: 3 }
    events { metadata_id: 3 }
  }
  event_metadata { key: 1 value { id: 1 name: "cuGraphLaunch (CudaGraph:7)" } }
  event_metadata { key: 2 value { id: 2 name: "custom Python function" } }
  event_metadata { key: 3 value { id: 3 name: "cuStreamSynchronize" } }
}
"""


def test_a_profile_shows_copies_graphs_and_waits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    profile_step = importlib.import_module("profile_step")
    serialized = jax.profiler.ProfileData.text_proto_to_serialized_xspace(PROFILE)
    profile = jax.profiler.ProfileData.from_serialized_xspace(serialized)
    found = profile_step.of_profile(profile)
    assert found["devices"] == 1 and found["copies"] == {"count": 1, "largest": 4096}
    assert {name: event["count"] for name, event in found["events"].items()} == {
        "void hkv::cuda::find_kernel<8>()": 2, "MemcpyD2D": 1,
    }  # fmt: skip
    assert found["own_kernels"] == {"in graphs": 1, "outside": 1}
    assert found["driver_calls"] == {"cuStreamSynchronize": 2, "cuGraphLaunch": 1}
    wrong = profile_step.complaints(found, 2, 4096)
    assert len(wrong) == 4 and "a table" in wrong[0]
    found["own_kernels"]["outside"] = 0
    assert profile_step.complaints(found, 1, 4097) == ["2 waits for the device in 1 steps"]


def test_steps_are_profiled(tmp_path):
    sizes = ["--capacity", "1024", "--dim", "4", "--batch", "16", "--steps", "30"]
    record = run("profile_step.py", tmp_path / "profile_step.json", *sizes)
    assert record["table_bytes"] == 1024 * 4 * 4 and record["devices"] == 0


@pytest.mark.slow
def test_the_kernels_of_a_tables_operations_are_told_apart(tmp_path, monkeypatch):
    sizes = ["--slots", "8192", "--batch", "128", "--dims", "8", "--loads", "0.5", "--choices", "2"]
    record = run("profile_table.py", tmp_path / "profile_table.json", *sizes)
    (case,) = record["cases"]
    assert len(case["operations"]) == 15 and not any(case["operations"].values())  # no kernels here
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    profile_table = importlib.import_module("profile_table")
    scan = "void cub::CUB_300001_SM_900::detail::scan::DeviceScanKernel<cub::policy_hub<int>>(int)"
    names = {
        "void hkv::run_step<hkv::FillOrEvict>(long, hkv::FillOrEvict)": "FillOrEvict",
        "void hkv::run_step<hkv::Strided<hkv::UpdateRows<hkv::SgdRule>::Step> >(long)": (
            "Strided<hkv::UpdateRows<hkv::SgdRule>::Step>"
        ),
        scan: "DeviceScanKernel",
        "void hkv::sort_by_block<8>(unsigned int*, int*, int, int)": "sort_by_block<8>",
        "loop_add_fusion": "loop_add_fusion",
    }
    assert {name: profile_table.profile_step.name_of(name) for name in names} == names
    finds = [{"count": 8, "seconds": 4e-6}, {"count": 4, "seconds": 2e-6}]
    found = {"events": dict(zip([scan, scan.replace("int>>", "long>>")], finds, strict=True))}
    monkeypatch.setattr(profile_table.profile_step, "of_profile", lambda profile: found)
    calls = []

    def call(table, keys):
        calls.append(keys)
        return table + 1, jax.numpy.ones(1)

    kernels, table = profile_table.kernels_of(call, 0, [1, 2, 3, 4, 5], ())
    assert table == 5 and calls == [1, 2, 3, 4, 5]
    assert kernels == {"DeviceScanKernel": {"launches": 3.0, "microseconds": pytest.approx(1.5)}}


def test_the_plain_gather_of_random_rows_compiles(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = str(BENCHMARKS / "random_gather.cu")
    command = [nvcc, "-std=c++20", "-arch=sm_90", "-Werror=all-warnings", "-c", source]
    subprocess.run([*command, "-o", str(tmp_path / "gather.o")], check=True, timeout=300)
