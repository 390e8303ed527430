"""A recorded trace of a production recommender, replayed through find_or_insert."""

from __future__ import annotations

import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hkv as hkv

TRACE = Path(__file__).parents[2] / "shared" / "data" / "scarab-recs.trace.xz"
EXACT_LRU = 60.60  # percent of requests, a fully associative cache of as many entries
CAPACITY = 25_837
BATCH = 256


@pytest.fixture(scope="module")
def batches():
    """The keys of the trace, batch by batch, as words."""
    if not TRACE.exists():
        pytest.skip(f"the trace {TRACE.name} is not beside the repository")
    keys = np.frombuffer(lzma.decompress(TRACE.read_bytes()), ">i8").astype(np.int64)
    assert len(keys) % BATCH == 0
    return hkv.Keys.from_numpy(keys.reshape(-1, BATCH))


def hit_ratio(batches, choices):
    """Requests, in percent, whose key was there before or occurs earlier in their batch."""

    def replay(table, keys):
        table, result = hkv.find_or_insert(table, keys)
        return table, jnp.sum(result.status == hkv.Status.FOUND)

    table = hkv.create(CAPACITY, 1, choices=choices)
    assert table.capacity - CAPACITY < 128
    _, hits = jax.jit(lambda *state: jax.lax.scan(replay, *state), donate_argnums=0)(table, batches)
    return 100 * float(np.sum(np.asarray(hits), dtype=np.int64)) / (hits.size * BATCH)


@pytest.mark.usefixtures("platform")
def test_two_choices_come_close_to_an_exact_lru_cache(batches):
    """The hit ratio is within 2 points of the exact cache's."""
    ratios = {choices: hit_ratio(batches, choices) for choices in (1, 2)}
    print(f"hit ratio: {ratios}; exact LRU: {EXACT_LRU}")
    assert abs(ratios[2] - EXACT_LRU) < 2.0
