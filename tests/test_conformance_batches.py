"""Behaviours 26 to 28 of the conformance list: what a batch may be, and its determinism."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import EVICTED, FOUND, INSERTED, LANES, MISSING, POLICIES

import jax_hkv as hkv

SIZES = [
    (0, "LFU", 2),
    (1, "LRU", 1),
    (31, "LFU", 2),
    (33, "EPOCH_LRU", 2),
    (127, "EPOCH_LFU", 1),
    (128, "CUSTOM", 2),
    (129, "LRU", 2),
    (5000, "CUSTOM", 1),
    (5000, "EPOCH_LFU", 2),
    pytest.param(10**6, "LFU", 1, marks=pytest.mark.slow),
    pytest.param(10**6, "CUSTOM", 2, marks=pytest.mark.slow),
]
SUBNORMAL = np.float32(1e-40)


def rows_of(keys, dim=1):
    return np.repeat((keys % np.uint64(2**20)).astype(np.float32)[:, None], dim, axis=1)


def batch_of(rng, count, policy, dim=2, key_range=2000):
    """Keys, rows and the scores that the policy takes; duplicates for more than a few keys."""
    keys = oracle.mix(rng.integers(0, key_range, count).astype(np.uint64))
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    scores = rng.integers(0, 1000, count).astype(np.uint64)
    return keys, rows, scores if policy in oracle.SCORED_POLICIES else None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("is_full", [False, True])
def test_many_occurrences_of_a_new_key_take_one_slot(policy, choices, is_full, twin):
    """26: the first is inserted, the 1,023 others find it."""
    both = twin(2 * LANES, 1, policy=policy, choices=choices)
    scores = np.ones(1024, np.uint64) if policy == "CUSTOM" else None
    if is_full:
        keys = np.arange(1024, dtype=np.uint64)
        both.insert_or_assign(keys, rows_of(keys), scores)
    keys = np.full(1024, 2**40, np.uint64)
    outcome = both.insert_or_assign(keys, rows_of(np.arange(1024, dtype=np.uint64)), scores)
    first = EVICTED if is_full else INSERTED
    assert outcome.status.tolist() == [first] + [FOUND] * 1023
    assert len(np.unique(outcome.slots)) == 1
    assert outcome.counts == (1, 0, 1, int(is_full), 0, 0)
    assert both.oracle.size == (2 * LANES if is_full else 1)
    assert both.find(keys[:1]).values[0, 0] == 1023


@pytest.mark.parametrize(("count", "policy", "choices"), SIZES)
def test_every_operation_takes_batches_of_any_length(count, policy, choices, twin, rng):
    """27: wholly valid, masked in part, and wholly masked, which ticks the clock and no more."""
    both = twin(max(600, count), 2, policy=policy, choices=choices)
    both.insert_or_assign(*batch_of(rng, 600, policy))
    for ticks, share in zip((1, 8, 15), (1.0, 0.7, 0.0), strict=True):
        keys, rows, scores = batch_of(rng, count, policy, key_range=max(800, count))
        valid = rng.random(count) < share
        exists = rng.random(count) < 0.5
        before = both.oracle.size
        both.find(keys, valid=valid)
        both.contains(keys, valid=valid)
        changes = [
            both.find_or_insert(keys, None, scores, valid, return_evicted=True),
            both.insert_or_assign(keys, rows, scores, valid),
            both.insert_and_evict(keys, rows, scores, valid),
            both.accum_or_assign(keys, rows, exists, scores, valid),
            both.assign(keys, rows, valid=valid),
            both.erase(keys, valid=valid),
            both.find_or_insert(keys, rows, scores, valid),
        ]
        assert both.oracle.time == ticks + len(changes)
        if share == 0.0 or count == 0:
            assert all((change.status == MISSING).all() for change in changes)
            assert both.oracle.size == before


def workload(policy, choices, count, rng):
    """A table and three batches whose rows and sums are subnormal here and there."""
    table = hkv.create(
        1000,
        4,
        policy=hkv.Policy[policy],
        choices=choices,
        init=hkv.initializers.normal(1e-39),
        seed=5,
    )
    batches = []
    for _ in range(3):
        keys, rows, scores = batch_of(rng, count, policy, dim=4)
        rows[::2] *= SUBNORMAL
        scores = None if scores is None else hkv.Keys.from_numpy(scores)
        batches.append((hkv.Keys.from_numpy(keys), jnp.asarray(rows), scores))
    return table, batches


def step(table, batch):
    """Every kind of change once."""
    keys, rows, scores = batch
    table, inserted = hkv.find_or_insert(table, keys, scores=scores, return_evicted=True)
    table, assigned = hkv.insert_and_evict(table, keys, rows, scores=scores)
    exists = jnp.arange(keys.shape[0]) % 3 != 0
    table, added = hkv.accum_or_assign(table, keys, rows, exists, scores=scores)
    table, found = hkv.find(table, keys, fill="initial")
    table, erased = hkv.erase(table, keys, valid=jnp.arange(keys.shape[0]) % 4 == 0)
    return table, (inserted, assigned, added, found, erased)


def bits_of(tree):
    return [oracle.as_bits(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]


def run_eagerly(table, batches):
    results = []
    for batch in batches:
        table, result = step(table, batch)
        results.append(result)
    return table, results


def run_jitted(table, batches, donate=()):
    results, jitted = [], jax.jit(step, donate_argnums=donate)
    for batch in batches:
        table, result = jitted(table, batch)
        results.append(result)
    return table, results


def run_unrolled(table, batches):
    return jax.jit(run_eagerly)(table, batches)


def run_scanned(table, batches):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    table, results = jax.jit(partial(jax.lax.scan, step))(table, stacked)
    return table, [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(batches))]


WAYS = {
    "jitted": run_jitted,
    "donated": partial(run_jitted, donate=0),
    "unrolled": run_unrolled,
    "scanned": run_scanned,
}


CASES = [*zip(POLICIES, [1, 2, 2, 1, 2], strict=True)]


@pytest.mark.parametrize(("policy", "choices"), CASES)
def test_a_result_has_the_same_bits_however_it_is_computed(policy, choices, platform, rng):
    """28: twice eagerly, jitted, donated, unrolled in one program and in scan."""
    table, batches = workload(policy, choices, 700, rng)
    expected = bits_of(run_eagerly(table, batches))
    again = bits_of(run_eagerly(table, batches))
    assert all(np.array_equal(a, b) for a, b in zip(expected, again, strict=True))
    for way, run in WAYS.items():
        fresh = jax.tree.map(jnp.copy, table)
        actual = bits_of(run(fresh, batches))
        equal = [np.array_equal(a, b) for a, b in zip(expected, actual, strict=True)]
        assert all(equal), f"{way}: leaves {np.flatnonzero(~np.array(equal))} differ"


def digest_of_runs():
    """A digest of everything that large workloads compute in this process."""
    digest = hashlib.sha256()
    for policy, choices in CASES:
        for leaf in bits_of(
            run_jitted(*workload(policy, choices, 50_000, np.random.default_rng(28)))
        ):
            digest.update(leaf.tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a way to bind threads")
def test_the_number_of_threads_changes_no_bit():
    """28: one processor in another process, all of them here."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "import test_conformance_batches as t; print(t.digest_of_runs())"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).parent
    command = [sys.executable, "-c", code]
    single = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    with jax.default_device(jax.devices("cpu")[0]):
        assert single.stdout.split()[-1] == digest_of_runs()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_subnormal_numbers_are_kept(dtype, twin, rng):
    """28: copied, found, exported, evicted and summed, as single numbers and in sums."""
    both = twin(LANES, 3, dtype=dtype)
    keys = np.repeat(np.arange(40, dtype=np.uint64), 3)
    smallest = np.array(1, f"u{np.dtype(dtype).itemsize}").view(dtype).astype(np.float64)
    rows = (rng.integers(-60, 60, (120, 3)) * smallest).astype(dtype)
    both.insert_or_assign(keys, rows)
    both.accum_or_assign(keys, rows, np.ones(120, bool))
    assert (oracle.as_bits(both.find(keys).values) != 0).mean() > 0.9
    both.export_batch(0, LANES)
    newcomers = 1000 + np.arange(LANES, dtype=np.uint64)
    evicted = both.insert_and_evict(newcomers, rows_of(newcomers, 3).astype(dtype)).evicted
    assert evicted.count == 40


def test_the_subnormal_mode_of_xla_is_what_it_was(platform):
    """28: an operation between two XLA computations does not change the second."""
    table = hkv.create(LANES, 1)
    keys = hkv.Keys.from_numpy(np.arange(10, dtype=np.uint64))
    rows = jnp.full((10, 1), 3 * SUBNORMAL)
    halve = jax.jit(lambda rows: rows * 0.5)

    @jax.jit
    def around(table, rows):
        table, _ = hkv.insert_or_assign(table, keys, rows)
        exists = jnp.ones(10, bool)
        table, _ = hkv.accum_or_assign(table, keys, rows, exists)
        return table, halve(rows)

    before = np.asarray(halve(rows))
    _, inside = around(table, rows)
    assert np.array_equal(before, np.asarray(inside))
    assert np.array_equal(before, np.asarray(halve(rows)))
