"""The bags of one feature of a collection, and those of many features as one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jax_hkv import pooled
from jax_hkv._bags import Bagged, Given, Layout, joined, joined_bags
from jax_hkv._checks import as_flat_mask, as_scores
from jax_hkv._keys import Keys
from jax_hkv._namespaces import joined_in_namespaces
from jax_hkv._options import Combiner
from jax_hkv.features import Jagged, Padded, as_given
from jax_hkv.index import Policy
from jax_hkv.table import jitted


@jitted("layouts", "combiners", "numbers", "bits")
def as_one(
    batches: list[Given],
    layouts: tuple[Layout, ...],
    combiners: tuple[Combiner, ...],
    numbers: tuple[int, ...],
    bits: int,
) -> Bagged:
    """The bags of features of a group as one batch, with the weights of their combiners.

    Features of a kind are weighed together. Where each id has a bag of its own, without a weight,
    no combiner changes its row, and the bags are None.

    Args:
      batches: of :func:`bags_of`, one for each feature.
      layouts: theirs.
      combiners: theirs.
      numbers: of their tables.
      bits: of keys that hold a number.
    """
    keys = joined_in_namespaces([batch.keys for batch in batches], numbers, bits)
    if all(layout.is_each_a_bag for layout in layouts):
        return Bagged(keys, joined([own.valid for own in batches], layouts, jnp.bool_), None)
    kinds = [
        (combiner, batch.weights is not None)
        for combiner, batch in zip(combiners, batches, strict=True)
    ]
    weighed = list(batches)
    for kind in dict.fromkeys(kinds):
        if kind == ("sum", False):
            continue
        members = [number for number, own in enumerate(kinds) if own == kind]
        own_layouts = [layouts[number] for number in members]
        own_batches = [batches[number] for number in members]
        is_masked = any(batch.valid is not None for batch in own_batches)
        bags, valid = joined_bags(own_batches, own_layouts)
        bags = pooled.effective(bags, valid, combiner=kind[0], is_masked=is_masked)
        if len(members) == len(batches):
            return Bagged(keys, valid, bags)
        assert bags.weights is not None
        # Not by slices, whose derivative is a sum of as many padded arrays.
        sizes = [layout.positions for layout in own_layouts]
        for number, own in zip(members, jax.lax.split(bags.weights, sizes), strict=True):
            weighed[number] = batches[number]._replace(weights=own)
    bags, valid = joined_bags(weighed, layouts)
    return Bagged(keys, valid, bags)


def bags_of(call: str, ids: Any, combiner: Combiner | None) -> tuple[Given, Layout]:
    """The bags of one feature, with the weights as they were given."""
    return as_given(call, ids, None, None, is_each=combiner is None, are_single=True)


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
