"""The bags of one feature of a collection, and those of many features as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jax_hkv import pooled
from jax_hkv._checks import as_flat_mask, as_mask, as_scores, flat_mask
from jax_hkv._keys import Keys, as_keys
from jax_hkv._options import Combiner
from jax_hkv.features import (
    Bagged,
    Jagged,
    Layout,
    Padded,
    as_bagged,
    each_a_bag,
    each_id_of,
    unpadded,
)
from jax_hkv.index import Policy
from jax_hkv.table import Bags, jitted


def _joined(
    batches: Sequence[tuple[Bags, jax.Array | None]],
) -> tuple[Bags, Bool[Array, " n"] | None]:
    """Bags one after the other, and which of their positions are valid."""
    sources, splits = [], []
    positions = rows = 0
    for bags, _ in batches:
        sources.append(bags.sources + jnp.int32(rows))
        splits.append(bags.splits[:-1] + jnp.int32(positions))
        positions += bags.sources.shape[0]
        rows += bags.splits.shape[0] - 1
    splits.append(jnp.array([positions], jnp.int32))
    weights = None
    if any(bags.weights is not None for bags, _ in batches):
        weights = jnp.concatenate([bags.factors for bags, _ in batches])
    joined = Bags(jnp.concatenate(sources), jnp.concatenate(splits), weights)
    return joined, _joined_masks(batches)


def _joined_masks(batches: Sequence[tuple[Bags, jax.Array | None]]) -> Bool[Array, " n"] | None:
    if all(valid is None for _, valid in batches):
        return None
    return jnp.concatenate([flat_mask(valid, bags.sources.shape) for bags, valid in batches])


@jitted("combiners", "is_each_a_bag")
def as_one(
    batches: list[tuple[Bags, jax.Array | None]],
    combiners: tuple[str, ...],
    is_each_a_bag: bool,
) -> tuple[Bags | None, Bool[Array, " n"] | None]:
    """Joined, with the weights of their combiners: batches of a kind are weighed together.

    Where each id has a bag of its own, without a weight, no combiner changes its row, and the bags
    are None.
    """
    if is_each_a_bag:
        return None, _joined_masks(batches)
    kinds = [
        (combiner, bags.weights is not None)
        for combiner, (bags, _) in zip(combiners, batches, strict=True)
    ]
    weighed = list(batches)
    for kind in dict.fromkeys(kinds):
        if kind == ("sum", False):
            continue
        members = [number for number, own in enumerate(kinds) if own == kind]
        together = pooled.effective(*_joined([batches[n] for n in members]), combiner=kind[0])
        assert together.weights is not None
        sizes = [batches[number][0].sources.shape[0] for number in members]
        # Not by slices, whose derivative is a sum of as many padded arrays.
        for number, own in zip(members, jax.lax.split(together.weights, sizes), strict=True):
            bags, valid = batches[number]
            weighed[number] = (bags._replace(weights=own), valid)
    return _joined(weighed)


def bags_of(call: str, ids: Any, combiner: Combiner | None) -> tuple[Bagged, Layout]:
    """The bags of one feature, with the weights as they were given."""
    weights, valid = None, None
    if isinstance(ids, Padded):
        ids, valid, weights = unpadded(call, ids, None, None)
        if weights is not None:
            weights = jnp.asarray(weights, None if hasattr(weights, "dtype") else jnp.float32)
    if isinstance(ids, Jagged) and combiner is None:
        each = each_id_of(call, ids, weights, valid)
        ids, valid, weights = each.ids, each.valid, each.weights
    if isinstance(ids, Jagged):
        return as_bagged(call, ids, weights, valid)
    keys = as_keys(call, "ids", ids)
    valid = as_mask(call, "valid", valid, keys.shape)
    if weights is not None and weights.shape != keys.shape:
        raise TypeError(
            f"{call}: weights must be float32{list(keys.shape)}, one for each id, got "
            f"{weights.dtype}{list(weights.shape)}: reshape them"
        )
    if combiner is None or keys.ndim == 1:  # every id is a bag of its own
        keys, valid, weights = map(each_a_bag, (keys, valid, weights))
    return as_bagged(call, keys, weights, valid)


def joined_scores(
    call: str, policy: Policy, names: list[str], inputs: Any, scores: Mapping[str, Any]
) -> Keys | None:
    """The scores of features of a table, one after the other, as their ids are; None: of none.

    Where scores are counts, ids of a feature without any count once each.
    """
    given = {name: scores.get(name) for name in names}
    missing = [name for name, own in given.items() if own is None]
    if policy is Policy.CUSTOM and missing:
        raise ValueError(
            f"{call}: scores must be of the features {missing} too, whose table has Policy.CUSTOM, "
            f"which makes none of its own, got those of {list(scores)}: give scores="
            f"{{{missing[0]!r}: ...}}, uint32 or pairs as Keys, or one number for all ids"
        )
    if len(missing) == len(given):
        return None
    pairs = []
    for name, own in given.items():
        own = 1 if own is None and policy.counts else own
        shape = _shape_of(inputs[name])
        pairs.append(as_scores(f"{call} of the feature {name!r}", policy, own, shape))
    return Keys.concatenate(pairs)


def joined_masks(
    call: str, argument: str, names: list[str], inputs: Any, masks: Mapping[str, Any]
) -> Bool[Array, " n"] | None:
    """The masks of features of a table as :func:`joined_scores`: all True of one without; None."""
    given = {name: masks.get(name) for name in names}
    if all(mask is None for mask in given.values()):
        return None
    return jnp.concatenate(
        [
            as_flat_mask(f"{call} of the feature {name!r}", argument, own, _shape_of(inputs[name]))
            for name, own in given.items()
        ]
    )


def _shape_of(ids: Any) -> tuple[int, ...]:
    """Of the ids of a feature as they were given."""
    return _shape_of(ids.ids) if isinstance(ids, (Padded, Jagged)) else ids.shape
