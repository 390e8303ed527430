"""Fused optimizers as docs/semantics.md, section 10, says: the oracle of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from oracle import (
    CHUNK,
    EVICTED,
    INSERTED,
    Distinct,
    Oracle,
    combine,
    same_nan,
    tree_sum,
    unique,
)
from oracle_rows import GOLDEN, f32, mix, round_to

Array = np.ndarray


def power(decay: float, step: int) -> np.float64:
    result, square = np.float64(1.0), np.float64(decay)
    for bit in range(step.bit_length()):
        if step >> bit & 1:
            result = result * square
        square = square * square
    return result


def correction(decay: float, steps: Array) -> Array:
    """1 / (1 - decay^t) for each row, rounded once."""
    with np.errstate(divide="ignore"):
        each = [np.float64(1.0) / (np.float64(1.0) - power(decay, int(step))) for step in steps]
    return np.array(each, np.float64).astype(f32)[:, None]


def adam(c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array) -> Array:
    s[1] = f32(c["b2"]) * s[1] + f32(1.0 - c["b2"]) * (g * g)
    return adam_step(c, w, s, g, rate, t, s[1])


def adam_step(
    c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array, v: Array
) -> Array:
    s[0] = f32(c["b1"]) * s[0] + f32(1.0 - c["b1"]) * g
    root = np.sqrt(v * correction(c["b2"], t) + f32(c["eps_root"]))
    direction = (s[0] * correction(c["b1"], t)) / (root + f32(c["eps"]))
    return w - rate * (direction + f32(c["weight_decay"]) * w)


def rowwise_adam(
    c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array
) -> Array:
    s[1] = f32(c["b2"]) * s[1] + f32(1.0 - c["b2"]) * mean_squares(g)
    return adam_step(c, w, s, g, rate, t, s[1][:, None])


def momentum(c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array) -> Array:
    s[0] = g + f32(c["momentum"]) * s[0]
    return w - rate * (g + f32(c["momentum"]) * s[0] if c["nesterov"] else s[0])


def adagrad(c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array) -> Array:
    s[0] = s[0] + g * g
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(s[0] <= 0, w, w - rate * (g / np.sqrt(s[0] + f32(c["eps"]))))


def square_norm(rows: Array, distinct: Distinct, slots: Array) -> np.float32:
    """Of the sums of float32 rows, one a position, of keys that have a slot (section 8)."""
    sums = combine(rows, distinct)
    squares = np.where(slots[:, None] >= 0, sums * sums, f32(0))
    columns = -(-rows.shape[1] // 4) * 4
    parts = np.pad(squares, ((0, 0), (0, columns - rows.shape[1]))).reshape(
        len(sums), columns // 4, 4
    )
    own = reduce(np.add, np.moveaxis(reduce(np.add, np.moveaxis(parts, 2, 0)), 1, 0))
    return same_nan(tree_sum(np.append(own, f32(0))))


def mean_squares(g: Array) -> Array:
    """Of each row, summed from left to right."""
    return reduce(np.add, (g * g).T, np.zeros(len(g), f32)) / f32(g.shape[1])


def rowwise_adagrad(
    c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array
) -> Array:
    s[0] = s[0] + mean_squares(g)
    kept = (f32(1) - rate * f32(c["weight_decay"])) * w
    return kept - (rate / (np.sqrt(s[0]) + f32(c["eps"])))[:, None] * g


def ftrl(c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array) -> Array:
    old = np.sqrt(s[0])
    s[0] = s[0] + g * g
    root = np.sqrt(s[0])
    s[1] = s[1] + (g - ((root - old) / rate) * w)
    curvature = (f32(c["beta"]) + root) / rate + f32(c["l2"])
    bound = np.where(s[1] < 0, -f32(c["l1"]), f32(c["l1"]))
    with np.errstate(divide="ignore", invalid="ignore"):
        new = np.where(np.abs(s[1]) <= f32(c["l1"]), f32(0), (bound - s[1]) / curvature)
    return np.where(curvature <= 0, w, new)


def sgd(c: dict[str, float], w: Array, s: list[Array], g: Array, rate: Any, t: Array) -> Array:
    return w - rate * g


RULES = {
    rule.__name__: rule
    for rule in (sgd, momentum, adagrad, rowwise_adagrad, adam, rowwise_adam, ftrl)
}


def stochastic_bfloat16(rows: Array, keys: Array, steps: Array, seed: int, dtype: Any) -> Array:
    """float32 rows, rounded up with the probability of what is cut off."""
    seeded = mix(keys ^ mix(np.array([seed], np.uint64) + GOLDEN))
    base = mix(seeded ^ mix(steps.astype(np.uint64) + GOLDEN))
    element = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * GOLDEN
    random = mix(base[:, None] + element) >> np.uint64(48)
    return rounded_by(random, rows, dtype)


def rounded_by(random: Array, rows: Array, dtype: Any) -> Array:
    """float32 rows, rounded by 16 random bits for each element."""
    bits = (rows.view(np.uint32) + random.astype(np.uint32)) >> np.uint32(16)
    return np.where(np.isfinite(rows), bits.astype(np.uint16).view(dtype), round_to(rows, dtype))


def threefry(key: Any, counter: Any) -> Array:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011), cut to 32 bits after each step."""
    low = np.uint64(2**32 - 1)
    keys = [*key, key[0] ^ key[1] ^ np.uint64(0x1BD11BDA)]
    x, y = (counter[0] + keys[0]) & low, (counter[1] + keys[1]) & low
    turns = [13, 15, 26, 6, 17, 29, 16, 24] * 2 + [13, 15, 26, 6]
    for number, turn in enumerate(map(np.uint64, turns), 1):
        x = (x + y) & low
        y = (((y << turn) | (y >> (np.uint64(32) - turn))) & low) ^ x
        if number % 4 == 0:
            block = number // 4
            x = (x + keys[block % 3]) & low
            y = (y + keys[(block + 1) % 3] + np.uint64(block)) & low
    return np.stack([x, y])


def pooled_sums(rows: Array, distinct: Distinct, sources: Array, weights: Array | None) -> Array:
    """The sums of the terms weights[i] * rows[sources[i]] of each distinct key (8)."""
    sums = np.zeros((distinct.count, rows.shape[1]), f32)
    for key in range(distinct.count):
        positions = distinct.order[distinct.offsets[key] : distinct.offsets[key + 1]]
        terms = rows[sources[positions]].astype(f32)
        if weights is not None:
            terms = weights[positions, None] * terms
        many = len(terms) > 1 or weights is not None
        while len(terms) > 1:
            chunks = [terms[start : start + CHUNK] for start in range(0, len(terms), CHUNK)]
            terms = np.stack([reduce(np.add, chunk) for chunk in chunks])
        sums[key] = same_nan(terms[0]) if many else terms[0]
    return sums


# What the optimizer rows of each optimizer are called, in the order of `Trainer.states`.
STATES = {
    "sgd": [],
    "momentum": ["trace"],
    "adagrad": ["sum_of_squares"],
    "rowwise_adagrad": ["sum_of_mean_squares"],
    "adam": ["mu", "nu"],
    "rowwise_adam": ["mu", "row_nu"],
    "ftrl": ["sum_of_squares", "linear"],
}
OF_A_ROW = {"sum_of_mean_squares", "row_nu"}  # one number, not one an element


@dataclass
class Trainer:
    """Optimizer rows beside an oracle's table."""

    oracle: Oracle
    rule: str
    constants: dict[str, float]
    starts: tuple[float, ...]
    state_dtype: Any
    count_per_row: bool = False
    stochastic: bool = False
    seed: int = 0
    count: int = 0
    states: list[Array] = field(default_factory=list)
    steps: Array = field(default_factory=lambda: np.zeros(0, np.uint32))

    def __post_init__(self) -> None:
        slots, dim = self.oracle.values.shape
        self.states = [
            np.full((slots,) if name in OF_A_ROW else (slots, dim), start, self.state_dtype)
            for name, start in zip(STATES[self.rule], self.starts, strict=True)
        ]
        self.steps = np.zeros(slots, np.uint32)

    def inserted(self, slots: Array, status: Array) -> None:
        """New rows start with fresh optimizer rows."""
        new = slots[(status == INSERTED) | (status == EVICTED)]
        for state, start in zip(self.states, self.starts, strict=True):
            state[new] = start
        self.steps[new] = 0

    def update(
        self,
        keys: Array,
        slots: Array,
        gradients: Array,
        rate: float,
        sources: Array | None = None,
        weights: Array | None = None,
        valid: Array | None = None,
    ) -> None:
        """One step; slots are those of the positions."""
        self.count += 1
        distinct = unique(keys, valid)
        sources = np.arange(len(keys)) if sources is None else sources
        sums = pooled_sums(gradients, distinct, sources, weights)
        at = slots[distinct.first]
        held = at >= 0
        at, sums, names = at[held], sums[held], distinct.keys[held]
        bound = f32(self.constants["max_gradient"])
        sums = np.where(sums > bound, bound, np.where(sums < -bound, -bound, sums))
        self.steps[at] += np.uint32(1)
        steps = self.steps[at] if self.count_per_row else np.full(len(at), self.count, np.uint32)
        rows = self.oracle.values[at].astype(f32)
        states = [state[at].astype(f32) for state in self.states]
        with np.errstate(over="ignore"):
            rows = same_nan(RULES[self.rule](self.constants, rows, states, sums, f32(rate), steps))
        for state, new in zip(self.states, states, strict=True):
            state[at] = round_to(same_nan(new), state.dtype)
        dtype = self.oracle.dtype
        rounded = round_to(rows, dtype)
        if self.stochastic:
            rounded = stochastic_bfloat16(rows, names, steps, self.seed, dtype)
        self.oracle.values[at] = rounded
