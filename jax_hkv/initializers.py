"""First values of rows: functions of (seed, key) alone, the same bits on every backend.

The distributions are those of ``jax.nn.initializers``; the numbers are not, since they come from a
counter-based generator that needs no state (docs/semantics.md, section 5).
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Literal

import numpy as np

__all__ = [
    "Distribution",
    "Initializer",
    "constant",
    "normal",
    "ones",
    "truncated_normal",
    "uniform",
    "variance_scaling",
    "zeros",
]

_CONSTANT, _UNIFORM, _NORMAL, _TRUNCATED_NORMAL = range(4)

_LARGEST = 3.4028234663852886e38  # of float32

# The standard deviation of a standard normal variate truncated to (-2, 2).
_TRUNCATED_STDDEV = 0.87962566103423978

Distribution = Literal["truncated_normal", "normal", "uniform"]


@dataclasses.dataclass(frozen=True, eq=False)
class Initializer:
    """A distribution for the elements of new rows. Equal ones have parameters of equal bits.

    Attributes:
      kind: which distribution.
      a: the constant, the lower bound, or the mean.
      b: the upper bound, or the standard deviation.
      scale: of variance scaling, which divides by the table's dim; None for the others.
    """

    kind: int
    a: float = 0.0
    b: float = 0.0
    scale: float | None = None

    def _bits(self) -> tuple[int, bytes, bytes | None]:
        """A table's initializer is static: what JAX traced for 0.0 must not serve for -0.0."""
        scale = None if self.scale is None else struct.pack("=d", self.scale)
        return self.kind, struct.pack("=dd", self.a, self.b), scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Initializer) and self._bits() == other._bits()

    def __hash__(self) -> int:
        return hash(self._bits())

    def __str__(self) -> str:
        name = ("constant", "uniform", "normal", "truncated_normal")[self.kind]
        numbers = [self.a] if self.kind == _CONSTANT else [self.a, self.b]
        return f"{name}({', '.join(str(np.float32(number)) for number in numbers)})"

    def for_dim(self, dim: int) -> Initializer:
        """The same with its parameters settled for rows of `dim` elements."""
        if self.scale is None:
            return self
        stddev = math.sqrt(self.scale / dim)
        if self.kind == _UNIFORM:
            bound = math.sqrt(3.0) * stddev
            return Initializer(_UNIFORM, -bound, bound)
        if self.kind == _TRUNCATED_NORMAL:
            stddev /= _TRUNCATED_STDDEV
        return Initializer(self.kind, 0.0, stddev)


def constant(value: float) -> Initializer:
    """Every element is `value`.

    Every initializer is given to :func:`jax_hkv.create`, a layer or a ``TableConfig``, and raises
    TypeError or ValueError in the name of an argument that is no float32, or out of its range.

    Args:
      value: a float32, which here may be infinite or NaN.

    Example:
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=2, init=constant(0.5))
      >>> hkv.initial_rows(table, np.array([5], np.int32)).tolist()
      [[0.5, 0.5]]
    """
    return Initializer(_CONSTANT, _number("constant", "value", value))


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def uniform(low: float, high: float) -> Initializer:
    """Uniform from low to high, which rounding can reach (in half types often).

    Args:
      low: a finite float32.
      high: no less than `low`, and so that their distance is a finite float32.

    Example:
      >>> import jax_hkv as hkv
      >>> rows = hkv.initial_rows(hkv.create(128, 64, init=uniform(-1, 1)), np.arange(99))
      >>> bool((abs(rows) <= 1).all()), bool((abs(rows) > 0.9).any())
      (True, True)
    """
    low, high = _finite("uniform", "low", low), _finite("uniform", "high", high)
    if not (low <= high and math.isfinite(_rounded(high - low))):
        raise ValueError(
            "uniform: low must not exceed high, and their distance must be a float32, got "
            f"low={low}, high={high}"
        )
    return Initializer(_UNIFORM, low, high)


def normal(stddev: float = 0.01, *, mean: float = 0.0) -> Initializer:
    """Normal; the first argument is the one of ``jax.nn.initializers.normal``.

    Args:
      stddev: the standard deviation, not negative.
      mean: a finite float32.

    Example:
      >>> import jax_hkv as hkv
      >>> rows = hkv.initial_rows(hkv.create(128, 64, init=normal(0.1)), np.arange(99))
      >>> round(float(rows.std()), 2)
      0.1
    """
    return Initializer(_NORMAL, _finite("normal", "mean", mean), _stddev("normal", stddev))


def truncated_normal(stddev: float = 0.01, *, mean: float = 0.0) -> Initializer:
    """Normal, cut off at two standard deviations.

    Args:
      stddev: the standard deviation before the cut, not negative.
      mean: a finite float32.

    Example:
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, 64, init=truncated_normal(0.1))
      >>> bool((abs(hkv.initial_rows(table, np.arange(99))) <= 0.2).all())
      True
    """
    call = "truncated_normal"
    return Initializer(_TRUNCATED_NORMAL, _finite(call, "mean", mean), _stddev(call, stddev))


def variance_scaling(
    scale: float = 1.0, distribution: Distribution = "truncated_normal"
) -> Initializer:
    """Variance scale / dim, whatever the table's dim; ``nn.Embed`` has scale 1 and "normal".

    Args:
      scale: positive.
      distribution: "truncated_normal", "normal" or "uniform".

    Example:
      >>> import jax_hkv as hkv
      >>> table = hkv.create(128, dim=64, init=variance_scaling(1.0, "normal"))
      >>> round(float(hkv.initial_rows(table, np.arange(99)).std()), 2)  # 0.125
      0.13
    """
    kinds = {"truncated_normal": _TRUNCATED_NORMAL, "normal": _NORMAL, "uniform": _UNIFORM}
    if not isinstance(distribution, str) or distribution not in kinds:
        raise ValueError(
            f"variance_scaling: distribution must be one of {sorted(kinds)}, got {distribution!r}"
        )
    scale = _finite("variance_scaling", "scale", scale)
    if not scale > 0:
        raise ValueError(f"variance_scaling: scale must be positive, got {scale}")
    return Initializer(kinds[distribution], scale=scale)


def _stddev(call: str, stddev: float) -> float:
    stddev = _finite(call, "stddev", stddev)
    if not stddev >= 0:
        raise ValueError(f"{call}: stddev must not be negative, got {stddev}")
    return stddev


def _number(call: str, argument: str, value: float) -> float:
    """A number that float32 holds, or infinity or NaN."""
    try:
        if isinstance(value, (str, bytes, bool, np.bool_)):  # float() takes these
            raise TypeError
        number = float(value)
    except OverflowError:
        raise ValueError(
            f"{call}: {argument} must be a float32, {_LARGEST} at most, got {value}"
        ) from None
    except (TypeError, ValueError):
        raise TypeError(
            f"{call}: {argument} must be a number, got {type(value).__name__} {value!r}"
        ) from None
    if math.isinf(_rounded(number)) and not math.isinf(number):
        raise ValueError(f"{call}: {argument} must be a float32, {_LARGEST} at most, got {value}")
    return number


def _finite(call: str, argument: str, value: float) -> float:
    """Of others the first values would be no numbers, or all of them infinite."""
    number = _number(call, argument, value)
    if not math.isfinite(number):
        raise ValueError(
            f"{call}: {argument} must be finite, got {value}: constant({value}) fills rows with it"
        )
    return number


def _rounded(number: float) -> float:
    """As a float32."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))
