"""Behaviours 19 to 25 of the conformance list: policies, assignment and accumulation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import EVICTED, FOUND, INSERTED, LANES, MISSING, POLICIES, REFUSED, U32_MAX, U64_MAX

import jax_hkv as hkv

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
CHOICES_OF_POLICIES = [*zip(POLICIES, [1, 2, 2, 1, 2], strict=True)]
LANE_NUMBERS = np.arange(LANES, dtype=np.uint64)
WRITES = ["find_or_insert", "insert_or_assign", "insert_and_evict", "accum_or_assign"]


def words(*values):
    return np.array(values, np.uint64)


def rows_of(keys, dtype=np.float32):
    return (keys % np.uint64(2**20)).astype(np.float32).astype(dtype)[:, None]


def scores_of(both, keys):
    """The scores of present keys as words."""
    return both.oracle.score_words[both.oracle.lookup(keys)]


def write(both, name, keys, scores=None):
    """Insert or touch keys with an operation, whether they are present or not."""
    if name == "find_or_insert":
        return both.find_or_insert(keys, scores=scores)
    if name == "accum_or_assign":
        exists = both.oracle.lookup(keys) >= 0
        return both.accum_or_assign(keys, rows_of(keys), exists, scores=scores)
    return both.call(name, keys, rows_of(keys), scores=scores)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("policy", ["LRU", "EPOCH_LRU"])
def test_lru_scores_are_the_time_of_the_last_batch(name, policy, twin, rng):
    """19: inserts and hits alike; everything untouched is older."""
    both = twin(LANES, 1, policy=policy)
    both.insert_or_assign(LANE_NUMBERS, rows_of(LANE_NUMBERS))
    keys = rng.permutation(np.concatenate([LANE_NUMBERS[:30], 1000 + LANE_NUMBERS[:30]]))
    outcome = write(both, name, keys)
    assert sorted(outcome.status.tolist()) == [FOUND] * 30 + [EVICTED] * 30
    assert (scores_of(both, keys) == 2).all()
    untouched = LANE_NUMBERS[60:]
    assert (scores_of(both, untouched) == 1).all()
    assert both.oracle.size == LANES


@pytest.mark.parametrize("policy", ["LRU", "EPOCH_LRU"])
def test_the_time_goes_on_behind_32_bits(policy, twin):
    """19, 21: a score of LRU has all of it, one of EPOCH_LRU the low word."""
    both = twin(LANES, 1, policy=policy)
    index = dataclasses.replace(both.table.index, clock=jnp.array([U32_MAX - 1, 4], jnp.uint32))
    both.table = dataclasses.replace(both.table, index=index)
    both.oracle = oracle.Oracle.from_table(both.table)
    both.advance_epoch(2)
    for key in range(3):
        both.insert_or_assign(words(key), rows_of(words(key)))
    high = (4, 5, 5) if policy == "LRU" else (2, 2, 2)
    low = (U32_MAX, 0, 1)
    expected = [(upper << 32) + lower for upper, lower in zip(high, low, strict=True)]
    assert scores_of(both, words(0, 1, 2)).tolist() == expected


@pytest.mark.parametrize("policy", ["LRU", "LFU", "EPOCH_LRU", "EPOCH_LFU"])
def test_a_touching_read_refreshes_and_a_plain_one_does_not(policy, twin):
    """19: masked positions and absent keys touch nothing."""
    both = twin(2 * LANES, 1, policy=policy)
    both.insert_or_assign(LANE_NUMBERS, rows_of(LANE_NUMBERS))
    before = scores_of(both, LANE_NUMBERS)
    asked = np.concatenate([LANE_NUMBERS[:20], LANE_NUMBERS[:10], 1000 + LANE_NUMBERS[:10]])
    valid = np.arange(40) != 15
    both.find(asked, valid=valid)
    both.contains(asked, valid=valid)
    assert np.array_equal(scores_of(both, LANE_NUMBERS), before)
    assert both.oracle.time == 1
    both.find(asked, valid=valid, touch=True)
    touched = np.isin(LANE_NUMBERS, asked[valid])
    assert np.array_equal(scores_of(both, LANE_NUMBERS) > before, touched)
    assert both.oracle.time == 2


def test_an_untouched_entry_leaves_an_lru_table_first(twin, rng):
    """19: among the entries of one bucket, the order of leaving is that of last use."""
    both = twin(LANES, 1)
    both.insert_or_assign(LANE_NUMBERS, rows_of(LANE_NUMBERS))
    last_use = rng.permutation(LANE_NUMBERS)
    for part in np.split(last_use, 16):
        both.find(part, touch=True)
    for i, part in enumerate(np.split(last_use, 16)):
        newcomers = 1000 + 8 * np.uint64(i) + LANE_NUMBERS[:8]
        evicted = both.insert_and_evict(newcomers, rows_of(newcomers)).evicted
        assert sorted(evicted.keys.tolist()) == sorted(part.tolist())


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("choices", [1, 2])
def test_lfu_scores_add_up_and_saturate(name, choices, twin):
    """20: occurrences without scores, their sum with scores, at most 2^64 - 1."""
    both = twin(300, 1, policy="LFU", choices=choices)
    keys = words(5, 6, 5, 7, 5)
    write(both, name, keys)
    assert scores_of(both, words(5, 6, 7)).tolist() == [3, 1, 1]
    write(both, name, keys, words(10, 0, 20, U64_MAX, 30))
    assert scores_of(both, words(5, 6, 7)).tolist() == [63, 1, U64_MAX]
    write(both, name, keys)
    assert scores_of(both, words(5, 6, 7)).tolist() == [66, 2, U64_MAX]
    write(both, name, words(8, 8), words(U64_MAX, 2))
    assert scores_of(both, words(8)).tolist() == [U64_MAX]
    both.find(words(5, 5, 6), touch=True)
    assert scores_of(both, words(5, 6, 7)).tolist() == [68, 3, U64_MAX]
    both.assign(words(5, 5, 6), scores=words(2**32, 2**33, 0))
    assert scores_of(both, words(5, 6, 7)).tolist() == [68 + 3 * 2**32, 3, U64_MAX]


def test_lfu_always_admits_a_new_key(twin):
    """20: with its own count, over the least frequent of the bucket."""
    both = twin(LANES, 1, policy="LFU")
    both.insert_or_assign(LANE_NUMBERS, rows_of(LANE_NUMBERS), 1000 + LANE_NUMBERS)
    outcome = both.insert_and_evict(words(500, 501, 500), rows_of(words(1, 2, 3)))
    assert outcome.status.tolist() == [EVICTED, EVICTED, FOUND]
    assert outcome.evicted.keys.tolist() == [0, 1, 0]
    assert scores_of(both, words(500, 501)).tolist() == [2, 1]


@pytest.mark.parametrize("scores", [np.uint32, np.uint64])
@pytest.mark.parametrize("policy", ["LFU", "EPOCH_LFU", "CUSTOM"])
def test_scores_come_in_32_or_64_bits(scores, policy, twin):
    """20, 22: unsigned, so the highest bit is no sign."""
    both = twin(LANES, 1, policy=policy)
    given = np.array([0, 1, 2**31, U32_MAX], scores)
    both.insert_or_assign(LANE_NUMBERS[:4], rows_of(LANE_NUMBERS[:4]), given)
    assert scores_of(both, LANE_NUMBERS[:4]).tolist() == [0, 1, 2**31, U32_MAX]


@pytest.mark.parametrize("name", WRITES)
def test_epoch_lru_scores_are_epoch_and_time(name, twin):
    """21: untouched entries keep their epoch, and go first."""
    both = twin(LANES, 1, policy="EPOCH_LRU")
    both.advance_epoch(3)
    write(both, name, LANE_NUMBERS)
    both.advance_epoch()
    write(both, name, LANE_NUMBERS[:100])
    assert scores_of(both, LANE_NUMBERS).tolist() == [(4 << 32) + 2] * 100 + [(3 << 32) + 1] * 28
    both.advance_epoch(0)
    newcomers = 1000 + LANE_NUMBERS[:30]
    outcome = both.insert_and_evict(newcomers, rows_of(newcomers))
    assert outcome.evicted.keys[:30].tolist() == [*range(100, 128), 0, 1]
    assert (scores_of(both, newcomers) == 3).all()


@pytest.mark.parametrize("name", WRITES)
def test_epoch_lfu_counts_within_the_epoch_and_saturates(name, twin):
    """21: the low word goes on from the old low word, whatever its epoch."""
    both = twin(LANES, 1, policy="EPOCH_LFU")
    both.advance_epoch(3)
    write(both, name, words(1, 2, 3, 1), words(5, U32_MAX - 1, U64_MAX, 6))
    low = [11, U32_MAX - 1, U32_MAX]
    assert scores_of(both, words(1, 2, 3)).tolist() == [(3 << 32) + count for count in low]
    both.advance_epoch()
    write(both, name, words(1, 2, 2, 2))
    expected = [(4 << 32) + 12, (4 << 32) + U32_MAX, (3 << 32) + U32_MAX]
    assert scores_of(both, words(1, 2, 3)).tolist() == expected
    write(both, name, words(1), words(U64_MAX - 3))  # more than 64 bits with what it has
    assert scores_of(both, words(1)).tolist() == [(4 << 32) + U32_MAX]


def test_an_older_epoch_goes_before_a_lower_count(twin):
    """21: within one epoch the lower count goes first, and a lower newcomer is refused."""
    both = twin(LANES, 1, policy="EPOCH_LFU")
    both.advance_epoch(1)
    both.insert_or_assign(LANE_NUMBERS[:3], rows_of(LANE_NUMBERS[:3]), words(900, 800, 700))
    both.advance_epoch()
    current = LANE_NUMBERS[3:]
    both.insert_or_assign(current, rows_of(current), 10 + current)
    newcomers = 1000 + LANE_NUMBERS[:6]
    counts = words(1, 1, 1, 14, 13, 13)
    outcome = both.insert_and_evict(newcomers, rows_of(newcomers), counts)
    assert outcome.evicted.keys.tolist() == [2, 1, 0, 3, 0, 0]
    assert outcome.status.tolist() == [EVICTED] * 4 + [REFUSED] * 2


def test_the_epoch_stops_at_its_greatest_value(twin):
    """21: and advancing it is not a tick of the clock."""
    both = twin(LANES, 1, policy="EPOCH_LRU")
    both.advance_epoch(U32_MAX - 1)
    both.advance_epoch()
    both.advance_epoch()
    assert np.asarray(both.table.epoch).tolist() == [U32_MAX]
    both.insert_or_assign(LANE_NUMBERS[:1], rows_of(LANE_NUMBERS[:1]))
    assert scores_of(both, LANE_NUMBERS[:1]).tolist() == [(U32_MAX << 32) + 1]
    both.erase(LANE_NUMBERS[:1])
    both.clear()
    assert np.asarray(both.table.epoch).tolist() == [U32_MAX]


@pytest.mark.parametrize("name", WRITES)
def test_custom_scores_are_the_last_that_were_given(name, twin):
    """22: of a key's valid occurrences."""
    both = twin(300, 1, policy="CUSTOM", choices=2)
    write(both, name, words(1, 2, 1, 2), words(9, 2**63, 7, U64_MAX))
    assert scores_of(both, words(1, 2)).tolist() == [7, U64_MAX]
    write(both, name, words(2, 1, 1), words(0, 3, 2**40))
    assert scores_of(both, words(1, 2)).tolist() == [2**40, 0]


@pytest.mark.parametrize("name", [*WRITES, "find_or_insert_pooled", "assign", "find"])
def test_scores_that_the_policy_refuses_or_lacks_are_an_error(name, platform):
    """22: before anything runs; of bags, too."""
    keys, rows = hkv.Keys.from_numpy(LANE_NUMBERS), rows_of(LANE_NUMBERS)
    arguments = {
        "find": (),
        "find_or_insert": (),
        "find_or_insert_pooled": (),
        "assign": (),
        "accum_or_assign": (rows, np.zeros(LANES, bool)),
    }.get(name, (rows,))
    operation = getattr(hkv, name)
    custom = hkv.create(LANES, 1, policy=hkv.Policy.CUSTOM)
    if name == "find":
        with pytest.raises(ValueError, match=r"(?i)custom"):
            hkv.find(custom, keys, touch=True)
        return
    if name == "assign":
        hkv.assign(custom, keys, rows)
    else:
        with pytest.raises(ValueError, match="scores"):
            operation(custom, keys, *arguments)
    for policy in (hkv.Policy.LRU, hkv.Policy.EPOCH_LRU):
        with pytest.raises(ValueError, match="scores"):
            table = hkv.create(LANES, 1, policy=policy)
            operation(table, keys, *arguments, scores=np.ones(LANES, np.uint32))


@pytest.mark.parametrize(("policy", "choices"), CHOICES_OF_POLICIES)
@pytest.mark.parametrize("what", ["rows", "scores", "both"])
def test_assign_touches_present_keys_only(policy, choices, what, twin, rng):
    """23: rows, scores or both; absent keys stay absent, and the last occurrence counts."""
    if what != "rows" and policy in ("LRU", "EPOCH_LRU"):
        pytest.skip("the policy takes no scores")
    both = twin(400, 3, policy=policy, choices=choices)
    rows = rng.standard_normal((300, 3)).astype(np.float32)
    keys, scores = rng.permutation(300).astype(np.uint64), rng.integers(0, 99, 300, np.uint64)
    offered = scores if policy == "CUSTOM" else None
    both.insert_or_assign(keys[:150], rows[:150], offered if offered is None else offered[:150])
    before, exported = both.oracle.size, both.export_batch(0, 512).by_key()

    asked, other = rng.choice(keys, 300), rng.standard_normal((300, 3)).astype(np.float32)
    given = {"values": other} if what != "scores" else {}
    given |= {"scores": scores + np.uint64(1)} if what != "rows" else {}
    outcome = both.assign(asked, valid=rng.random(300) < 0.9, **given)
    assert both.oracle.size == before
    assert outcome.counts.inserted == outcome.counts.evicted == 0
    assert set(np.unique(outcome.status)) == {MISSING, FOUND}
    for key, (score, row) in both.export_batch(0, 512).by_key().items():
        touched = key in asked[outcome.status == FOUND]
        assert (row != exported[key][1]) == (touched and what != "scores")
        assert (score == exported[key][0]) or (touched and what != "rows")


@pytest.mark.parametrize(("policy", "dtype"), [*zip(POLICIES, DTYPES + DTYPES[:2], strict=True)])
@pytest.mark.parametrize("choices", [1, 2])
def test_accumulation_adds_where_present_and_inserts_where_absent(
    policy, choices, dtype, twin, rng
):
    """24: the two other cases change nothing, not even the score."""
    both = twin(600, 5, dtype=dtype, policy=policy, choices=choices)
    keys = rng.permutation(400).astype(np.uint64)
    rows = rng.standard_normal((400, 5)).astype(dtype)
    scores = keys + np.uint64(1) if policy == "CUSTOM" else None
    both.insert_or_assign(keys[:200], rows[:200], None if scores is None else scores[:200])
    before = both.export_batch(0, 640).by_key()

    exists = rng.random(400) < 0.5
    order = rng.permutation(400)
    outcome = both.accum_or_assign(
        keys[order], rows[order], exists[order], None if scores is None else 2 * scores[order]
    )
    present = np.arange(400) < 200
    sums = (rows.astype(np.float32) + rows.astype(np.float32)).astype(dtype)
    after = both.export_batch(0, 640).by_key()
    for i, key in enumerate(keys.tolist()):
        if present[i] and exists[i]:
            assert after[key][1] == sums[i].tobytes()
            assert after[key][0] > before[key][0]
        elif present[i]:
            assert after[key] == before[key]
        elif exists[i]:
            assert key not in after
        else:
            assert after[key][1] == rows[i].tobytes()
    flags = np.stack([present, exists])[:, order]
    status = np.array([[INSERTED, MISSING], [FOUND, FOUND]])[*flags.astype(int)]
    assert np.array_equal(outcome.status, status)
    assert outcome.counts.unique == int((present == exists).sum())


@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, np.float32), (64, np.float32), (7, DTYPES[1]), (33, DTYPES[2])]
)
def test_deltas_of_equal_keys_are_summed_by_the_tree(dim, dtype, twin, rng):
    """24: with mixed flags, from one occurrence to more than 1,024."""
    both = twin(LANES, dim, dtype=dtype)
    keys = np.repeat(np.arange(6, dtype=np.uint64), [1, 2, 33, 64, 400, 1500])
    keys = rng.permutation(keys)
    first = rng.standard_normal((6, dim)).astype(dtype)
    both.insert_or_assign(np.arange(6, dtype=np.uint64), first)
    magnitude = np.exp(rng.uniform(-5, 5, (len(keys), 1)))
    deltas = (rng.standard_normal((len(keys), dim)) * magnitude).astype(dtype)
    exists, valid = rng.random(len(keys)) < 0.8, rng.random(len(keys)) < 0.9
    both.accum_or_assign(keys, deltas, exists, valid=valid)
    exact = first.astype(np.float64)
    np.add.at(exact, keys[exists & valid].astype(int), deltas[exists & valid].astype(np.float64))
    stored = both.find(np.arange(6, dtype=np.uint64)).values.astype(np.float64)
    tolerance = {2: 0.01, 4: 1e-5}[np.dtype(dtype).itemsize]
    assert np.allclose(stored, exact, rtol=tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_are_no_number_have_one_nan(dtype, twin, rng):
    """24: whatever NaNs and infinities went in; copied rows keep theirs."""
    both = twin(LANES, 8, dtype=dtype)
    keys = np.repeat(LANE_NUMBERS[:60], np.tile([1, 2, 3], 20))
    terms = np.array([np.nan, -np.nan, np.inf, -np.inf, 1.0, -0.0]).astype(dtype)
    for _ in range(2):
        rows = rng.choice(terms, (len(keys), 8))
        payload = rng.integers(0, 2, rows.shape).astype(f"u{rows.itemsize}")
        rows = (oracle.as_bits(rows) | np.where(np.isnan(rows), payload, 0)).view(dtype)
        both.insert_or_assign(keys, rows)
        with np.errstate(invalid="ignore"):
            both.accum_or_assign(keys, rng.permutation(rows), np.ones(len(keys), bool))
    assert np.isnan(both.find(keys).values).mean() > 0.3


@pytest.mark.parametrize(("policy", "choices"), CHOICES_OF_POLICIES)
@pytest.mark.parametrize("is_given", [False, True])
def test_find_or_insert_returns_what_is_stored(policy, choices, is_given, twin, rng):
    """25: the first or the given row of new keys; a second call inserts nothing."""
    init = hkv.initializers.normal(2.0, mean=0.5)
    both = twin(1000, 6, policy=policy, choices=choices, init=init, seed=3)
    keys = oracle.mix(np.arange(200, dtype=np.uint64))
    scores = keys if policy == "CUSTOM" else None
    given = rng.standard_normal((200, 6)).astype(np.float32) if is_given else None
    outcome = both.find_or_insert(keys, given, scores)
    assert (outcome.status == INSERTED).all()
    expected = both.oracle.initial_rows(keys) if given is None else given
    assert np.array_equal(outcome.values, expected)

    other = rng.standard_normal((200, 6)).astype(np.float32)
    again = both.find_or_insert(keys, other, scores)
    assert again.counts == (200, 200, 0, 0, 0, 0)
    assert np.array_equal(again.values, expected)
    found = both.find(np.concatenate([keys, keys + np.uint64(1)]), fill="initial")
    assert np.array_equal(found.values[:200], expected)
    assert np.array_equal(found.values[200:], both.oracle.initial_rows(keys + np.uint64(1)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_given", [False, True])
def test_refused_keys_get_their_initial_row(policy, is_given, twin, rng):
    """25: and the status refused, while masked positions get zeros."""
    init = hkv.initializers.uniform(1.0, 2.0)
    both = twin(LANES, 4, policy=policy, init=init)
    keys = np.arange(300, dtype=np.uint64)
    scores = keys if policy == "CUSTOM" else None
    given = np.full((300, 4), 7, np.float32) if is_given else None
    valid = np.arange(300) % 3 != 0
    outcome = both.find_or_insert(keys, given, scores, valid, return_evicted=True)
    refused = outcome.status == REFUSED
    assert refused.sum() == 200 - LANES
    assert np.array_equal(outcome.values[refused], both.oracle.initial_rows(keys[refused]))
    assert not outcome.values[~valid].any()


def initialisers():
    return {
        "zeros": hkv.initializers.zeros(),
        "constant": hkv.initializers.constant(0.1),
        "uniform": hkv.initializers.uniform(-0.3, 0.7),
        "normal": hkv.initializers.normal(0.05, mean=0.1),
        "truncated_normal": hkv.initializers.truncated_normal(3.0, mean=-1.0),
        "scaled_normal": hkv.initializers.variance_scaling(1.0, "normal"),
        "scaled_truncated_normal": hkv.initializers.variance_scaling(0.5, "truncated_normal"),
        "scaled_uniform": hkv.initializers.variance_scaling(2.0, "uniform"),
    }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, np.float32) for kind in initialisers()]
    + [(kind, half) for kind in ("constant", "uniform", "normal") for half in DTYPES[1:]],
)
def test_initial_rows_have_the_bits_of_the_oracle(kind, dtype, twin, rng):
    """25: for every initialiser, dtype and platform, whichever call asks."""
    both = twin(2000, 9, dtype=dtype, init=initialisers()[kind], seed=2**32 - 5)
    keys = rng.integers(0, U64_MAX, 1500, np.uint64)
    stored = both.find_or_insert(keys[:700]).values
    found = both.find(keys, fill="initial").values
    assert np.array_equal(oracle.as_bits(found[:700]), oracle.as_bits(stored))


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
def test_variance_scaling_has_the_variance_that_it_names(scale, distribution, twin):
    """25: scale / dim."""
    init = hkv.initializers.variance_scaling(scale, distribution)
    both = twin(LANES, 16, init=init)
    rows = both.find(np.arange(8192, dtype=np.uint64), fill="initial").values
    assert abs(rows.mean()) < 5 * (scale / 16 / rows.size) ** 0.5
    assert rows.var() == pytest.approx(scale / 16, rel=0.02)


@pytest.mark.parametrize("distribution", ["cauchy", ["normal"], None])
def test_a_distribution_that_is_none_is_named(distribution):
    with pytest.raises(ValueError, match="variance_scaling: distribution must be one of .* got"):
        hkv.initializers.variance_scaling(1.0, distribution)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "policy", [True, 1.0, hkv.Status.FOUND, np.array([1]), np.ones(2), "LFU", 9]
)
def test_what_is_no_policy_is_named(policy):
    """Members of other enumerations, and flags, are equal to some integer too."""
    with pytest.raises(ValueError, match="create: policy must be one of LRU, LFU.* got"):
        hkv.create(128, 2, policy=policy)


@pytest.mark.parametrize("policy", hkv.Policy)
def test_a_policy_may_be_its_integer(policy):
    for number in (policy, int(policy), np.uint8(policy)):
        assert hkv.create(128, 2, policy=number).policy is policy  # pyright: ignore
