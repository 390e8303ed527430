"""Admission (docs/semantics.md, section 11) in NumPy: an oracle that turns keys away."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import NOT_ADMITTED, U32_MAX, Array, Oracle, Outcome, unique

DRAW = 2**32 - 1


def hash32(words: list[Any]) -> Array:
    """The hash of a list of 32-bit words, in 64-bit arithmetic cut to 32 bits after each step."""
    mask = np.uint64(U32_MAX)
    h = np.uint64(0)
    for word in words:
        h = ((h ^ np.asarray(word, np.uint64)) + np.uint64(0x9E3779B9)) & mask
        h = ((h ^ (h >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & mask
        h = ((h ^ (h >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & mask
        h = h ^ (h >> np.uint64(16))
    return h


def halves(word: Any) -> list[Any]:
    word = np.asarray(word, np.uint64)
    return [word & np.uint64(U32_MAX), word >> np.uint64(32)]


class AdmittingOracle(Oracle):
    """A table with `sightings`, `width`, `depth` (and `aging`), or `threshold`, or no rule."""

    rule: dict[str, int]
    counters: Array
    words: Array
    period: int
    counted: int

    @classmethod
    def of(cls, table: Any, **rule: int) -> AdmittingOracle:
        oracle = cls.from_table(table)
        oracle.rule = rule
        oracle.counters = np.zeros((rule.get("depth", 0), rule.get("width", 0)), np.uint32)
        oracle.words = oracle.counters.copy()
        oracle.period = oracle.counted = 0
        return oracle

    def assert_equal(self, table: Any) -> None:
        super().assert_equal(table)
        if self.counters.size:
            np.testing.assert_array_equal(table.admission.sightings(), self.counters, strict=True)
        if self.rule.get("aging"):
            np.testing.assert_array_equal(table.admission.counters, self.words, strict=True)
            assert np.asarray(table.admission.age).tolist() == [self.period, self.counted]

    def admitted(self, keys: Array, occurrences: Array) -> Array:
        """Which of some absent keys get a row in the call that comes next."""
        seed = halves(self.seed)
        if not self.rule:
            return np.ones(len(keys), bool)
        if "threshold" in self.rule:
            draws = hash32([DRAW, *seed, *halves(self.time + 1), *halves(keys)])
            return draws < self.rule["threshold"]
        depth, width, most = (self.rule[name] for name in ("depth", "width", "sightings"))
        hashes = [hash32([row, *seed, *halves(keys)]) for row in range(depth)]
        cells = [(own % np.uint64(width)).astype(np.int64) for own in hashes]
        counted = [own[cell] for own, cell in zip(self.counters, cells, strict=True)]
        seen = np.minimum(np.min(counted, axis=0).astype(np.int64) + occurrences, most)
        for own, cell in zip(self.counters, cells, strict=True):
            np.maximum.at(own, cell, seen.astype(np.uint32))
        if self.rule.get("aging"):
            for words, own, cell in zip(self.words, self.counters, cells, strict=True):
                words[cell] = self.period * 256 + own[cell]
            self.counted += int((occurrences > 0).sum())
            if self.counted >= width:
                self.counted %= width
                self.period += 1
                self.counters //= 2
        return seen >= most

    def find_or_insert(
        self,
        keys: Array,
        values: Array | None = None,
        scores: Array | None = None,
        valid: Array | None = None,
        return_evicted: bool = False,
        admit: Array | None = None,
        pinned: Array | None = None,
    ) -> Outcome:
        seen = unique(keys, valid)
        enters = self.lookup(seen.keys) >= 0
        lets_in = (seen.inverse >= 0) & (True if admit is None else admit)
        sightings = np.bincount(seen.inverse[lets_in], minlength=len(seen.keys))
        admitted = self.admitted(seen.keys[~enters], sightings[~enters])
        enters[~enters] = admitted & (sightings[~enters] > 0)
        is_valid = seen.inverse >= 0
        mask = is_valid.copy()
        mask[is_valid] = enters[seen.inverse[is_valid]]
        outcome = super().find_or_insert(keys, values, scores, mask, return_evicted, pinned)
        away = is_valid & ~mask
        outcome.status[away] = NOT_ADMITTED
        assert outcome.values is not None
        outcome.values[away] = self.initial_rows(keys[away])
        away_keys = int((~enters).sum())
        counts = outcome.counts
        return outcome._replace(
            counts=counts._replace(unique=counts.unique + away_keys, not_admitted=away_keys)
        )
