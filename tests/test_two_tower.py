"""The retrieval example: its lists, its questions, its loss and the program as a whole."""

import gzip
import importlib
import json
import lzma
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WITHOUT_HOST_DEVICES
from flax import nnx

import jax_hkv as hkv

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEED = 7
FIGURES = {
    *("recall_at_10", "popularity_recall_at_10", "questions", "candidates", "users", "items"),
    *("hit_rate", "evicted", "examples", "examples_per_second", "seed"),
}
SMALL = ("--batch", "64", "--dim", "8", "--capacity", "1024")  # a step of this compiles quickly
PAIRS = [(b"ann", b"a hat"), (b"bob", b"tea"), (b"ann", b"tea"), (b"bob", b"a hat"), (b"cy", b"x")]

sys.path.insert(0, str(EXAMPLES))
interactions, retrieval, two_tower = (
    importlib.import_module(name) for name in ("interactions", "retrieval", "two_tower")
)


def _log(pairs: list[tuple[int, int]]) -> Any:
    return interactions.Interactions(*np.array(pairs, np.uint64).T)


def _write(path: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    text = b"".join(line + end for line in lines)
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, lambda data: data)
    path.write_bytes(pack(text))
    return path


def _clusters(users: int, each: int, rng: np.random.Generator) -> list[bytes]:
    """Lines in which user u takes only items of cluster u % 10, of 20 items each."""
    pairs = [(u, 20 * (u % 10) + i) for u in range(users) for i in rng.permutation(20)[:each]]
    return [b"user-%d\titem-%d" % pairs[line] for line in rng.permutation(len(pairs))]


@pytest.fixture
def small_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up list that trains in seconds."""
    for name, value in {"USERS": 1000, "ITEMS": 300}.items():
        monkeypatch.setattr(interactions, name, value)


# Lists


@pytest.mark.parametrize("name", ["list.tsv", "list.gz", "list.xz"])
@pytest.mark.parametrize("separator", [b"\t", b",", b" ,  ", b" \t"])
def test_a_file_reads_back_as_the_pairs_it_was_written_from(
    name: str, separator: bytes, tmp_path: Path
) -> None:
    log = interactions.read(_write(tmp_path / name, [separator.join(pair) for pair in PAIRS]))
    keys = [[interactions.key_of(text) for text in pair] for pair in PAIRS]
    np.testing.assert_array_equal(np.stack(log, axis=1), np.array(keys, np.uint64))


def test_blanks_separate_where_there_is_no_tab_or_comma_and_windows_line_ends_are_fine(
    tmp_path: Path,
) -> None:
    plain = interactions.read(_write(tmp_path / "list", [b"1\t2", b"-3\t4"]))
    other = interactions.read(_write(tmp_path / "other", [b" 1  2 ", b"-3 4"], end=b"\r\n"))
    np.testing.assert_array_equal(plain, other)


def test_what_a_user_takes_again_counts_at_its_first_time(tmp_path: Path) -> None:
    lines = [b"a x", b"b x", b"a y", b"a x", b"b y", b"b x"]
    log = interactions.read(_write(tmp_path / "list", lines))
    expected = interactions.read(_write(tmp_path / "once", [b"a x", b"b x", b"a y", b"b y"]))
    np.testing.assert_array_equal(log, expected)


def test_the_made_up_list_depends_on_the_seed_alone_and_no_user_takes_an_item_twice(
    small_list: None,
) -> None:
    log, again, other = (interactions.make_up(seed) for seed in (SEED, SEED, SEED + 1))
    np.testing.assert_array_equal(log, again)
    assert len(log.users) != len(other.users) or (log.users != other.users).any()
    assert len(np.unique(log.users)) == interactions.USERS
    assert len(np.unique(np.stack(log), axis=1).T) == len(log.users)
    counts = np.unique(log.users, return_counts=True)[1]
    assert (counts.min(), counts.max()) == (interactions.FEWEST, interactions.MOST - 1)


def test_batches_hold_every_interaction_once_an_epoch_and_the_rest_is_not_valid() -> None:
    log = _log([(user, user % 3) for user in range(10)])
    batches = list(log.batches(4, 2, SEED))
    assert [int(batch.valid.sum()) for batch in batches] == [4, 4, 2] * 2
    for epoch in (batches[:3], batches[3:]):
        users = np.concatenate([batch.users[batch.valid] for batch in epoch])
        assert sorted(users) == list(range(10))
    for batch in batches:
        np.testing.assert_array_equal(batch.items, batch.users % np.uint64(3))
        shares = np.where(batch.items == 0, 0.4, 0.3)
        np.testing.assert_allclose(batch.log_frequency, np.log(shares), rtol=1e-6)


# Questions


def test_the_last_item_of_a_user_is_held_out_if_the_user_has_another() -> None:
    log = _log([(1, 10), (2, 20), (1, 20), (3, 30), (2, 10), (1, 40)])
    training, questions = retrieval.leave_one_out(log, SEED)
    np.testing.assert_array_equal(np.stack(training, axis=1), [[1, 10], [2, 20], [1, 20], [3, 30]])
    assert questions.users.tolist() == [1, 2]
    assert questions.candidates.tolist() == [10, 20, 30]
    assert questions.answers.tolist() == [-1, 0]  # nobody trains on item 40
    assert [sorted(seen) for seen in questions.seen] == [[0, 1], [1]]
    assert questions.counts.tolist() == [1, 2, 1]


def test_no_more_users_are_asked_about_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "MAX_QUESTIONS", 5)
    log = _log([(user, item) for item in range(3) for user in range(50)])
    training, questions = retrieval.leave_one_out(log, SEED)
    assert len(np.unique(questions.users)) == len(questions.users) == 5
    assert len(training.users) == 100


def test_recall_is_the_share_of_answers_among_the_ten_best_unseen_candidates(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "QUESTIONS_AT_A_TIME", 7)
    users, items = (rng.standard_normal((n, 4)).astype(np.float32) for n in (500, 60))
    seen = [rng.choice(59, 20, replace=False) for _ in users]
    answers = np.array([rng.choice(np.setdiff1d(np.arange(60), own)) for own in seen])
    answers[:50] = -1
    questions = retrieval.Questions(np.arange(500), answers, seen, np.arange(60), np.ones(60))
    found = 0
    for user, own, answer in zip(users, seen, answers, strict=True):
        ranked = [item for item in np.argsort(-(items @ user)) if item not in own]
        found += answer in ranked[: retrieval.TOP]
    assert 50 < found < 450  # by chance a quarter of 450, give or take 9
    assert retrieval.recall(questions, users, items) == pytest.approx(found / 500)


def test_candidates_that_tie_have_equal_chances() -> None:
    counts = np.array([9] * 8 + [5] * 4 + [1])  # two of the four places at 5 are among the ten
    answers = np.array([0, 8, 12])
    seen = [np.zeros(0, int)] * 3
    questions = retrieval.Questions(np.arange(3), answers, seen, np.arange(13), counts)
    assert retrieval.popularity_recall(questions) == pytest.approx((1 + 0.5 + 0) / 3)


# The loss


def _model() -> Any:
    args = Namespace(capacity=128, dim=4, lr=0.01, seed=SEED)
    return two_tower.TwoTower(args, nnx.Rngs(SEED))


def test_one_id_has_another_first_row_in_each_tower() -> None:
    """Equal seeds would tell a model that user 7 likes item 7."""
    ids, model = np.arange(100, dtype=np.int32), _model()
    users, items = (np.asarray(tower.embed(ids)) for tower in (model.user, model.item))
    cosines = np.sum(users * items, axis=1)
    cosines /= np.linalg.norm(users, axis=1) * np.linalg.norm(items, axis=1)
    assert abs(cosines.mean()) < 0.2  # of 100 cosines in 4 dimensions: 4 standard deviations


def _loss(model: Any, items: np.ndarray, frequency: np.ndarray, valid: np.ndarray) -> float:
    users = np.arange(len(items), dtype=np.int32)
    keys = (hkv.Keys.from_numpy(ids) for ids in (users, items))
    return float(two_tower.loss_of(model, *keys, np.log(frequency).astype(np.float32), valid))


def test_the_loss_is_a_corrected_softmax_without_accidental_hits_and_padding() -> None:
    items, valid = np.array([5, 6, 5, 7, 8]), np.array([True, True, True, True, False])
    frequency = np.array([0.5, 0.25, 0.5, 0.125, 0.1])
    model = _model()
    queries = np.asarray(model.user(np.arange(5, dtype=np.int32)), np.float64)
    targets = np.asarray(model.item(items.astype(np.int32)), np.float64)
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), 1, rtol=1e-5)
    logits = queries @ targets.T / two_tower.TEMPERATURE - np.log(frequency)
    losses = []
    for row in range(4):
        others = [j for j in range(4) if j == row or items[j] != items[row]]
        losses.append(np.log(np.exp(logits[row, others]).sum()) - logits[row, row])
    assert _loss(model, items, frequency, valid) == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_batch_of_one_item_has_no_negatives_and_so_no_loss() -> None:
    assert _loss(_model(), np.full(4, 5), np.ones(4), np.ones(4, bool)) == 0.0


# The program


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "two_tower.py", *map(str, arguments)]
    environment = os.environ | WITHOUT_HOST_DEVICES
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _main(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert two_tower.main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.slow  # what other tests show of smaller programs
def test_the_last_line_is_one_json_object_and_is_the_same_twice_in_a_row(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = _write(tmp_path / "list.tsv.gz", _clusters(100, 6, rng))
    runs = [_run(*SMALL, "--data", path, "--epochs", 3, "--seed", 5) for _ in range(2)]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr
    assert "step" in runs[0].stderr  # the progress
    first, second = (json.loads(done.stdout.splitlines()[-1]) for done in runs)
    assert first.keys() == FIGURES
    assert first.pop("examples_per_second") > 0
    second.pop("examples_per_second")
    assert first == second
    assert (first["examples"], first["questions"], first["seed"]) == (3 * 500, 100, 5)
    assert (first["users"], first["evicted"]) == (100, 0)
    assert first["items"] == first["candidates"] <= 200


@pytest.mark.slow
def test_the_towers_find_more_than_popularity_does(
    small_list: None, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _main(capsys, *SMALL, "--epochs", 5, "--lr", 0.03)
    print(figures)
    assert figures["recall_at_10"] > 2 * figures["popularity_recall_at_10"] > 0


def test_clusters_in_a_file_are_learnt(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path / "list.tsv", _clusters(200, 15, rng))
    figures = _main(capsys, *SMALL, "--data", path, "--epochs", 8, "--lr", 0.03)
    print(figures)
    # The answer is one of the six items of 200 that are in the user's cluster and not seen.
    assert figures["recall_at_10"] > 0.8
    assert figures["popularity_recall_at_10"] < 0.2


def test_tables_smaller_than_the_vocabulary_evict_and_still_learn(
    small_list: None, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _main(capsys, *SMALL, "--epochs", 1, "--capacity", 128)
    assert (figures["users"], figures["items"]) == (128, 128)
    assert figures["evicted"] > 1000
    assert 0 < figures["hit_rate"] < 1


BAD_LINES = {
    "one field": (b"ann", "expected a user and an item, got 'ann'"),
    "three fields": (b"ann\ttea\t5", "expected a user and an item, got 'ann"),
    "no item": (b"ann,", "got 'ann,'"),
    "no user": (b"\ttea", "got '\\ttea'"),
    "an empty line": (b"", "got ''"),
    "bytes that are no text": (b"\xff\xfe", r"got '\\xff\\xfe'"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_an_error_that_names_file_and_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, expected = BAD_LINES[kind]
    path = _write(tmp_path / "list.tsv", [b"ann\ttea", b"bob\ttea", line, b"ann\ta hat"])
    assert two_tower.main(["--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:3: expected a user and an item, got ")
    assert expected in error and error.count("\n") == 1


def test_a_truncated_archive_names_the_line_where_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path / "list.gz", [b"user %d" % number for number in range(9999)])
    path.write_bytes(path.read_bytes()[:-2000])
    assert two_tower.main(["--data", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:") and "the archive is damaged or cut short" in error


@pytest.mark.parametrize(
    ("lines", "arguments", "expected"),
    [
        ([], [], "list.tsv: the file is empty, expected lines of a user and an item"),
        ([b"a x", b"b x", b"a x"], [], "no user has two different items"),
        ([b"a x"], ["--data", "none.tsv"], "none.tsv: No such file"),
        ([b"a x", b"a y"], ["--capacity", 2**40], "--capacity 1099511627776 --dim 8: Embed: cap"),
        ([b"a x", b"b y", b"a y"], ["--batch", 10**7], "--batch 10000000: RESOURCE_EXHAUSTED"),
        ([b"a x", b"b y", b"a y"], ["--lr", "1e38", "--epochs", 9], "try a smaller --lr"),
    ],
)
def test_a_mistake_of_the_users_gives_one_line_and_code_2(
    lines: list[bytes],
    arguments: list[object],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = _write(tmp_path / "list.tsv", lines)
    assert two_tower.main([str(a) for a in (*SMALL, "--data", path, *arguments)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and expected in last


def test_a_wrong_option_is_named_with_what_was_expected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        two_tower.main(["--epochs", "0"])
    assert caught.value.code == 2
    assert "argument --epochs: expected a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_without_arguments_recall_is_several_times_that_of_popularity() -> None:
    done = _run()
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    print(figures)
    assert figures["recall_at_10"] > 5 * figures["popularity_recall_at_10"]
    assert figures["evicted"] == 0
