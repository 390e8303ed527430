"""The scaled DLRM-DCNv2: its shape, its multi-hot log, and the program as a whole."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import WITHOUT_HOST_DEVICES

import jax_hkv as hkv

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SAMPLE = ROOT.parent / "shared" / "data" / "criteo_1tb_sample.tsv.gz"
SEED = 7
FIGURES = {
    *("auc", "best_auc", "logloss", "hit_rate", "size", "capacity", "evicted", "refused"),
    *("unique_per_step", "examples", "eval_examples", "bad_rows", "examples_per_second", "seed"),
    *("scale", "dtype"),
}
# The numbers of the MLPerf benchmark, written out once more.
MLPERF_ROWS = [
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
]
MLPERF_HOTNESS = [
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
]
CROSSED = 27 * 128
MLPERF_KERNELS = [
    *((13, 512), (512, 256), (256, 128)),
    *((CROSSED, 512), (512, CROSSED)) * 3,
    *((CROSSED, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)),
]
SMALL = ("--rows", 8000, "--scale", 1024, "--lr", 0.02, "--eval-fraction", 0.2, "--seed", SEED)
CLEARLY = 0.62  # is an AUC that chance gives 1,600 rows never: its deviation is 0.015
# These small programs take longer to compile well than to run.
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

sys.path.insert(0, str(EXAMPLES))
clicks, criteo, dcnv2, dlrm, dlrm_dcnv2 = (
    importlib.import_module(name) for name in ("clicks", "criteo", "dcnv2", "dlrm", "dlrm_dcnv2")
)


def _figures(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, EXAMPLES / "dlrm_dcnv2.py", *map(str, arguments)]
    flags = f"{WITHOUT_HOST_DEVICES['XLA_FLAGS']} {QUICK_COMPILATION}"
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "row/s" in done.stderr
    return json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)


def _shapes(scale: int, *, is_half: bool = False) -> tuple[Any, Any]:
    """The untrained model, and a batch of its inputs, as shapes: nothing is allocated."""
    shape = dcnv2.scaled(scale)
    dtype = jnp.bfloat16 if is_half else jnp.float32
    model = dcnv2.DlrmDcnV2(shape, dcnv2.embeddings(shape), dtype)
    state = jax.eval_shape(lambda: dlrm_dcnv2.first_state(0.005, SEED, model))
    n, struct = shape.batch, jax.ShapeDtypeStruct
    inputs = dlrm.Inputs(
        labels=struct((n,), jnp.float32),
        integers=struct((n, 13), jnp.float32),
        keys=hkv.Keys(struct((n, sum(shape.hotness), 2), jnp.uint32)),
        valid=struct((n,), jnp.bool_),
    )
    return state, inputs


def _kernels(params: Any) -> list[tuple[int, ...]]:
    paths = jax.tree.leaves_with_path(params)
    return [leaf.shape for path, leaf in paths if path[-1].key == "kernel"]


# The shape


def test_the_full_scale_is_the_shape_of_mlperf() -> None:
    shape = dcnv2.scaled(1)
    assert list(shape.rows) == MLPERF_ROWS
    assert list(shape.hotness) == MLPERF_HOTNESS
    tables = dcnv2.embeddings(shape).tables
    assert [table.capacity for table in tables] == MLPERF_ROWS
    assert {(table.dim, np.dtype(table.dtype).name) for table in tables} == {(128, "float32")}
    features = dcnv2.embeddings(shape).features
    assert [(f.table, f.combiner) for f in features] == [(t.name, "sum") for t in tables]


def test_the_full_scale_has_the_arrays_of_mlperf_in_one_table() -> None:
    state, inputs = _shapes(1)
    table = dlrm_dcnv2.table_of(state)
    assert table.values.shape == (-(-sum(MLPERF_ROWS) // 128) * 128, 128)
    (accumulators,) = table.optimizer.rows.values()
    assert accumulators.shape == table.values.shape
    assert sorted(_kernels(state.params)) == sorted(MLPERF_KERNELS)
    logits = jax.eval_shape(type(state).apply, state, inputs)
    assert (logits.shape, logits.dtype) == ((65_536,), jnp.float32)


def test_the_optimizers_are_mlperfs_adagrad() -> None:
    optimizer = dcnv2.embeddings(dcnv2.scaled(64)).tables[0].optimizer
    assert dcnv2.LEARNING_RATE == optimizer.learning_rate == 0.005
    assert dcnv2.EPSILON == 1e-8
    gradient = np.array([1e-8, 3e-7, 0.0, 0.2], np.float32)  # PyTorch's rule, accumulating from 0
    expected = -0.005 * gradient / (np.sqrt(np.square(gradient, dtype=np.float64)) + 1e-8)
    table = optimizer.init(hkv.create(128, 4, init=hkv.initializers.zeros()))
    table, found = hkv.find_or_insert(table, np.array([5], np.int32))
    table = optimizer.update(table, found, jnp.asarray(gradient)[None])
    _, found = hkv.find(table, np.array([5], np.int32))
    got = np.asarray(found.values)[0]
    # Where a gradient is as small as epsilon, adding inside the root gives up to 1.42 times more.
    np.testing.assert_allclose(got[1:], expected[1:], rtol=0.04)
    assert 1 <= got[0] / expected[0] < 1.42


def test_a_scale_divides_rows_and_batch_and_its_root_the_widths() -> None:
    shape = dcnv2.scaled(64)
    assert (shape.rows[0], shape.rows[10], shape.batch) == (625_000, 47_937, 1024)
    assert (shape.dim, shape.bottom, shape.cross_rank) == (16, (64, 32, 16), 64)
    assert (shape.top, shape.cross_layers) == ((128, 128, 64, 32, 1), 3)
    assert [shape.rows[n] for n in (5, 8, 12, 7, 25)] == [3, 63, 10, 128, 36]
    assert list(shape.hotness) == MLPERF_HOTNESS
    state, _ = _shapes(64)
    assert dlrm_dcnv2.table_of(state).values.shape[1] == 16


def test_a_cross_layer_is_that_of_the_paper() -> None:
    first = np.random.default_rng(SEED).normal(size=(5, 6)).astype(np.float32)
    print(f"seed {SEED}")
    layers = dcnv2.CrossLayers(layers=2, rank=3)
    params = layers.init(jax.random.key(SEED), first)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases that matter
    own = jax.tree.map(np.asarray, params["params"])
    crossed = first
    for low, high in (("Dense_0", "Dense_1"), ("Dense_2", "Dense_3")):
        outer = crossed @ own[low]["kernel"] @ own[high]["kernel"] + own[high]["bias"]
        crossed = first * outer + crossed
    np.testing.assert_allclose(layers.apply(params, first), crossed, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_for_the_computation_alone() -> None:
    state, inputs = _shapes(1024, is_half=True)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    floats = {leaf.dtype.name for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {"float32"}
    assert dlrm_dcnv2.table_of(state).dtype == jnp.float32
    equations = jax.make_jaxpr(type(state).apply)(state, inputs).eqns
    products = [e.outvars[0].aval.dtype for e in equations if e.primitive.name == "dot_general"]
    assert products == [jnp.bfloat16] * len(MLPERF_KERNELS)


# The multi-hot log


def test_a_multi_hot_log_has_the_ids_of_each_column_side_by_side() -> None:
    shape = dcnv2.scaled(1024)
    log = clicks.ClickLog(SEED, 2000, shape.rows, shape.hotness)
    (batch,) = log.batches(0, 2000, 2000)
    columns = batch.keys >> np.uint64(criteo.COLUMN_SHIFT)
    expected = np.repeat(np.arange(26), MLPERF_HOTNESS)
    np.testing.assert_array_equal(columns, np.broadcast_to(expected, columns.shape))
    for column, rows in enumerate(shape.rows):
        assert np.unique(batch.keys[:, expected == column]).size <= rows + 1  # and "missing"


def test_a_multi_hot_log_depends_on_the_seed_alone_and_not_on_how_it_is_cut() -> None:
    given = ([9] * 26, [2] * 25 + [5])  # a number of draws that does not fill Philox's counters
    (whole,) = clicks.ClickLog(SEED, 300, *given).batches(0, 300, 300)
    parts = list(clicks.ClickLog(SEED, 300, *given).batches(0, 300, 77))
    for number in range(3):
        joined = np.concatenate([part[number] for part in parts])
        np.testing.assert_array_equal(joined, whole[number])
    (other,) = clicks.ClickLog(SEED + 1, 300, *given).batches(0, 300, 300)
    assert (other.keys != whole.keys).mean() > 0.5


# The program


@pytest.mark.slow
def test_a_small_table_learns_far_more_than_chance_and_the_same_twice_in_a_row() -> None:
    first, second = (_figures(*SMALL, "--capacity-factor", 0.1) for _ in range(2))
    print(first)
    assert first.keys() == FIGURES
    assert first.pop("examples_per_second") > 0
    second.pop("examples_per_second")
    assert first == second
    assert (first["examples"], first["eval_examples"], first["bad_rows"]) == (6400, 1600, 0)
    assert first["evicted"] > 0
    assert 0.9 * first["capacity"] < first["size"] <= first["capacity"] < 25_000
    assert 0 < first["hit_rate"] < 1
    assert 64 * 26 < first["unique_per_step"] < 64 * 214
    assert CLEARLY < first["auc"] < first["best_auc"] + 0.02
    assert 0 < first["logloss"] < np.log(2)


@pytest.mark.slow  # what other tests show of smaller programs
def test_bfloat16_learns_as_well() -> None:
    figures = _figures(*SMALL, "--bfloat16")
    print(figures)
    assert figures["dtype"] == "bfloat16"
    assert figures["evicted"] == 0
    assert CLEARLY < figures["auc"] < figures["best_auc"] + 0.02


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"the real sample is not there: {SAMPLE}")
def test_a_sample_of_real_clicks_runs_to_the_end() -> None:
    figures = _figures("--data", SAMPLE, "--scale", 1024)
    assert figures["best_auc"] is None
    assert (figures["examples"], figures["eval_examples"], figures["bad_rows"]) == (900, 100, 0)
    assert 0 < figures["logloss"] < 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "none.tsv"], "none.tsv: No such file"),
        (["--data", "/dev/null"], "/dev/null: not a regular file"),
        (["--capacity-factor", "1e9"], "create: capacity must be"),
    ],
)
def test_a_mistake_of_the_users_gives_one_line_and_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dlrm_dcnv2.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--scale", "0"], "argument --scale: expected a whole number of at least 1"),
        (["--scale", "2.5"], "argument --scale: expected a whole number of at least 1"),
        (["--capacity-factor", "0"], "argument --capacity-factor: expected a number above 0"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        dlrm_dcnv2.main(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_scale_that_needs_more_memory_than_there_is_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dlrm_dcnv2.os, "sysconf", lambda name: 2**16)  # 4 GiB
    assert dlrm_dcnv2.main(["--scale", "1"]) == 2
    error = capsys.readouterr().err
    assert "--scale 1" in error
    assert "GiB, this machine has 4.0: raise --scale" in error
