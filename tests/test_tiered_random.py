"""Tiers and one table that the same operations go through, in random order."""

from __future__ import annotations

import numpy as np
import pytest
from combinations import each
from many_devices import assert_same_bits
from test_tiered import DIM, POLICIES, assert_same_table, made, tiers_of, touched, trainer

import jax_hkv as hkv
from jax_hkv import sharding, tiered


class Model:
    """Tiers and one table that the same operations go through."""

    def __init__(self, rng, policy, choices):
        self.rng, self.policy, self.choices = rng, policy, choices
        self.tiers = tiers_of(384, 4096, policy=policy, choices=choices)
        self.one = made(4096, policy=policy, choices=choices)
        self.train = trainer("adam")

    def ids(self, most=1500):
        return self.rng.integers(0, most, 96).astype(np.int32)

    def both(self, fn):
        self.tiers, self.one = tiered.map_tables(self.tiers, fn), fn(self.one)

    def learns(self):
        ids = self.ids()
        valid = self.rng.random(ids.shape) < 0.9
        self.tiers, counts = tiered.prefetch(self.tiers, ids, valid=valid)
        assert not int(counts.refused) + int(counts.dropped)
        self.tiers = self.tiers._replace(cache=self.train(self.tiers.cache, ids, valid)[0])
        self.one = self.train(touched(self.one, ids, valid), ids, valid)[0]

    def writes(self):
        ids = self.ids()
        rows = self.rng.random((*ids.shape, DIM), np.float32)
        self.tiers, _ = tiered.prefetch(self.tiers, ids)
        cache, _ = hkv.insert_or_assign(self.tiers.cache, ids, rows)
        self.tiers = self.tiers._replace(cache=cache)
        self.one, _ = hkv.insert_or_assign(touched(self.one, ids), ids, rows)

    def forgets(self):
        ids = self.ids()
        self.tiers, erased = tiered.erase(self.tiers, ids)
        self.one, wanted = hkv.erase(self.one, ids)
        assert_same_bits(erased.status, wanted.status)
        assert [int(count) for count in erased.counts] == [int(count) for count in wanted.counts]

    def evaluates(self):
        ids = self.ids(2000)
        self.tiers, counts = tiered.prefetch(self.tiers, ids, insert=False)
        assert not int(counts.inserted)

    def reads(self):
        ids = self.ids(2000)
        _, found = tiered.find(self.tiers, ids, fill="initial")
        assert_same_bits(found[:2], hkv.find(self.one, ids, fill="initial")[1][:2])

    def ages(self):
        self.both(hkv.advance_epoch)

    def expires(self):
        if self.policy is hkv.Policy.EPOCH_LRU:
            self.both(lambda table: hkv.expire(table, 2)[0])

    def grows(self):
        if self.tiers.store.capacity < 8192:
            store, counts = hkv.resize(self.tiers.store, 2 * self.tiers.store.capacity)
            assert not int(counts.refused) + int(counts.evicted)
            self.tiers = self.tiers._replace(store=store)

    def moves(self):
        exported = tiered.export_entries(self.tiers)
        fresh = tiers_of(512, 4096, policy=self.policy, choices=self.choices)
        self.tiers, counts = tiered.import_entries(fresh, exported)
        assert int(counts.inserted) == len(exported.keys)

    def takes(self):
        exported = sharding.export_entries(self.one)
        rows = self.rng.random(len(exported.keys)) < 0.3
        part = exported.select(rows)._replace(
            shared={"count": exported.shared["count"] + np.uint32(3)}
        )
        part.values[:] += 1
        part.scores[::2] //= 2  # older ones than what the tables have
        self.tiers, counts = tiered.import_entries(self.tiers, part)
        self.one, wanted = sharding.import_entries(None, self.one, part)
        assert [int(count) for count in counts] == [int(count) for count in wanted]


DEEDS = ["learns"] * 6 + [
    *("writes", "forgets", "evaluates", "reads", "ages", "expires", "grows", "moves", "takes")
]


@pytest.mark.parametrize("choices, policy", each([2, 1], POLICIES))
def test_whatever_is_done_with_tiers_one_table_has_the_same_bits(policy, choices, rng):
    model = Model(rng, policy, choices)
    for _ in range(40):
        name = str(rng.choice(DEEDS))
        getattr(model, name)()
        assert tiered.size(model.tiers) == int(hkv.size(model.one)), name
    assert_same_table(model.tiers, model.one)
