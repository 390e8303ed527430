"""Numbers of a step, the summary of a table, and its picture."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
from jax_hkv import metrics, plots, sharding
from jax_hkv.sharding import Exchange, Placement

SGD = hkv.optim.sparse(optax.sgd(0.1, momentum=0.9))


def keys_of(rng, length, universe=2**62):
    return hkv.Keys.from_numpy(rng.integers(0, universe, length))


def test_metrics_of_a_train_step_are_its_counts_and_the_state_of_the_table(rng):
    table = SGD.init(hkv.create(128, 2, policy=hkv.Policy.CUSTOM))

    @jax.jit
    def step(table, keys, scores):
        table, result = hkv.find_or_insert(table, keys, scores=scores)
        table = SGD.update(table, result, result.values)
        return table, metrics.of(table, result, overflow=3), result.counts

    for _ in range(3):
        scores = rng.integers(0, 1000, 100).astype(np.uint32)
        table, values, counts = step(table, keys_of(rng, 100), scores)
        assert isinstance(values, metrics.Metrics)
        for name in counts._fields:
            assert int(getattr(values, name)) == int(getattr(counts, name)), name
        assert values.load_factor == int(hkv.size(table)) / 128
        assert int(values.overflow) == 3 and int(values.skipped) == 0
    assert int(values.refused) > 0 and int(values.evicted) > 0


def test_a_step_that_returns_metrics_copies_no_table():
    def step(table, keys):
        table, result = hkv.find_or_insert(table, keys)
        table = SGD.update(table, result, result.values)
        return table, metrics.of(table, result)

    table = SGD.init(hkv.create(1024, 8))
    batches = hkv.Keys.from_numpy(np.arange(60).reshape(3, 20))
    hkv.testing.assert_no_table_copies(step, table, batches[0])
    hkv.testing.assert_no_table_copies(lambda t, b: jax.lax.scan(step, t, b), table, batches)


def test_metrics_of_several_results_are_sums_and_skipped_rows_are_seen():
    table = SGD.init(hkv.create(128, 2))
    table, one = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(3)))
    table, two = hkv.find_or_insert(table, hkv.Keys.from_numpy(np.arange(2, 7)))
    table, written = hkv.insert_or_assign(table, jnp.array([9]), jnp.ones((1, 2), jnp.float32))
    table, _ = hkv.erase(table, hkv.Keys.from_numpy(np.arange(2)))
    table = SGD.update(table, one, one.values)
    values = metrics.of(table, [one, two, written])
    got = {name: int(value) for name, value in values._asdict().items() if name != "load_factor"}
    assert got == {
        "hits": 1,
        "inserted": 8,
        "evicted": 0,
        "refused": 0,
        "not_admitted": 0,
        "unique": 9,
        "overflow": 0,
        "skipped": 2,
    }
    assert int(metrics.of(hkv.create(128, 2), []).unique) == 0
    assert values.load_factor == 6 / 128


@pytest.mark.parametrize(
    "call, check_vma, replicas",
    pairs(["find_or_insert", "insert_or_assign"], [False, True], [False, True]),
)
def test_metrics_of_a_step_of_ones_own_are_those_of_all_devices(call, check_vma, replicas):
    """Of a lookup whose keys overflowed, and of a table that has skipped updates before."""
    placement = Placement(jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4]))
    tight = Exchange("device", replicas=replicas, distinct=0.05, slack=0.1)

    def step(table, keys, rows):
        table, result = sharding.find_or_insert(table, keys, axis_name=tight)
        other, _ = sharding.erase(table, keys[:2], axis_name=tight)
        table = sharding.update(SGD, other, result, result.values)
        given = () if call == "find_or_insert" else (rows,)
        table, own = getattr(sharding, call)(table, keys, *given, axis_name=tight)
        results = [result, own]
        report = {"in": metrics.of(table, results), "overflow": result.overflow + own.overflow}
        return table, (report, results)

    table = placement.create(lambda: SGD.init(hkv.create(1024, 2, replicas=replicas)))
    keys = hkv.Keys.from_numpy(np.arange(400))
    inputs = placement.put((keys, np.ones((400, 2), np.float32)))
    if check_vma:
        specs = placement.specs(table)
        mapped = jax.shard_map(
            lambda *given: (lambda after, reports: (after, reports[0]))(*step(*given)),
            mesh=placement.mesh,
            in_specs=(specs, P("device"), P("device")),
            out_specs=(specs, P()),
        )
        table, report = jax.jit(mapped)(table, *inputs)
    else:
        table, (report, results) = placement.step(step)(table, *inputs)
        assert_equal(metrics.of(table, results), report["in"])  # of outputs, outside of the step
    found, overflow = report["in"], int(report["overflow"])
    assert found.load_factor == float(hkv.load_factor(table)) == 400 / (1024 if replicas else 4096)
    assert (int(found.overflow), int(found.skipped)) == (overflow, 8)
    assert overflow > 0 or replicas
    for shards in jax.tree.leaves(found):
        assert len({shard.data.item() for shard in shards.addressable_shards}) == 1


def assert_equal(one, other):
    assert jax.tree.map(float, one) == jax.tree.map(float, other)


def test_metrics_of_something_else_are_refused():
    table = hkv.create(128, 2)
    with pytest.raises(TypeError, match=r"metrics\.of: result must be what .* got FindResult"):
        metrics.of(table, [hkv.find(table, jnp.array([1]))[1]])  # pyright: ignore
    with pytest.raises(TypeError, match=r"metrics\.of: result must be what .* got FindResult"):
        metrics.of(*hkv.find(table, jnp.array([1])))  # pyright: ignore
    with pytest.raises(TypeError, match=r"metrics\.of: table must be"):
        metrics.of(3, [])  # pyright: ignore


@pytest.mark.parametrize("policy", list(hkv.Policy))
def test_a_summary_says_what_numpy_says(rng, policy, monkeypatch):
    """Scores of all 64 bits, read in several chunks, the last one shorter."""
    monkeypatch.setattr(metrics, "_CHUNK_BUCKETS", 3)
    rule = hkv.admission.frequency(2, width=50)
    table = hkv.create(1000, 4, policy=policy, choices=2, name="users", admission=rule)
    table = SGD.init(hkv.advance_epoch(table, 2**32 - 5))
    for _ in range(4):
        table = hkv.advance_epoch(table)
        words = rng.integers(1, 2**20 if policy.counts else 2**64, 150, np.uint64)
        is_given = policy.counts or policy is hkv.Policy.CUSTOM
        scores = hkv.Keys.from_numpy(words) if is_given else None
        table, _ = hkv.insert_or_assign(
            table, keys_of(rng, 150), jnp.ones((150, 4), jnp.float32), scores=scores
        )
    summary = metrics.summarize(table)

    occupied = np.asarray(table.digests) != 0
    expected = np.sort(np.asarray(table.scores)[occupied].view("<u8").reshape(-1))
    assert (summary.name, summary.capacity, summary.dim) == ("users", 1024, 4)
    assert (summary.dtype, summary.policy, summary.choices) == ("float32", policy.name, 2)
    assert summary.size == occupied.sum() == 600 and summary.load_factor == 600 / 1024
    by_bucket = occupied.sum(axis=1).tolist()
    assert summary.occupancy_histogram.shape == (129,)
    assert [*np.flatnonzero(summary.occupancy_histogram)] == sorted(set(by_bucket))
    assert all(summary.occupancy_histogram[n] == by_bucket.count(n) for n in by_bucket)
    assert summary.score_quantiles == {
        q: int(expected[int(q * 599)]) for q in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    assert summary.nbytes["total"] == table.nbytes
    assert summary.nbytes["values"] == 1024 * 4 * 4 and summary.nbytes["admission"] == 800
    assert summary.nbytes["optimizer"] == 1024 * 4 * 4 + 4 * 4 + 4
    assert (summary.epoch, summary.clock) == (2**32 - 1, 4)
    text = str(summary)
    assert "600 (load factor 0.586)" in text
    epochs, lows = expected >> np.uint64(32), np.sort(expected & np.uint64(2**32 - 1))
    counts = {"LFU": expected, "EPOCH_LFU": lows}.get(policy.name)
    epochs = epochs if policy.name.startswith("EPOCH") else None
    shown = {"score": expected if epochs is None else None, "epoch": epochs, "count": counts}
    for name, numbers in shown.items():
        lines = [line for line in text.splitlines() if line.startswith(f"{name}, ")]
        quantiles = [] if numbers is None else [int(numbers[int(q * 599)]) for q in (0, 0.25, 0.5)]
        assert [line.split()[-1] for line in lines][:3] == [f"{n:,}" for n in quantiles]
        if name != "score":
            assert [*getattr(summary, f"{name}_quantiles").values()][:3] == quantiles
    assert max(map(len, text.splitlines())) < 80


def test_the_summary_of_an_empty_table_has_no_quantiles():
    summary = metrics.summarize(hkv.create(300, 4))
    assert summary.size == 0 and summary.score_quantiles == {}
    assert summary.occupancy_histogram.tolist() == [3] + 128 * [0]
    assert "score" not in str(summary) and "0 (load factor 0.000)" in str(summary)


def test_a_picture_shows_the_summary(rng, tmp_path):
    table = hkv.create(128 * 64, 4)
    table, _ = hkv.find_or_insert(table, keys_of(rng, 128 * 40))
    summary = metrics.summarize(table)
    path = tmp_path / "table.png"
    figure = plots.summary(table, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    occupancy, scores, sizes = figure.axes
    heights = [bar.get_height() for bar in occupancy.patches]  # pyright: ignore
    assert heights == summary.occupancy_histogram.tolist()
    (line,) = occupancy.lines
    assert np.asarray(line.get_ydata()).sum() == pytest.approx(64)
    (line,) = scores.lines
    assert list(line.get_ydata()) == list(summary.score_quantiles.values())
    widths = [bar.get_width() for bar in sizes.patches]  # pyright: ignore
    assert sum(widths) == summary.nbytes["total"]
    assert len(plots.summary(summary).axes) == 3


def test_the_expected_occupancy_is_what_random_keys_give(rng):
    """4096 buckets that evict: the curve lies within what chance does to a count."""
    buckets = 4096
    kept = np.minimum(np.bincount(rng.integers(0, buckets, 120 * buckets), minlength=buckets), 128)
    counts = np.bincount(kept, minlength=129)
    expected = plots.expected_occupancy(int(kept.sum()), buckets)
    assert expected is not None and expected.sum() == pytest.approx(buckets)
    assert expected @ np.arange(129) == pytest.approx(kept.sum())
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected + 1)).all()


def test_a_full_and_an_empty_table_have_a_picture():
    assert plots.expected_occupancy(256, 2) is None
    full, _ = hkv.find_or_insert(hkv.create(128, 2), jnp.arange(500))
    assert plots.summary(full).axes[0].lines[:] == []
    (line,) = plots.summary(hkv.create(128, 2)).axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), [1.0] + 128 * [0.0], atol=1e-12)
    with pytest.raises(TypeError, match=r"plots\.summary: table must be .* got str"):
        plots.summary("table")  # pyright: ignore


@pytest.mark.parametrize("overflow", ["x", 0.5])
def test_an_overflow_that_is_no_count_is_named(overflow):
    table, result = hkv.find_or_insert(hkv.create(128, 1), np.array([5], np.int32))
    assert int(metrics.of(table, result, None).overflow) == 0  # those of the results
    with pytest.raises(TypeError, match="metrics.of: overflow must be a count.* got (str|float)"):
        metrics.of(table, result, overflow)


def test_a_load_factor_is_one_number_jitted_or_not():
    """Compilers take a division by a constant for a multiplication by its inverse."""
    table = hkv.create(384, 1)
    jitted = jax.jit(hkv.load_factor)
    for entries in range(1, 128):
        occupancy = jnp.array([entries, entries, 5], jnp.int32)
        index = dataclasses.replace(table.index, occupancy=occupancy)
        filled = dataclasses.replace(table, index=index)
        expected = np.float32(2 * entries + 5) / np.float32(384)
        assert float(hkv.load_factor(filled)) == float(jitted(filled)) == float(expected)
        several = jax.tree.map(lambda leaf: leaf[None], filled)
        assert jax.vmap(hkv.load_factor)(several).tolist() == [float(expected)]
