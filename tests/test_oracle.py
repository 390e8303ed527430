"""The oracle itself, against expectations that are derived in another way."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle
import oracle_rows
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import EVICTED, FOUND, INSERTED, LANES, MISSING, REFUSED, U64_MAX, Init, Oracle
from scipy import special, stats

WORD = st.integers(0, U64_MAX)
BATCH = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40)
NORMAL_DRAWS = 2**17


def words(*values):
    return np.array(values, np.uint64)


def rows(*values):
    return np.array(values, np.float32).reshape(-1, 1)


def mix_by_integers(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def hash_by_integers(key):
    return mix_by_integers((key + 0x9E3779B97F4A7C15) % 2**64)


def filled_bucket(policy, scores=None):
    """One bucket whose lane i holds key i."""
    table = Oracle(LANES, 1, policy=policy)
    keys = np.arange(LANES, dtype=np.uint64)
    table.insert_or_assign(keys, keys.astype(np.float32)[:, None], scores)
    return table


def test_hashes_are_the_published_splitmix64_sequence():
    seeds = np.arange(3, dtype=np.uint64) * oracle_rows.GOLDEN
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert oracle.hash_keys(seeds).tolist() == published


@given(WORD, st.integers(1, 2**24))
def test_buckets_and_digests_follow_from_products_of_big_integers(key, buckets):
    hashed = hash_by_integers(key)
    first = hashed * buckets >> 64
    second = hash_by_integers(hashed) * (buckets - 1) >> 64
    second = min(second + (second >= first), buckets - 1)
    assert oracle.digests_of(words(key))[0] == 1 + ((hashed % 2**16) * 255 >> 16)
    assert oracle.candidate_buckets(words(key), buckets, 2).tolist() == [[first, second]]
    assert oracle.candidate_buckets(words(key), buckets, 1).tolist() == [[first]]


@pytest.mark.parametrize("buckets", [1, 2, 3, 100])
def test_candidates_are_two_buckets_and_evenly_spread(buckets):
    candidates = oracle.candidate_buckets(np.arange(2**16, dtype=np.uint64), buckets, 2)
    assert (buckets == 1) == bool((candidates[:, 0] == candidates[:, 1]).any())
    for choice in candidates.T:
        assert stats.chisquare(np.bincount(choice, minlength=buckets)).pvalue > 1e-6 or buckets == 1


def test_digests_are_never_zero_and_evenly_spread():
    counts = np.bincount(oracle.digests_of(np.arange(2**16, dtype=np.uint64)), minlength=256)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-6


@given(BATCH)
def test_distinct_keys_are_those_that_a_dictionary_collects(batch):
    groups: dict[int, list[int]] = {}
    for position, (key, is_valid) in enumerate(batch):
        if is_valid:
            groups.setdefault(key, []).append(position)
    keys = np.array([key for key, _ in batch], np.uint64)
    distinct = oracle.unique(keys, np.array([is_valid for _, is_valid in batch], bool))

    assert distinct.keys.tolist() == list(groups)
    assert not distinct.unique_keys[distinct.count :].any()
    assert distinct.first.tolist() == [group[0] for group in groups.values()]
    assert distinct.last.tolist() == [group[-1] for group in groups.values()]
    order = [position for group in groups.values() for position in group]
    assert distinct.order.tolist() == order + [-1] * (len(batch) - len(order))
    ends = np.cumsum([0] + [len(group) for group in groups.values()]).tolist()
    assert distinct.offsets.tolist() == ends + [len(order)] * (len(batch) - len(groups))
    numbers = {key: number for number, key in enumerate(groups)}
    expected = [numbers[key] if is_valid else -1 for key, is_valid in batch]
    assert distinct.inverse.tolist() == expected


def sum_by_recursion(values):
    """The tree of section 8 from the top: the last level first."""
    if len(values) == 1:
        return values[0]
    width = 32
    while width * 32 < len(values):
        width *= 32
    if len(values) <= 32:
        width = 1
    parts = [sum_by_recursion(values[i : i + width]) for i in range(0, len(values), width)]
    total = parts[0]
    for part in parts[1:]:
        total = np.float32(total + part)
    return total


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1023, 1024, 1025, 40_000])
def test_tree_sums_are_those_of_the_recursion_in_every_bit(count, rng):
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 6, count)).astype(np.float32)
    assert oracle.tree_sum(values[:, None])[0] == sum_by_recursion(values)


def test_the_tree_of_sums_is_visible_in_its_rounding():
    """2^24 absorbs a 1 that meets it alone, not the 32 that are summed before."""
    values = np.ones(64, np.float32)
    values[0] = 2**24
    assert oracle.tree_sum(values[:, None])[0] == 2**24 + 32


def test_combined_rows_are_summed_per_distinct_valid_key():
    distinct = oracle.unique(words(7, 8, 7, 9, 7), np.array([1, 1, 1, 0, 1], bool))
    halves = rows(1, 2, 4, 8, 16).astype(ml_dtypes.bfloat16)
    sums = oracle.combine(halves, distinct)
    assert sums.dtype == np.float32
    assert sums.tolist() == [[21], [2]]


def test_sums_of_scores_saturate():
    distinct = oracle.unique(words(1, 2, 1, 2, 1))
    scores = words(U64_MAX, U64_MAX - 1, 1, 1, U64_MAX)
    assert oracle.saturating_sum(scores, distinct).tolist() == [U64_MAX, U64_MAX]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounding_to_half_types_goes_to_the_nearest_and_to_even(dtype, rng):
    """Against exact arithmetic on the candidates that surround each number."""
    every = np.arange(2**15, dtype=np.uint16).view(dtype)
    finite = every[np.isfinite(every.astype(np.float32))].astype(np.float64)
    samples = rng.choice(len(finite) - 1, 4096)
    between = finite[samples] + rng.random(4096) * (finite[samples + 1] - finite[samples])
    middle = (finite[samples] + finite[samples + 1]) / 2
    for exact in (between.astype(np.float32), middle.astype(np.float32)):
        below, above = exact - finite[samples], finite[samples + 1] - exact
        upwards = (above < below) | ((above == below) & (samples % 2 == 1))
        expected = finite[samples + upwards]
        for sign in (1, -1):
            rounded = oracle_rows.round_to(
                (sign * exact).astype(np.float32)[:, None], np.dtype(dtype)
            )
            assert (rounded.astype(np.float64)[:, 0] == sign * expected).all()


@pytest.mark.parametrize(("dtype", "quiet"), [(ml_dtypes.bfloat16, 0x7FC0), (np.float16, 0x7E00)])
def test_a_nan_rounds_to_the_quiet_nan_of_its_sign(dtype, quiet):
    payloads = np.array([[0x7F800001], [0xFF812345], [0x7FC00000], [0xFFFFFFFF]], np.uint32)
    halves = oracle_rows.round_to(payloads.view(np.float32), np.dtype(dtype)).view(np.uint16)
    assert halves[:, 0].tolist() == [quiet, quiet | 0x8000, quiet, quiet | 0x8000]


def test_infinity_and_overflow_round_to_infinity():
    large = np.array([[3.4e38], [-3.4e38], [np.inf]], np.float32)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        rounded = oracle_rows.round_to(large, np.dtype(dtype)).astype(np.float32)
        assert rounded[:, 0].tolist() == [np.inf, -np.inf, np.inf]


def test_the_logarithm_is_close_to_the_logarithm():
    y = np.concatenate([np.linspace(2**-23, 1, 2**20), 2.0 ** -np.arange(24)]).astype(np.float32)
    exact = np.log(y.astype(np.float64))
    assert (np.abs(oracle_rows.log(y) - exact) <= 2e-7 * np.abs(exact) + 1e-7).all()


def test_erfinv_is_close_to_the_inverse_error_function():
    every = np.arange(0, 2**24, 61, dtype=np.int64)
    x = ((2 * every + 1 - 2**24) * 2.0**-24).astype(np.float32)
    exact = special.erfinv(x.astype(np.float64))
    assert (np.abs(oracle_rows.erfinv(x) - exact) <= 2e-6 * np.abs(exact)).all()
    extreme = np.array([1 - 2.0**-24, 2.0**-24 - 1], np.float32)
    assert np.isfinite(oracle_rows.erfinv(extreme)).all()


def draw(kind, a, b, seed=0, dtype=np.float32):
    keys = np.arange(NORMAL_DRAWS // 8, dtype=np.uint64)
    return oracle_rows.initial_rows(keys, 8, dtype, Init(kind, a, b), seed)


@pytest.mark.parametrize(
    ("init", "distribution"),
    [
        (Init("uniform", -3, 5), stats.uniform(-3, 8)),
        (Init("normal", 2, 3), stats.norm(2, 3)),
        (Init("truncated_normal", 2, 3), stats.truncnorm(-2, 2, 2, 3)),
    ],
)
def test_first_rows_have_the_distribution_that_they_name(init, distribution):
    sample = draw(*init).astype(np.float64).ravel()
    assert stats.kstest(sample, distribution.cdf).pvalue > 1e-4
    assert abs(sample.mean() - distribution.mean()) < 5 * distribution.std() / len(sample) ** 0.5
    assert abs(sample.std() / distribution.std() - 1) < 0.01
    assert sample.min() >= distribution.support()[0]
    assert sample.max() <= distribution.support()[1]


def test_first_rows_are_uncorrelated_between_keys_elements_and_seeds():
    sample, other = draw("normal", 0, 1), draw("normal", 0, 1, seed=1)
    pairs = [
        (sample[1:], sample[:-1]),
        (sample[:, 1:], sample[:, :-1]),
        (sample, other),
    ]
    for left, right in pairs:
        assert abs(np.mean(left * right)) < 5 / left.size**0.5


def test_a_first_row_follows_from_seed_and_key_alone():
    init = Init("normal", 0, 1)
    wide = oracle_rows.initial_rows(words(5, 6), 8, np.float32, init, 3)
    assert np.array_equal(oracle_rows.initial_rows(words(6), 4, np.float32, init, 3), wide[1:, :4])
    base = mix_by_integers(6 ^ hash_by_integers(3))
    bits = mix_by_integers((base + 2 * 0x9E3779B97F4A7C15) % 2**64) >> 40
    assert oracle_rows.random_bits(words(6), 2, 3)[0, 1] == bits
    exact = special.erfinv((2 * bits + 1) / 2**24 - 1) * 2**0.5
    assert wide[1, 1] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("policy", ["LRU", "EPOCH_LRU"])
@pytest.mark.parametrize("batch", [1, 16])
def test_one_bucket_of_an_lru_policy_is_an_exact_lru_cache(policy, batch, rng):
    table = Oracle(LANES, 1, policy=policy)
    cache: dict[int, tuple[int, int]] = {}  # key: (time of last use, slot)
    for now in range(2000 // batch):
        keys = np.unique(rng.zipf(1.1, batch).astype(np.uint64) % np.uint64(1000))
        outcome = table.find_or_insert(keys)
        misses = [key for key in keys.tolist() if key not in cache]
        for key in set(keys.tolist()) - set(misses):
            cache[key] = (now, cache[key][1])
        for key in misses:
            slot = len(cache)
            if slot == LANES:
                slot = cache.pop(min(cache, key=cache.__getitem__))[1]
            cache[key] = (now, slot)
        assert outcome.slots.tolist() == [cache[key][1] for key in keys.tolist()]
        assert (outcome.status == FOUND).tolist() == [key not in misses for key in keys.tolist()]
    assert table.size == LANES


def test_lanes_are_filled_from_the_lowest():
    table = filled_bucket("LRU")
    table.erase(words(90, 3, 50))
    outcome = table.insert_or_assign(words(200, 201, 202), rows(1, 2, 3))
    assert outcome.slots.tolist() == [3, 50, 90]
    assert outcome.status.tolist() == [INSERTED] * 3


def test_a_refused_key_leaves_the_victim_to_the_next():
    table = filled_bucket("CUSTOM", np.arange(10, 10 + LANES, dtype=np.uint64))
    outcome = table.insert_and_evict(words(300, 301, 302), rows(1, 2, 3), words(9, 10, 10))
    assert outcome.status.tolist() == [REFUSED, EVICTED, REFUSED]
    assert outcome.slots.tolist() == [-1, 0, -1]
    assert outcome.evicted is not None
    assert outcome.evicted.keys.tolist() == [0, 0, 0]
    assert outcome.evicted.scores.tolist() == [10, 0, 0]
    assert outcome.evicted.count == 1


def test_an_lfu_score_is_the_sum_of_the_given_counts():
    table = Oracle(LANES, 1, policy="LFU")
    table.insert_or_assign(words(1, 2, 1), rows(1, 2, 3), words(5, U64_MAX, 6))
    table.insert_or_assign(words(1, 2, 2), rows(1, 2, 3))
    slots = table.find(words(1, 2)).slots
    assert table.score_words[slots].tolist() == [12, U64_MAX]
    assert table.values[slots].tolist() == [[1], [3]]


def test_an_epoch_lfu_score_saturates_in_its_low_word():
    table = Oracle(LANES, 1, policy="EPOCH_LFU")
    table.advance_epoch(7)
    table.insert_or_assign(words(1, 2), rows(1, 2), words(2**33, 5))
    table.advance_epoch()
    table.insert_or_assign(words(2, 2), rows(1, 2), words(2**32 - 6, U64_MAX))
    assert table.score_words[:2].tolist() == [(7 << 32) + 2**32 - 1, (8 << 32) + 2**32 - 1]


def test_accumulation_ignores_what_disagrees_with_presence():
    table = Oracle(LANES, 1, policy="LFU")
    table.insert_or_assign(words(1), rows(10))
    outcome = table.accum_or_assign(
        words(1, 1, 2, 2, 2, 3, 1),
        rows(1, 2, 3, 4, 5, 6, 7),
        np.array([1, 0, 1, 0, 0, 1, 1], bool),
    )
    assert outcome.status.tolist() == [FOUND, FOUND, MISSING, INSERTED, FOUND, MISSING, FOUND]
    assert outcome.slots.tolist() == [0, 0, -1, 1, 1, -1, 0]
    assert outcome.counts == (2, 1, 1, 0, 0, 0)
    assert table.values[:2].tolist() == [[18], [5]]
    assert table.score_words[:2].tolist() == [3, 2]


def test_two_choices_spread_a_batch_by_its_expected_load():
    """Round 1 by hand: every absent key counts in both of its buckets."""
    table = Oracle(3 * LANES, 1, choices=2)
    keys = np.arange(200, dtype=np.uint64)
    candidates = oracle.candidate_buckets(keys, 3, 2).tolist()
    load = [sum(bucket in pair for pair in candidates) for bucket in range(3)]
    named = [second if load[second] < load[first] else first for first, second in candidates]
    outcome = table.insert_or_assign(keys, rows(*keys))
    assert max(named.count(bucket) for bucket in range(3)) <= LANES
    assert (outcome.slots // LANES).tolist() == named


@pytest.mark.parametrize("policy", oracle.POLICIES)
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_entries_are_conserved_and_findable(policy, choices, buckets, rng):
    table = Oracle(buckets * LANES, 1, policy=policy, choices=choices)
    before = set()
    for _ in range(30):
        keys = rng.integers(0, 4 * table.capacity, 100).astype(np.uint64)
        scores = rng.integers(0, 50, 100).astype(np.uint64)
        offered = scores if policy == "CUSTOM" else None
        outcome = table.insert_and_evict(keys, keys[:, None].astype(np.float32), offered)
        evicted = outcome.evicted
        assert evicted is not None
        gone = evicted.keys[: evicted.count].tolist()
        added = keys[np.isin(outcome.status, (INSERTED, EVICTED))].tolist()
        after = set(table.key_words[table.occupied].tolist())
        assert after == (before | set(added)) - set(gone)
        assert len(after) + len(gone) == len(before) + outcome.counts.inserted
        assert set(gone) <= before
        found = table.find(words(*after))
        assert found.found.all()
        assert np.array_equal(found.values[:, 0], np.array(list(after), np.float32))
        assert np.array_equal(
            np.bincount(table.occupied // LANES, minlength=buckets), table.occupancy
        )
        before = after


def first_eviction(buckets, choices):
    """The load factor after the first batch of 0.2 % that evicts."""
    rng = np.random.default_rng(17)
    table = Oracle(buckets * LANES, 1, policy="LFU", choices=choices)
    while True:
        keys = rng.integers(0, U64_MAX, table.capacity // 500, np.uint64)
        if table.insert_or_assign(keys, np.zeros((len(keys), 1), np.float32)).counts.evicted:
            return table.size / table.capacity


def test_first_evictions_come_where_the_poisson_distribution_puts_them():
    """Where all of 1,024 Poisson buckets fit with a probability between 0.9995 and 0.0005."""
    load = np.linspace(0.5, 1, 501)
    none_full = (1 - stats.poisson.sf(LANES, LANES * load)) ** 1024
    low, high = (load[np.searchsorted(-none_full, -p)] for p in (0.9995, 0.0005))
    assert low - 0.01 <= first_eviction(1024, 1) <= high + 0.01
    assert first_eviction(1024, 2) >= 0.98


@pytest.mark.parametrize(("choices", "share"), [(1, 0.954), (2, 0.994)])
def test_oversubscription_keeps_the_share_of_the_best_that_was_simulated(choices, share):
    rng = np.random.default_rng(18)
    table = Oracle(256 * LANES, 1, policy="CUSTOM", choices=choices)
    keys = rng.permutation(5 * table.capacity).astype(np.uint64)
    scores = rng.integers(0, U64_MAX, len(keys), np.uint64)
    for part in np.array_split(np.arange(len(keys)), 500):
        table.insert_or_assign(keys[part], np.zeros((len(part), 1), np.float32), scores[part])
    threshold = np.sort(scores)[-table.capacity]
    assert np.mean(table.score_words >= threshold) >= share


@pytest.mark.parametrize(("choices", "share"), [(1, 0.96), (2, 0.99)])
def test_consecutive_keys_leave_the_latest_round(choices, share):
    table = Oracle(64 * LANES, 1, policy="CUSTOM", choices=choices)
    for start in range(0, 12 * table.capacity, 32):
        keys = np.arange(start, start + 32, dtype=np.uint64)
        table.insert_or_assign(keys, np.zeros((32, 1), np.float32), keys)
    assert table.size == table.capacity
    assert np.mean(table.key_words >= 11 * table.capacity) >= share
    assert table.key_words.max() == 12 * table.capacity - 1
