"""What is done to gradients before an update, over dense parameters and rows together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jax_hkv import _sharded, _sharded_updates, _updates
from jax_hkv._bags import counts_in
from jax_hkv._checks import as_integer, as_number, as_one_flag
from jax_hkv._compat import is_traced
from jax_hkv._keys import form_of
from jax_hkv._options import Number
from jax_hkv.table import is_one_result

# Between them 1 / scale is a normal float32: XLA may take subnormal ones for zero.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126
_MOST_GROWN = 2.0**32  # far below where gradients that need no scale overflow


def as_bound(call: str, max_norm: Any) -> Any:
    """The bound of a norm; one that is traced as it is."""
    if is_traced(max_norm):
        return max_norm
    bound = as_number(call, "max_norm", max_norm)
    if not bound > 0:
        raise ValueError(f"{call}: max_norm must be positive, got {max_norm}")
    return bound


def clip_by_global_norm(
    max_norm: Number, gradients: Any, results: Sequence[Any], row_gradients: Sequence[Any]
) -> tuple[Any, list[Any], Float[Array, ""]]:
    """Scales all gradients so that their norm, over dense parameters and rows, is at most a bound.

    The norm is that of a dense model with the same rows: the gradients of equal keys are summed
    first; keys without a row do not count. Source: Pascanu, Mikolov, Bengio: On the
    difficulty of training recurrent neural networks, 2013.

    Args:
      max_norm: the bound, positive.
      gradients: of the dense parameters, any pytree; over devices summed over them, as rows'
        gradients are here.
      results: for each table, the result of its lookup, or a list of results.
      row_gradients: for each table, as its optimizer's update takes them.

    Returns:
      The dense and the row gradients, scaled (those of rows at least in float32, as updates add
      them up), and the norm before that. It is the root of a sum of squares in float32, as optax's:
      one above 1.8e19 is infinite, and finite gradients become
      zero, infinite ones NaN; if it is NaN, since one of them is, all become NaN
      (``apply=all_finite(norm)`` skips such steps).

    Raises:
      ValueError: if there is not one entry of `row_gradients` for each of `results`, or if the
        bound is not positive.
      TypeError: if it is no number, or if either of the two is no list.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table, result = hkv.find_or_insert(hkv.create(128, 1), np.array([3, 3], np.int32))
      >>> dense, (rows,), norm = clip_by_global_norm(
      ...     1.0, {"w": jnp.array([6.0])}, [result], [jnp.full((2, 1), 4, jnp.float32)])
      >>> float(norm), rows.tolist()
      (10.0, [[0.4000000059604645], [0.4000000059604645]])
    """
    call = "optim.clip_by_global_norm"
    max_norm = as_bound(call, max_norm)
    for name, given in (("results", results), ("row_gradients", row_gradients)):
        if not hasattr(given, "__len__") or isinstance(given, dict) or is_one_result(given):
            raise TypeError(
                f"{call}: {name} must be a list with one entry for each table, "
                f"got {type(given).__name__}: write [{name}], or the values of a dict in one order"
            )
    if len(results) != len(row_gradients):
        raise ValueError(
            f"{call}: row_gradients must have one entry for each table, got {len(row_gradients)} "
            f"for {len(results)} results"
        )
    for leaf in jax.tree.leaves(gradients):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, np.inexact):
            raise TypeError(
                f"{call}: gradients must be floating-point numbers, got {form_of(leaf)}, which a "
                "factor below 1 makes zeros: cast them"
            )
    gradients = jax.tree.map(jnp.asarray, gradients)
    parts = [
        (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
        for leaf in jax.tree.leaves(gradients)
    ]
    squares = [jnp.sum(jnp.square(part.astype(jnp.float32))) for part in sum(parts, ())]
    squares += [_square_norm(call, *pair) for pair in zip(results, row_gradients, strict=True)]
    norm = jnp.sqrt(sum(squares, jnp.float32(0)))
    # Where it is not a number, the bound says nothing of the gradients: none of them is one then.
    factor = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
    scale = functools.partial(_scaled, factor)
    scaled = jax.tree.map(lambda leaf: scale(leaf).astype(leaf.dtype), gradients)
    return scaled, list(jax.tree.map(scale, row_gradients)), norm


def _scaled(factor: jax.Array, leaf: jax.Array) -> jax.Array:
    """At least in float32: a factor in a half type is off by up to a 256th, or zero."""
    kind = jnp.promote_types(leaf.dtype, jnp.float32)
    return leaf.astype(kind) * factor.astype(kind)


def _square_norm(call: str, result: Any, row_gradients: Any) -> Float[Array, ""]:
    if _sharded.is_sharded(result):
        return _sharded_updates.square_norm(call, result, row_gradients)
    pairs = _updates.listed(result, row_gradients, call=call)
    return _updates.square_norm(*pairs)


def all_finite(*trees: Any) -> Bool[Array, ""]:
    """Whether every number of every leaf is finite: what an update's `apply` wants to know.

    Gradients of rows may have others where no row gets them (the norm of a masked position's zeros,
    say), which a ``train_step`` takes no notice of; nor does the norm that
    :func:`clip_by_global_norm` returns, ``apply=all_finite(norm)``.

    Example:
      >>> bool(all_finite({"w": jnp.ones(3)}, [jnp.array([jnp.inf])]))
      False
    """
    return _all([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(trees)])


def of_rows(results: Sequence[Any], gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Gradients of lookups, zero where no row gets them: of masked and refused keys, empty bags.

    Args:
      results: of the lookups; a scan may have stacked them.
      gradients: as many.
    """
    return [
        jnp.where(_have_rows(result, own.shape[:-1])[..., None], own, jnp.zeros((), own.dtype))
        for result, own in zip(results, gradients, strict=True)
    ]


def _have_rows(result: Any, shape: tuple[int, ...]) -> Bool[Array, "*shape"]:
    """Whether the key of each position, or any of each bag, has a row."""
    slots = _sharded.slots_like(result.status) if _sharded.is_sharded(result) else result.slots
    have_rows, bags = slots >= 0, result.bags
    if bags is None:
        return have_rows.reshape(shape)
    return (counts_in(bags, have_rows.reshape(bags.sources.shape)) > 0).reshape(shape)


def stay_finite(new: Any, old: Any) -> Bool[Array, ""]:
    """Whether all floating-point numbers are finite that were so before."""
    return _all(
        [
            jnp.all(jnp.isfinite(after) | ~jnp.isfinite(before))
            for after, before in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
            if after is not before and jnp.issubdtype(jnp.result_type(after), jnp.floating)
        ]
    )


def _all(flags: list[jax.Array]) -> Bool[Array, ""]:
    return jnp.all(jnp.stack(flags)) if flags else jnp.bool_(True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor that keeps small gradients from vanishing in half precision, and adapts itself.

    Multiply the loss by `scale` and the gradients by `1 / scale`; a step whose gradients are not
    all finite is skipped (by `train_step` also one with a NaN in its loss or statistics). Source:
    Micikevicius et al.: Mixed precision training, 2018.

    Attributes:
      scale: ``float32``, the factor.
      good_steps: ``int32``, finite steps since it last changed.
      period: static, finite steps after which the factor doubles.

    Example:
      >>> scale = LossScale.create(1024.0)
      >>> float(scale.adjust(jnp.bool_(False)).scale)
      512.0
    """

    scale: Float[Array, ""]
    good_steps: Int32[Array, ""]
    period: int = dataclasses.field(default=2000, metadata={"static": True})

    @classmethod
    def create(cls, scale: float = 2.0**15, period: int = 2000) -> LossScale:
        """A factor that has not changed yet.

        Args:
          scale: to begin with, 2**-126 to 2**126.
          period: finite steps until it doubles, from 1 on.

        Raises:
          TypeError, ValueError: naming the argument.
        """
        scale = as_number("LossScale.create", "scale", scale)
        if not _LEAST_SCALE <= scale <= _MOST_SCALE:
            raise ValueError(
                f"LossScale.create: scale must be from 2**-126 to 2**126, got {scale}: gradients "
                "are multiplied by its inverse, which float32 must hold"
            )
        period = as_integer("LossScale.create", "period", period, 1, 2**31 - 1)
        return cls(jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32), period)

    def adjust(self, finite: Bool[Array, ""]) -> LossScale:
        """After a step: halved if its gradients were not finite, doubled after a good period.

        It is not halved below 1, nor doubled from 2**32 on.

        Raises:
          TypeError: if `finite` is not one bool.
        """
        finite = as_one_flag("LossScale.adjust", "finite", finite)
        steps = self.good_steps + 1
        doubles = (steps >= self.period) & (self.scale < _MOST_GROWN)
        grown = jnp.where(doubles, 2 * self.scale, self.scale)
        scale = jnp.where(finite, grown, jnp.maximum(self.scale / 2, jnp.minimum(self.scale, 1.0)))
        steps = jnp.where(finite & (steps < self.period), steps, 0)
        return dataclasses.replace(self, scale=scale, good_steps=steps)
