"""The example: its reader, its made-up click log, its figures and the program as a whole."""

import gzip
import importlib
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from combinations import seldom
from conftest import WITHOUT_HOST_DEVICES

import jax_hkv as hkv

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SAMPLE = ROOT.parent / "shared" / "data" / "criteo_1tb_sample.tsv.gz"
SEED = 7
FIGURES = {
    *("auc", "best_auc", "logloss", "hit_rate", "size", "capacity", "evicted", "refused"),
    *("examples", "eval_examples", "bad_rows", "examples_per_second", "seed"),
}
SMALL = ("--capacity", "1024", "--batch", "64", "--dim", "4")  # a step of this compiles quickly

sys.path.insert(0, str(EXAMPLES))
criteo, clicks, metrics, options, train_dlrm = (
    importlib.import_module(name)
    for name in ("criteo", "clicks", "metrics", "options", "train_dlrm")
)


@pytest.fixture(scope="module")
def rows() -> Any:
    """A few hundred rows of the built-in log."""
    print(f"seed {SEED}")
    return next(clicks.ClickLog(SEED, 300).batches(0, 300, 300))


@pytest.fixture
def lines(rows: Any) -> list[bytes]:
    """The same rows in the Criteo format."""
    return [_line(*row) for row in zip(rows.labels, rows.integers, rows.keys, strict=True)]


def _line(label: float, integers: np.ndarray, keys: np.ndarray) -> bytes:
    counts = ["" if np.isnan(integer) else str(int(integer)) for integer in integers]
    values = keys & np.uint64(2**criteo.COLUMN_SHIFT - 1)
    hexes = ["" if value == 0 else f"{int(value) - 1:08x}" for value in values]
    return "\t".join([str(int(label)), *counts, *hexes]).encode()


def _write(path: Path, lines: Iterable[bytes]) -> Path:
    text = b"".join(line + b"\n" for line in lines)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, lambda data: data)
    path.write_bytes(pack(text))
    return path


def _read(path: Path, skip_bad_rows: bool = False, size: int = 64) -> list[Any]:
    log = criteo.CriteoFile.scan(path, skip_bad_rows)
    return list(log.batches(0, log.rows, size))


def _joined(batches: list[Any]) -> list[np.ndarray]:
    return [np.concatenate([batch[part] for batch in batches]) for part in range(3)]


def _changed(line: bytes, column: int, field: bytes) -> bytes:
    fields = line.split(b"\t")
    fields[column - 1] = field
    return b"\t".join(fields)


# The reader


@pytest.mark.parametrize("name", ["log.tsv", "log.tsv.gz", "log.tsv.xz"])
def test_a_file_reads_back_as_the_rows_it_was_written_from(
    name: str, rows: Any, lines: list[bytes], tmp_path: Path
) -> None:
    batches = _read(_write(tmp_path / name, lines))
    assert [len(batch.labels) for batch in batches] == [64, 64, 64, 64, 44]
    for got, expected in zip(_joined(batches), rows, strict=False):
        np.testing.assert_array_equal(got, expected)


def test_any_part_of_a_file_can_be_read(rows: Any, lines: list[bytes], tmp_path: Path) -> None:
    log = criteo.CriteoFile.scan(_write(tmp_path / "log.tsv", lines), False)
    part = _joined(list(log.batches(100, 250, 32)))
    np.testing.assert_array_equal(part[2], rows.keys[100:250])


def test_windows_line_ends_and_a_last_line_without_an_end_are_fine(
    rows: Any, lines: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "log.tsv"
    path.write_bytes(b"\r\n".join(lines))
    np.testing.assert_array_equal(_joined(_read(path))[2], rows.keys)


def test_upper_case_and_short_categories_and_negative_integers_are_read(
    lines: list[bytes], tmp_path: Path
) -> None:
    line = _changed(_changed(_changed(lines[0], 15, b"AbC"), 16, b""), 2, b"-1")
    (batch,) = _read(_write(tmp_path / "log.tsv", [line]))
    assert batch.integers[0, 0] == -1
    assert batch.keys[0, 0] == 0xABC + 1
    assert batch.keys[0, 1] == 1 << criteo.COLUMN_SHIFT  # the second column's missing category


BAD_ROWS = {
    "too few columns": (lambda line: line.rsplit(b"\t", 1)[0], "39 columns between tabs"),
    "too many columns": (lambda line: line + b"\t", "41 columns between tabs, expected 40"),
    "an empty line": (lambda line: b"", "1 columns between tabs, expected 40"),
    "a label of 2": (lambda line: _changed(line, 1, b"2"), "the label is '2', expected 0 or 1"),
    "no label": (lambda line: _changed(line, 1, b""), "the label is '', expected 0 or 1"),
    "a fraction": (lambda line: _changed(line, 3, b"1.5"), "column 3 is '1.5', expected a whole"),
    "a huge integer": (lambda line: _changed(line, 14, b"9" * 40), "column 14 is '99999"),
    "no hex": (lambda line: _changed(line, 15, b"xyz"), "column 15 is 'xyz', expected a category"),
    "signed hex": (lambda line: _changed(line, 40, b"-1"), "column 40 is '-1', expected a categ"),
    "nine hex digits": (lambda line: _changed(line, 20, b"1" * 9), "1 to 8 hex digits or nothing"),
    "bytes that are no text": (lambda line: _changed(line, 15, b"\xff\0"), r"column 15 is '\\xff"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_an_error_that_names_file_and_line(
    kind: str, lines: list[bytes], tmp_path: Path
) -> None:
    spoil, expected = BAD_ROWS[kind]
    lines[2] = spoil(lines[2])
    path = _write(tmp_path / "log.tsv", lines)
    with pytest.raises(criteo.UserError) as caught:
        _read(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_counted_where_bad_rows_are_skipped(
    kind: str, rows: Any, lines: list[bytes], tmp_path: Path
) -> None:
    lines[2] = BAD_ROWS[kind][0](lines[2])
    batches = _read(_write(tmp_path / "log.tsv", lines), skip_bad_rows=True)
    assert sum(batch.skipped for batch in batches) == 1
    np.testing.assert_array_equal(_joined(batches)[2], np.delete(rows.keys, 2, axis=0))


def test_bad_rows_at_the_end_are_counted_too(lines: list[bytes], tmp_path: Path) -> None:
    path = _write(tmp_path / "log.tsv", [*lines[:64], b"bad", b"worse"])
    assert [batch.skipped for batch in _read(path, skip_bad_rows=True)] == [0, 2]


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_truncated_archive_names_the_line_where_it_ends(
    suffix: str, lines: list[bytes], tmp_path: Path
) -> None:
    path = _write(tmp_path / f"log{suffix}", lines)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(criteo.UserError, match="damaged or cut short") as caught:
        _read(path)
    line = int(str(caught.value).removeprefix(f"{path}:").split(":")[0])
    batches = _read(path, skip_bad_rows=True)
    assert sum(batch.skipped for batch in batches) == 1
    assert sum(len(batch.labels) for batch in batches) == line - 1


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_what_is_no_archive_is_an_error_at_line_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"log{suffix}"
    path.write_bytes(b"0\t1\t2\n" * 9)
    with pytest.raises(criteo.UserError) as caught:
        _read(path)
    assert str(caught.value).startswith(f"{path}:1: the archive is damaged")


@pytest.mark.parametrize("name", ["log.tsv", "log.gz", "log.xz"])
def test_an_empty_file_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(criteo.UserError, match=f"{name}: the file is empty"):
        _read(_write(tmp_path / name, []))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(criteo.UserError, match="none.tsv: No such file"):
        _read(tmp_path / "none.tsv")
    with pytest.raises(criteo.UserError, match="not a regular file"):
        _read(tmp_path)


# The built-in log


def test_the_built_in_log_has_the_shape_of_criteos(rows: Any) -> None:
    assert (rows.labels.shape, rows.labels.dtype) == ((300,), np.float32)
    assert (rows.integers.shape, rows.integers.dtype) == ((300, 13), np.float32)
    assert (rows.keys.shape, rows.keys.dtype) == ((300, 26), np.uint64)
    assert set(np.unique(rows.labels)) == {0, 1}
    present = rows.integers[~np.isnan(rows.integers)]
    assert 0.7 < present.size / rows.integers.size < 0.9
    np.testing.assert_array_equal(present, np.floor(np.maximum(present, 0)))


def test_keys_name_their_column(rows: Any) -> None:
    columns = rows.keys >> np.uint64(criteo.COLUMN_SHIFT)
    np.testing.assert_array_equal(columns, np.broadcast_to(np.arange(26), columns.shape))


def test_the_built_in_log_depends_on_the_seed_alone_and_not_on_how_it_is_cut(rows: Any) -> None:
    again = clicks.ClickLog(SEED, 300)
    cut = _joined(list(again.batches(0, 120, 50)) + list(again.batches(120, 300, 77)))
    for got, expected in zip(cut, rows, strict=False):
        np.testing.assert_array_equal(got, expected)
    other = next(clicks.ClickLog(SEED + 1, 300).batches(0, 300, 300))
    assert (other.keys != rows.keys).mean() > 0.5


def test_the_default_log_has_at_least_200_000_distinct_keys() -> None:
    log = clicks.ClickLog(0, options.DEFAULT_ROWS)
    seen = np.empty(0, np.uint64)
    for batch in log.batches(0, log.rows, 2**17):
        seen = np.union1d(seen, batch.keys)
        if seen.size >= 200_000:
            return
    pytest.fail(f"{seen.size} distinct keys")


def test_the_best_possible_auc_is_that_of_the_planted_model() -> None:
    best = clicks.ClickLog(SEED, 100_000).best_auc(0, 100_000)
    print(f"best possible AUC {best}")
    assert 0.75 < best < 0.85
    assert clicks.ClickLog(SEED, 100_000).best_auc(0, 100_000) == best


# The figures


def test_the_auc_is_the_share_of_pairs_in_order_with_ties_as_one_half() -> None:
    random = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    labels = random.integers(0, 2, 200).astype(np.float32)
    scores = random.integers(0, 20, 200) / 4
    difference = scores[labels == 1][:, None] - scores[labels == 0][None]
    expected = np.mean((difference > 0) + (difference == 0) / 2)
    assert metrics.auc(labels, scores) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_the_auc_of_one_class_is_none(label: float) -> None:
    labels = np.full(5, label, np.float32)
    running = metrics.RunningAuc()
    running.add(labels, np.arange(5.0))
    assert metrics.auc(labels, np.arange(5.0)) is None
    assert running.value() is None


def test_the_running_auc_comes_close_to_the_exact_one() -> None:
    random = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    logits = 3 * random.standard_normal(10_000)
    labels = (random.random(10_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    running = metrics.RunningAuc()
    for part in range(0, 10_000, 1000):
        running.add(labels[part : part + 1000], logits[part : part + 1000])
    assert running.value() == pytest.approx(metrics.auc(labels, logits), abs=1e-3)


def test_the_logloss_is_the_mean_negative_log_likelihood_even_of_extreme_logits() -> None:
    labels, logits = np.array([1.0, 0.0, 1.0]), np.array([2.0, -1.0, -800.0])
    expected = (np.log1p(np.exp(-2)) + np.log1p(np.exp(-1)) + 800) / 3
    assert metrics.logloss(labels, logits) == pytest.approx(expected)
    assert metrics.logloss(labels[:0], logits[:0]) is None


# The options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--capacity", "0"], "argument --capacity: expected a whole number of at least 1"),
        (["--batch", "many"], "argument --batch: expected a whole number of at least 1"),
        (["--eval-fraction", "1"], "argument --eval-fraction: expected a number between 0 and 1"),
        (["--lr", "nan"], "argument --lr: expected a number above 0, got 'nan'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to"),
        (["--policy", "mru"], "argument --policy: invalid choice: 'mru'"),
        (["--choices", "3"], "argument --choices: invalid choice: 3"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options.parse(arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


# The program


def _run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "train_dlrm.py", *map(str, arguments)]
    environment = os.environ | WITHOUT_HOST_DEVICES | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _figures(*arguments: object, **variables: str) -> dict[str, Any]:
    done = _run(*arguments, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1], parse_constant=pytest.fail)


def _main(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert train_dlrm.main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_is_one_json_object_and_is_the_same_twice_in_a_row(
    lines: list[bytes], tmp_path: Path
) -> None:
    path = _write(tmp_path / "log.tsv.gz", lines)
    arguments = (*SMALL, "--data", path, "--epochs", 2, "--seed", 5, "--eval-fraction", 0.2)
    first, second = (_figures(*arguments, "--out", tmp_path / name) for name in ("one", "two"))
    assert first.keys() >= FIGURES
    assert first.pop("examples_per_second") > 0
    second.pop("examples_per_second")
    assert first == second
    assert (first["examples"], first["eval_examples"], first["seed"]) == (480, 60, 5)
    assert first["capacity"] == 1024
    assert 0 < first["size"] <= 1024
    assert first["evicted"] > 0
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_part_of_one_class_gives_no_auc(
    lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines[-60:] = [_changed(line, 1, b"0") for line in lines[-60:]]
    path = _write(tmp_path / "log.tsv", lines)
    arguments = ("--data", path, "--eval-fraction", 0.2, "--out", tmp_path)
    figures = _main(capsys, *SMALL, *arguments)
    assert figures["auc"] is None
    assert figures["logloss"] > 0


def test_a_bad_row_ends_the_program_with_code_2_and_without_a_traceback(
    lines: list[bytes], tmp_path: Path
) -> None:
    lines[9] = b"nonsense"
    path = _write(tmp_path / "log.tsv", lines)
    done = _run(*SMALL, "--data", path, "--out", tmp_path)
    assert done.returncode == 2
    assert f"error: {path}:10: 1 columns" in done.stderr
    assert "Traceback" not in done.stderr


def test_skipped_rows_are_counted_once_whatever_the_epochs(
    lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines[9] = lines[-1] = b"nonsense"
    path = _write(tmp_path / "log.tsv", lines)
    arguments = ("--data", path, "--epochs", 2, "--skip-bad-rows", "--out", tmp_path)
    figures = _main(capsys, *SMALL, *arguments)
    assert figures["bad_rows"] == 2
    assert (figures["examples"], figures["eval_examples"]) == (2 * 269, 29)


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        ([], [], "log.tsv: the file is empty"),
        ([b"bad"] * 9, ["--skip-bad-rows"], "no good row among the first 8"),
        ([b"bad"], ["--skip-bad-rows"], "1 row is too little"),
        ([b"bad"], ["--data", "none.tsv"], "none.tsv: No such file"),
        ([b"bad"] * 9, ["--capacity", 2**40], "--capacity 1099511627776 --dim 4: "),
        ([b"bad"] * 9, ["--out", __file__], "--out: cannot write to"),
        ([b"bad"] * 9, ["--devices", 3], "--batch 64: must be a multiple of --devices 3"),
        ([b"bad"] * 9, ["--devices", 32], "--devices 32: there are "),
        ([b"bad"] * 9, ["--devices", 2, "--embedding", "dense"], "is on one device"),
        ([b"bad"] * 9, ["--devices", 2, "--store", 4096], "--store: stands behind a table of one"),
        (
            [b"bad"] * 9,
            ["--store", 4096, "--policy", "custom"],
            "policy that admits every newcomer",
        ),
        ([b"bad"] * 9, ["--store", 2**40], "--store 1099511627776 --dim 4: "),
    ],
)
def test_a_mistake_of_the_users_gives_one_line_and_code_2(
    content: list[bytes],
    arguments: list[object],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jax.devices()  # there are as many as there are, from now on
    path = _write(tmp_path / "log.tsv", content)
    given = [*SMALL, "--data", path, "--out", tmp_path, *arguments]
    assert train_dlrm.main([str(argument) for argument in given]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last


def test_a_learning_rate_that_diverges_is_an_error_and_no_traceback(
    lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path / "log.tsv", lines)
    given = [*SMALL, "--data", str(path), "--out", str(tmp_path), "--lr", "1e30"]
    assert train_dlrm.main(given) == 2
    assert "try a smaller --lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "choices"),
    seldom(
        [("lru", 2), ("lfu", 1), ("epoch_lru", 1), ("epoch_lfu", 1), ("custom", 1)],
        {("lfu", 1), ("epoch_lru", 1), ("epoch_lfu", 1)},
    ),
)
def test_every_policy_trains_in_a_table_that_is_too_small(
    policy: str, choices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--rows", 2000, "--policy", policy, "--choices", choices, "--out", tmp_path)
    figures = _main(capsys, *SMALL, *given)
    assert figures["evicted"] + figures["refused"] > 0
    assert 0 < figures["hit_rate"] < 1
    assert 0.9 * 1024 < figures["size"] <= figures["capacity"] == 1024
    assert 0 < figures["logloss"] < 2


def test_another_optimizer_trains_rows_and_dense_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--rows", 2000, "--optimizer", "adam", "--out", tmp_path)
    assert 0 < _main(capsys, *SMALL, *given)["logloss"] < 2


@pytest.mark.slow  # what other tests show of smaller programs
def test_several_devices_learn_what_one_learns_in_either_mode(
    lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--capacity", 65536, "--batch", 64, "--dim", 4, "--policy", "lfu")
    given += ("--data", _write(tmp_path / "log.tsv", lines), "--out", tmp_path)
    one = _main(capsys, *given)
    for mode in ("shard_map", "pmap"):
        many = _figures(*given, "--devices", 4, "--mode", mode, JAX_PLATFORMS="cpu")
        for name in ("size", "hit_rate", "evicted", "unique_per_step", "examples", "capacity"):
            assert many[name] == one[name]
        for name in ("auc", "logloss"):
            assert many[name] == pytest.approx(one[name], abs=1e-4)


@pytest.mark.parametrize(("policy", "choices"), seldom([("lru", 2), ("lfu", 1)], {("lfu", 1)}))
def test_a_small_table_before_a_store_learns_what_one_large_table_learns(
    policy: str, choices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--rows", 2000, "--batch", 64, "--dim", 4, "--out", tmp_path)
    given += ("--policy", policy, "--choices", choices)
    one = _main(capsys, *given, "--capacity", 65536)
    tiers = _main(capsys, *given, "--capacity", 4096, "--store", 65536)
    assert tiers["size"] <= tiers["capacity"] == 4096 < one["size"] / 2
    assert one["evicted"] == tiers["evicted"] == tiers["refused"] == 0
    assert tiers["hit_rate"] < one["hit_rate"]  # the rest came from the store, or was new
    for name in ("auc", "logloss"):
        assert tiers[name] == one[name]


@pytest.mark.parametrize(
    ("policy", "capacity", "store", "choices"),
    seldom(
        [("lru", 4096, 4096, 1), ("lfu", 2048, 2048, 1), ("lru", 1024, 65536, 2)],
        {("lru", 4096, 4096, 1)},
    ),
)
def test_what_neither_the_small_table_nor_the_store_keeps_is_counted(
    policy: str,
    capacity: int,
    store: int,
    choices: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a step has taken from both is in its counts."""
    make, gone = train_dlrm.tiered_learner, []

    def held(state: Any) -> np.ndarray:
        tables = (state.near.table, state.store)
        return np.unique(np.concatenate([hkv.sharding.export_entries(t).keys for t in tables]))

    def watched(*args: Any) -> Any:
        learner = make(*args)

        def step(state: Any, inputs: Any) -> Any:
            batch = inputs.keys.to_numpy()[np.asarray(inputs.valid)]
            before = np.union1d(held(state), batch)
            after, outcome = learner.step(state, inputs)
            gone.append(len(np.setdiff1d(before, held(after))))
            assert gone[-1] <= int(outcome.counts.evicted) + int(outcome.counts.refused)
            return after, outcome

        return learner._replace(step=step)

    monkeypatch.setattr(train_dlrm, "tiered_learner", watched)
    given = ("--rows", 2000, "--batch", 64, "--dim", 4, "--out", tmp_path, "--policy", policy)
    given += ("--capacity", capacity, "--store", store, "--choices", choices)
    figures = _main(capsys, *given)
    assert sum(gone) > 100 and figures["evicted"] > 0


def test_a_dense_embedding_has_a_row_for_every_key(
    rows: Any, lines: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path / "log.tsv", lines)
    figures = _main(capsys, *SMALL, "--data", path, "--embedding", "dense", "--out", tmp_path)
    assert figures["capacity"] == figures["size"] == np.unique(rows.keys).size
    assert (figures["hit_rate"], figures["evicted"], figures["refused"]) == (1, 0, 0)


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"the real sample is not there: {SAMPLE}")
def test_a_sample_of_real_clicks_runs_to_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _main(capsys, "--data", SAMPLE, "--out", tmp_path)
    assert figures["examples"] + figures["eval_examples"] == 1000
    assert figures["bad_rows"] == 0
    assert figures["auc"] is None or 0 <= figures["auc"] <= 1


# What the table is worth (two minutes together on two idle cores)


@pytest.fixture(scope="module")
def worth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The figures of the default run and of those it is compared with, all of one seed."""
    folder = tmp_path_factory.mktemp("worth")
    dense = _figures("--embedding", "dense", "--out", folder)
    keys = dense["capacity"]
    runs = {
        "default": (),
        "full": ("--capacity", 2 * keys),
        "tenth": ("--capacity", keys // 10),
        "frozen": ("--embedding", "frozen"),
    }
    figures = {name: _figures(*given, "--out", folder) for name, given in runs.items()}
    for name, run in (figures | {"dense": dense}).items():
        print(f"{name}: {run}")
    return figures | {"dense": dense}


@pytest.mark.slow
def test_the_default_table_is_smaller_than_its_vocabulary_and_evicts(worth: Any) -> None:
    assert worth["dense"]["capacity"] >= 200_000
    assert worth["default"]["capacity"] < worth["dense"]["capacity"] / 2
    assert worth["default"]["evicted"] > 0


@pytest.mark.slow
def test_trained_rows_reach_most_of_the_possible_lift_and_frozen_rows_at_most_half(
    worth: Any,
) -> None:
    possible = worth["default"]["best_auc"] - 0.5
    assert worth["default"]["auc"] - 0.5 >= 0.8 * possible
    assert worth["frozen"]["auc"] - 0.5 <= 0.5 * possible


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "full"])
def test_a_table_is_as_good_as_a_dense_embedding(name: str, worth: Any) -> None:
    assert worth[name]["auc"] == pytest.approx(worth["dense"]["auc"], abs=0.005)


@pytest.mark.slow
def test_a_table_of_one_tenth_of_the_keys_keeps_most_of_the_lift(worth: Any) -> None:
    assert worth["tenth"]["capacity"] <= 0.101 * worth["dense"]["capacity"]
    assert worth["tenth"]["auc"] - 0.5 >= 0.9 * (worth["full"]["auc"] - 0.5)
