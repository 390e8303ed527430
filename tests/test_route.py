"""Keys on their way to the devices that own them: the native routing against the oracle."""

from __future__ import annotations

import jax
import numpy as np
import oracle_sharding
import pytest
from oracle import GOLDEN, U64_MAX, candidate_buckets
from oracle_rows import mix
from oracle_sharding import Route, owner_of
from scipy import stats

import jax_hkv as hkv
from jax_hkv import _ffi

# (devices, inner, p): one hop to all devices, then the outer and the inner hop of 2 x 3 and 8 x 8.
HOPS = [(1, 1, 1), (2, 1, 2), (3, 1, 3), (8, 1, 8), (6, 3, 2), (6, 1, 3), (64, 8, 8), (64, 1, 8)]
CHANCE = 1e-6  # that even counts of random keys would come out worse; the keys here are fixed
BUCKETS = 64


def route(keys, valid=None, *, devices, inner=1, p=None, c):
    """The native operation, jitted, on 64-bit words; all are valid by default."""
    valid = np.ones(len(keys), bool) if valid is None else valid
    attributes = {"devices": devices, "inner": inner, "p": devices if p is None else p, "c": c}
    call = jax.jit(lambda words, valid: _ffi.call("route_keys", words, valid, **attributes))
    found = call(hkv.Keys.from_numpy(keys).words, valid)
    return Route(*(np.asarray(result) for result in found))


def assert_routed(keys, valid, **attributes):
    found = route(keys, valid, **attributes)
    expected = oracle_sharding.route(keys, valid, **attributes)
    for name, actual, wanted in zip(Route._fields, found, expected, strict=True):
        assert actual.dtype == wanted.dtype == np.int32, name
        np.testing.assert_array_equal(actual, wanted, err_msg=name)
    return found


def random_batch(rng, n):
    """Keys of all sizes with many that occur again, 0 and 2^64 - 1 among them."""
    keys = rng.integers(0, 2**64, n, dtype=np.uint64)
    keys[: n // 2] = keys[n // 2 : 2 * (n // 2)][rng.integers(0, n // 4 + 1, n // 2)]
    keys[rng.random(n) < 0.05] = 0
    keys[rng.random(n) < 0.05] = U64_MAX
    return rng.permutation(keys), rng.random(n) < rng.choice([0.1, 0.8, 1.0])


def evenness(counts):
    """The chance that random draws of equal probability are less even than the counts."""
    return stats.chisquare(counts).pvalue


@pytest.mark.parametrize("n", [0, 1, 31, 129, 5000])
@pytest.mark.parametrize(("devices", "inner", "p"), HOPS)
def test_a_batch_is_routed_as_the_oracle_says(platform, rng, devices, inner, p, n):
    keys, valid = random_batch(rng, n)
    for c in (1, 2, n // (2 * p) + 1, n + 3):  # places for one key, for some, and for all
        assert_routed(keys, valid, devices=devices, inner=inner, p=p, c=c)


def test_a_large_batch_is_routed_as_the_oracle_says(platform, rng):
    """Many tasks on the CPU, with a part for each peer and with several peers in a part."""
    keys, valid = random_batch(rng, 100_000)
    for devices, c in ((8, 20_000), (300, 400)):
        assert_routed(keys, valid, devices=devices, inner=1, p=devices, c=c)


def test_every_position_is_sent_once_or_has_no_place(platform, rng):
    keys, valid = random_batch(rng, 1000)
    sent, places, counts = route(keys, valid, devices=4, c=150)
    assert counts.sum() == valid.sum()
    assert np.all(places[~valid] == -1)
    went = np.flatnonzero(places >= 0)
    np.testing.assert_array_equal(sent.ravel()[places[went]], went)
    np.testing.assert_array_equal(np.sum(sent >= 0, axis=1), np.minimum(counts, 150))
    assert len(went) == np.minimum(counts, 150).sum()


def test_keys_beyond_the_places_are_counted_and_the_first_ones_are_sent(platform):
    keys = np.full(50, 7, np.uint64)
    sent, places, counts = route(keys, devices=8, c=20)
    owner = int(owner_of(keys[:1], 8)[0])
    assert counts.tolist() == [50 if peer == owner else 0 for peer in range(8)]
    assert sent[owner].tolist() == list(range(20))
    assert places.tolist() == [owner * 20 + i for i in range(20)] + [-1] * 30


def test_a_masked_batch_sends_nothing(platform):
    keys = np.arange(40, dtype=np.uint64)
    sent, places, counts = route(keys, np.zeros(40, bool), devices=3, c=5)
    assert np.all(sent == -1) and np.all(places == -1) and np.all(counts == 0)


def test_two_hops_lead_to_the_owner(platform, rng):
    keys, valid = random_batch(rng, 500)
    outer, inner = 4, 3
    first = route(keys, valid, devices=12, inner=inner, p=outer, c=500)
    second = route(keys, valid, devices=12, inner=1, p=inner, c=500)
    reached = first.places // 500 * inner + second.places // 500
    np.testing.assert_array_equal(reached[valid], owner_of(keys[valid], 12))


@pytest.mark.parametrize("key", [0, 1, 2**32, 2**63, U64_MAX])
@pytest.mark.parametrize("devices", [1, 2, 7, 8, 1024])
def test_the_owner_is_the_high_word_of_the_product_of_a_third_hash(platform, key, devices):
    """In Python's integers, apart from `mix`, which the tests of the oracle look at."""
    golden = int(GOLDEN)
    hashed = int(mix(np.array([(key + golden) % 2**64], np.uint64))[0])
    own = int(mix(np.array([(hashed + 2 * golden) % 2**64], np.uint64))[0])
    keys = np.array([key], np.uint64)
    assert owner_of(keys, devices).tolist() == [own * devices >> 64]
    assert route(keys, devices=devices, c=1).counts.argmax() == own * devices >> 64


@pytest.mark.parametrize("start", [0, 2**40, 2**64 - 200_000])
@pytest.mark.parametrize("stride", [1, 8, 2**20])
@pytest.mark.parametrize("devices", [7, 8])
def test_regular_keys_have_owners_evenly(platform, devices, stride, start):
    keys = np.uint64(start) + np.arange(200_000, dtype=np.uint64) * np.uint64(stride)
    counts = route(keys, devices=devices, c=1).counts
    assert counts.sum() == len(keys)
    assert evenness(counts) > CHANCE, counts


@pytest.mark.parametrize("devices", [7, 8])
def test_the_keys_of_one_owner_spread_over_all_buckets_evenly(platform, devices):
    keys = np.arange(200_000, dtype=np.uint64)
    sent = route(keys, devices=devices, c=len(keys)).sent
    for positions in sent:
        owned = keys[positions[positions >= 0]]
        for buckets in candidate_buckets(owned, BUCKETS, 2).T:
            counts = np.bincount(buckets, minlength=BUCKETS)
            assert evenness(counts) > CHANCE, counts
