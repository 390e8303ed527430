"""Pieces of a training step of flax.linen: what becomes of a model's own collections."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
from flax.core.scope import in_filter
from flax.traverse_util import flatten_dict, unflatten_dict


def next_of(old: Any, new: Any) -> Any:
    """A collection (of statistics) after a step; one that a model sows into is left as it was."""
    return new if jax.tree.structure(old) == jax.tree.structure(new) else old


def asked(
    mutable: Any, but: tuple[str, ...], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """The collections that a call was asked for, but for some."""
    names = [name for name in after if name not in but and in_filter(mutable, name)]
    return {name: _of_this_call(before.get(name, {}), after[name]) for name in names}


def _of_this_call(before: Any, after: Any) -> Any:
    """A collection after a call, without what `init` or an earlier call has sown into it."""
    earlier: Any = flatten_dict(before)
    found: dict[Any, Any] = {}
    for path, leaf in flatten_dict(after).items():
        sown = earlier.get(path)
        if isinstance(sown, tuple) and isinstance(leaf, tuple):
            is_kept = len(leaf) >= len(sown) and all(map(operator.is_, sown, leaf))
            leaf = leaf[len(sown) :] if is_kept else leaf
            if not leaf:
                continue
        found[path] = leaf
    return unflatten_dict(found)
