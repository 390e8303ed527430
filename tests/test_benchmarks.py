"""The benchmarks that wait for a GPU run, in small, on what there is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, out: Path, *options: str) -> dict:
    """The record that a benchmark writes."""
    command = [sys.executable, str(BENCHMARKS / script), "--out", str(out), "--runs", "1", *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(out.read_text())


def test_every_operation_of_a_table_is_measured_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--slots", "2048", "--batch", "128", "--dims", "8", "--loads", "0.5", "1"]
    record = run("table.py", tmp_path / "table.json", *sizes, "--choices", "2")
    assert [case["load"] for case in record["cases"]] == [0.5, 1.0] and not record["left_out"]
    assert record["cases"][1]["reached"] > 0.99
    for case in record["cases"]:
        assert len(case["operations"]) == 13
        assert all(found["keys_per_second"] > 0 for found in case["operations"].values())
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(tmp_path / "table.json")]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "table_choices_2.png").stat().st_size > 10_000


def test_training_steps_are_measured(tmp_path):
    sizes = ["--positions", "1000", "--ids", "500", "--batch", "32", "--capacity-factor", "1e-6"]
    record = run("train_step.py", tmp_path / "train_step.json", *sizes)
    assert 0 < record["ten tables adam"]["unique"] < 1000
    assert record["ten tables sgd"]["rows"] > 100
    assert record["dcnv2"]["samples_per_second"] > 0


def test_the_sizes_of_tables_and_batches_are_swept_and_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--slots", "11", "12", "--batch", "6", "8", "--fixed", "12", "7", "--dim", "4"]
    record = run("scaling.py", tmp_path / "scaling.json", *sizes)
    assert [point["slots"] for point in record["slots"]] == [2**11, 2**12]
    assert [point["batch"] for point in record["batch"]] == [64, 128, 256]
    assert record["left_out"] == []
    command = [sys.executable, str(BENCHMARKS / "plot.py"), str(tmp_path / "scaling.json")]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_a_soak_compares_two_machines_and_notices_no_difference(tmp_path):
    record = run("soak.py", tmp_path / "soak.json", "--steps", "96", "--chunk", "32")
    assert record["steps"] == 96 and len(record["compared"]) == 2
    assert record["digest"][0] != record["digest"][1]


def test_the_plain_gather_of_random_rows_compiles(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc")
    source = str(BENCHMARKS / "random_gather.cu")
    command = [nvcc, "-std=c++20", "-arch=sm_90", "-Werror=all-warnings", "-c", source]
    subprocess.run([*command, "-o", str(tmp_path / "gather.o")], check=True, timeout=300)
