"""Behaviour 29 of the conformance list: random operations against the oracle."""

from __future__ import annotations

from collections import Counter

import numpy as np
import oracle
import pytest
from oracle import POLICIES, U32_MAX, U64_MAX

import jax_hkv as hkv

TABLES = [(1, 1), (2, 2)]  # choices and buckets
WEIGHTS = {
    "find": 2,
    "touch": 1,
    "contains": 1,
    "find_or_insert": 4,
    "insert_or_assign": 3,
    "insert_and_evict": 3,
    "accum_or_assign": 3,
    "assign": 1,
    "assign_scores": 1,
    "erase": 6,
    "erase_if": 0.3,
    "export_batch": 0.3,
    "export_keys": 0.5,
    "import_batch": 1,
    "advance_epoch": 0.5,
    "clear": 0.05,
}
HAPPENINGS = ("evicted", "refused", "duplicate", "masked", "erased")


class RandomOperations:
    """Random calls of a twin, and a tally of what happened to their keys."""

    def __init__(self, both, rng):
        self.both, self.rng, self.tally = both, rng, Counter()
        self.policy = both.oracle.policy
        self.length = 2 * both.table.capacity  # so that a batch can pin whole buckets
        self.universe = rng.integers(0, U64_MAX, 2 * self.length, np.uint64)
        self.universe[:6] = [0, 1, 2**32, 2**63, U64_MAX, U64_MAX - 1]
        weights = np.array(list(WEIGHTS.values()))
        self.chances = weights / weights.sum()

    def is_rare(self, happening):
        return self.tally[happening] < 0.01 * self.tally["keys"]

    def run(self, keys_wanted):
        """A few batches more, where chance has left out what is to happen."""
        while self.tally["keys"] < keys_wanted or (
            self.tally["keys"] < 4 * keys_wanted and any(map(self.is_rare, HAPPENINGS))
        ):
            name = self.rng.choice(list(WEIGHTS), p=self.chances)
            getattr(self, name)()

    def batch(self):
        """Keys, of which a few are frequent, and their mask."""
        rng = self.rng
        keys = rng.choice(self.universe, self.length)
        frequent = rng.random(self.length) < rng.choice([0, 0.1, 0.6])
        keys[frequent] = rng.choice(self.universe[:12], int(frequent.sum()))
        valid = rng.random(self.length) < rng.choice([0.05, 0.8, 1.0], p=[0.05, 0.35, 0.6])
        self.tally["keys"] += self.length
        self.tally["masked"] += self.length - int(valid.sum())
        self.tally["duplicate"] += int(valid.sum()) - oracle.unique(keys, valid).count
        return keys, valid

    def rows(self):
        shape = (self.length, self.both.table.dim)
        return self.rng.standard_normal(shape).astype(self.both.oracle.dtype)

    def scores(self):
        """Scores of all magnitudes, the extreme ones included, or none where that is allowed."""
        if self.policy in oracle.COUNTING_POLICIES and self.rng.random() < 0.5:
            return np.ones(self.length, np.uint64)
        if self.policy not in oracle.SCORED_POLICIES:
            return None
        width = int(self.rng.choice([4, 40, 63]))
        scores = self.rng.integers(0, 2**width, self.length).astype(np.uint64)
        extreme = self.rng.random(self.length) < 0.05
        extremes = np.array([0, 1, U32_MAX, U64_MAX - 1, U64_MAX], np.uint64)
        scores[extreme] = self.rng.choice(extremes, int(extreme.sum()))
        return scores

    def count(self, outcome):
        self.tally["evicted"] += outcome.counts.evicted
        self.tally["refused"] += outcome.counts.refused

    def find(self):
        keys, valid = self.batch()
        self.both.find(keys, valid=valid, fill="initial")

    def touch(self):
        keys, valid = self.batch()
        self.both.find(keys, valid=valid, touch=self.policy != "CUSTOM", fill=-1.5)

    def contains(self):
        keys, valid = self.batch()
        self.both.contains(keys, valid=valid)

    def find_or_insert(self):
        keys, valid = self.batch()
        is_given = self.rng.random() < 0.5
        values, scores = self.rows() if is_given else None, self.scores()
        pinned = None if self.rng.random() < 0.5 else self.slots()
        batch = keys, values, scores, valid
        self.count(self.both.find_or_insert(*batch, return_evicted=is_given, pinned=pinned))

    def slots(self):
        """Few or many of a table's, empty ones too, some twice; and -1, where lookups have none."""
        capacity = self.both.table.capacity
        slots = self.rng.integers(0, capacity, capacity, np.int32)
        slots[self.rng.random(capacity) < self.rng.choice([0.1, 0.9])] = -1
        return slots

    def insert_or_assign(self):
        keys, valid = self.batch()
        self.count(self.both.insert_or_assign(keys, self.rows(), self.scores(), valid))

    def insert_and_evict(self):
        keys, valid = self.batch()
        self.count(self.both.insert_and_evict(keys, self.rows(), self.scores(), valid))

    def accum_or_assign(self):
        keys, valid = self.batch()
        exists = self.both.oracle.lookup(keys) >= 0
        exists ^= self.rng.random(self.length) < 0.2
        rows, scores = self.rows(), self.scores()
        self.count(self.both.accum_or_assign(keys, rows, exists, scores, valid))

    def assign(self):
        keys, valid = self.batch()
        self.both.assign(keys, self.rows(), valid=valid)

    def assign_scores(self):
        keys, valid = self.batch()
        rows = self.rows() if self.rng.random() < 0.5 else None
        scores = self.scores()
        if rows is not None or scores is not None:
            self.both.assign(keys, rows, scores=scores, valid=valid)

    def erase(self):
        keys, valid = self.batch()
        self.tally["erased"] += self.both.erase(keys, valid=valid).counts.hits

    def erase_if(self):
        self.tally["erased"] += self.both.erase_if(is_low_and_positive, is_low_and_positive_word)

    def export_batch(self):
        offset = int(self.rng.integers(0, self.both.table.capacity))
        self.both.export_batch(offset, 100)

    def export_keys(self):
        keys, valid = self.batch()
        self.both.export_keys(keys, valid=valid)

    def import_batch(self):
        """Scores from before, or any: of a table whose scores are times, of a later time too."""
        keys, valid = self.batch()
        scores = self.rng.choice(self.both.oracle.score_words, self.length)
        strange = self.rng.random(self.length) < 0.1
        bits = int(self.rng.choice([4, 40, 63]))
        scores[strange] = self.rng.integers(0, 2**bits, int(strange.sum()))
        count = int(self.rng.integers(0, self.length + 1))
        evicted = self.rng.random() < 0.5
        self.count(self.both.import_batch(keys, scores, self.rows(), count, valid, evicted))

    def advance_epoch(self):
        self.both.advance_epoch()

    def clear(self):
        self.tally["erased"] += self.both.oracle.size
        self.both.clear()


def is_low_and_positive(keys, scores, values):
    return hkv.less(keys, 2**62) & (values[:, 0] > 0)


def is_low_and_positive_word(keys, scores, values):
    return (keys < 2**62) & (values[:, 0] > 0)


@pytest.mark.parametrize(("choices", "buckets"), TABLES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "keys", [30_000, pytest.param(10**6, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_random_operations_do_what_the_oracle_does(keys, policy, choices, buckets, twin, rng):
    """29: results and states after every call; in all, ten times as many keys."""
    init = hkv.initializers.normal(1.0)
    both = twin(buckets * oracle.LANES, 3, policy=policy, choices=choices, init=init)
    operations = RandomOperations(both, rng)
    operations.run(keys)
    print(dict(operations.tally))
    for happening in HAPPENINGS:
        assert not operations.is_rare(happening), happening
