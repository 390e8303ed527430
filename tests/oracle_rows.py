"""First rows and half types, as docs/semantics.md says: the part of the oracle about elements.

Numbers in parentheses are sections of that page.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
f32 = np.float32

Array = np.ndarray


class Init(NamedTuple):
    """An initialiser: constant(a), uniform(a, b), normal(a, b) or truncated_normal(a, b)."""

    kind: str
    a: float
    b: float = 0.0


ZEROS = Init("constant", 0.0)


def mix(x: Array) -> Array:
    """The finaliser of SplitMix64 on an array of words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def round_to(rows: Array, dtype: np.dtype) -> Array:
    """float32 rows in the dtype of the table; a NaN becomes the quiet NaN of its sign (9)."""
    if dtype == np.float32:
        return rows
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = rows.astype(dtype).view(np.uint16)
    quiet = {"float16": 0x7E00, "bfloat16": 0x7FC0}[dtype.name] + 0x8000 * np.signbit(rows)
    return np.where(np.isnan(rows), quiet, rounded).astype(np.uint16).view(dtype)


ERFINV_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
ERFINV_NEAR += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
ERFINV_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
ERFINV_FAR += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)
LOG_SERIES = (0.111111111, 0.142857143, 0.2, 0.333333333, 1.0)


def horner(coefficients: tuple[float, ...], x: Array) -> Array:
    return reduce(lambda r, c: r * x + f32(c), coefficients[1:], np.full_like(x, coefficients[0]))


def log(y: Array) -> Array:
    """The logarithm of float32 numbers in (0, 1] by a fixed sequence."""
    bits = y.view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(np.int32) - 127
    m = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(f32)
    above = m >= f32(1.41421356)
    m = np.where(above, m * f32(0.5), m)
    t = (m - f32(1)) / (m + f32(1))
    q = horner(LOG_SERIES, t * t)
    return (exponent + above).astype(f32) * f32(0.693147181) + (t + t) * q


def erfinv(x: Array) -> Array:
    """The single-precision approximation of M. Giles (2011)."""
    w = -log((f32(1) - x) * (f32(1) + x))
    near = horner(ERFINV_NEAR, w - f32(2.5))
    far = horner(ERFINV_FAR, np.sqrt(np.maximum(w, f32(5))) - f32(3))
    return np.where(w < f32(5), near, far) * x


def random_bits(keys: Array, dim: int, seed: int) -> Array:
    """The 24 bits of each element of the first rows: uint64[n, dim]."""
    base = mix(keys ^ mix(np.array([seed], np.uint64) + GOLDEN))
    steps = np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN
    return mix(base[:, None] + steps) >> np.uint64(40)


def initial_rows(keys: Array, dim: int, dtype: Any, init: Init, seed: int) -> Array:
    """The first rows of keys: a function of (seed, key) and nothing else."""
    dtype, a, b = np.dtype(dtype), f32(init.a), f32(init.b)
    bits = random_bits(keys, dim, seed)
    centred = (2 * bits.astype(np.int64) + 1 - 2**24).astype(f32) * f32(2**-24)
    if init.kind == "constant":
        rows = np.full(bits.shape, a)
    elif init.kind == "uniform":
        rows = (bits.astype(f32) * f32(2**-24)) * (b - a) + a
    elif init.kind == "normal":
        rows = (f32(1.41421356) * erfinv(centred)) * b + a
    elif init.kind == "truncated_normal":
        z = f32(1.41421356) * erfinv(centred * f32(0.9544997361))
        rows = np.minimum(np.maximum(z, f32(-2)), f32(2)) * b + a
    else:
        raise ValueError(f"no initialiser {init.kind!r}")
    return round_to(rows, dtype)


def initialiser_of(initializer: Any, dim: int) -> Init:
    """What an initializer of jax_hkv is for rows of a dim: variance scaling has a fan of dim."""
    kind = ("constant", "uniform", "normal", "truncated_normal")[initializer.kind]
    if initializer.scale is None:
        return Init(kind, initializer.a, initializer.b)
    stddev = math.sqrt(initializer.scale / dim)
    if kind == "uniform":
        return Init(kind, -math.sqrt(3) * stddev, math.sqrt(3) * stddev)
    if kind == "truncated_normal":
        density, within = math.exp(-2) / math.sqrt(2 * math.pi), math.erf(math.sqrt(2))
        stddev /= math.sqrt(1 - 4 * density / within)
    return Init(kind, 0.0, stddev)
