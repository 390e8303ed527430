"""A training step that goes through its batch in parts, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hkv import _pins
from jax_hkv._bag_parts import are_bags, cut_bags
from jax_hkv._layers import widened
from jax_hkv._placed import is_one_key
from jax_hkv.index import NO_SLOT

_KEYS = "give random keys as jax.random.key makes them"
_PAD = (
    "pad the batch, mask its ids (valid=), and divide losses by a number that is the same for all "
    "parts"
)


def scan(
    differentiate: Callable[..., tuple[Any, Any, Any]],
    state: Any,
    args: Any,
    count: int,
    like: Any,
    results_of: Callable[[Any], Mapping[Any, list[Any]]],
) -> tuple[Any, Any, Any]:
    """Differentiates one part of the arguments after the other.

    Args:
      differentiate: of (state, pins, *part) to the next state, gradients, and whatever else. Pins
        are slots that earlier parts hold, by where their tables are.
      state: arrays that pass from part to part.
      args: of the step.
      count: of the parts.
      like: parameters; gradients are of their shapes and types.
      results_of: of everything else, the results of its lookups, by where their tables are.

    Returns:
      The last state, the sums of the gradients, made in float32 at least, and everything else of
      all parts, stacked.
    """
    parts = _cut(args, count)

    def held(rest: Any) -> dict[Any, Any]:
        return {where: _pins.slots_of(own) for where, own in results_of(rest).items()}

    def one(carry: Any, part: tuple[jax.Array, Any]) -> tuple[Any, _Packed]:
        before, sums, pins = carry
        state, gradients, rest = differentiate(before, pins, *part[1])
        _check_kept(before, state)
        # Each part has a row of its own.
        pins = jax.tree.map(lambda all_of, own: all_of.at[part[0]].set(own), pins, held(rest))
        return (state, jax.tree.map(jnp.add, sums, widened(gradients)), pins), _Packed.of(rest)

    def of_one(state: Any, parts: Any) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], parts)
        return held(differentiate(state, {}, *first)[2])

    shapes = jax.eval_shape(of_one, state, parts)
    pins = jax.tree.map(lambda own: jnp.full((count, *own.shape), NO_SLOT, jnp.int32), shapes)
    carry = (state, jax.tree.map(jnp.zeros_like, widened(like)), pins)
    (state, sums, _), rest = jax.lax.scan(one, carry, (jnp.arange(count), parts), length=count)
    gradients = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), sums, like)
    return state, gradients, rest.tree()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Packed:
    """A pytree whose numbers lie side by side: what a loop keeps costs a kernel for each array.

    Attributes:
      numbers: ``[..., n]``, by type.
      arrays: the leaves that are no numbers.
      places: static, of each leaf: a type and a place among the numbers; or None and one among the
        arrays.
      structure: static, of the pytree.
    """

    numbers: dict[str, jax.Array]
    arrays: list[jax.Array]
    places: tuple[tuple[str | None, int], ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> _Packed:
        leaves, structure = jax.tree.flatten(tree)
        kept: dict[str | None, list[Any]] = {None: []}
        places = []
        for leaf in map(jnp.asarray, leaves):
            is_number = leaf.ndim == 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            kind = leaf.dtype.name if is_number else None
            same = kept.setdefault(kind, [])
            places.append((kind, len(same)))
            same.append(leaf)
        arrays = kept.pop(None)
        return cls(
            {str(kind): jnp.stack(own) for kind, own in kept.items()},
            arrays,
            tuple(places),
            structure,
        )

    def tree(self) -> Any:
        leaves = [
            self.arrays[place] if kind is None else self.numbers[kind][..., place]
            for kind, place in self.places
        ]
        return self.structure.unflatten(leaves)


def _check_kept(before: Any, after: Any) -> None:
    """Raises unless a state has kept its form: what the next part begins with."""
    kinds = [
        {jax.tree_util.keystr(path): jax.typeof(leaf) for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (before, after))
    ]
    for name in sorted(kinds[0].keys() | kinds[1].keys()):
        old, new = (own.get(name, "nothing") for own in kinds)
        if str(old) != str(new):
            raise ValueError(
                f"train_step: a call of the model must leave {name} in the form that it had, "
                f"{old}, for the next micro-batch, got {new}: have init make it so"
            )


def _cut(args: Any, count: int) -> Any:
    """The arguments of a step as those of its micro-batches, stacked.

    Arrays are cut along their first axis, a Jagged into those of the parts, which stand one after
    the other; random keys are split, and numbers are for all, one of Keys, too.
    """
    first: list[tuple[str, int]] = []  # an array, and its size

    def array(path: Any, leaf: Any) -> Any:
        return leaf if are_bags(leaf) else _cut_array(_where(path), leaf, count, first)

    def bags(path: Any, leaf: Any) -> Any:
        sizes = [size for _, size in first[:1]]
        return cut_bags("train_step", _where(path), leaf, count, sizes) if are_bags(leaf) else leaf

    # Bags come last: what they have to be of, the arrays beside them tell.
    arrays = jax.tree_util.tree_map_with_path(
        array, args, is_leaf=lambda node: are_bags(node) or is_one_key(node)
    )
    return jax.tree_util.tree_map_with_path(bags, arrays, is_leaf=are_bags)


def _where(path: Any) -> str:
    return f"arguments{jax.tree_util.keystr(path)}"


def _cut_array(where: str, leaf: Any, count: int, first: list[tuple[str, int]]) -> Any:
    if is_one_key(leaf):
        return jax.tree.map(lambda words: jnp.broadcast_to(words, (count, 2)), leaf)
    if np.ndim(leaf) == 0:
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return jax.random.split(leaf, count) if is_key else jnp.broadcast_to(leaf, (count,))
    size = np.shape(leaf)[0]
    first.append((where, size))
    other, expected = first[0]
    if size != expected:
        raise ValueError(
            f"train_step: {where} must have the first axis of all others, since micro-batches are "
            f"cut along it, got {size} where {other} has {expected}: repeat for each example what "
            f"is for the whole batch, have loss_fn hold it, and {_KEYS}"
        )
    if size % count:
        is_raw_key = leaf.dtype == np.uint32 and leaf.shape == (2,)  # as of random.PRNGKey
        raise ValueError(
            f"train_step: {where} must have a first axis that can be cut into micro-batches of one "
            f"size, got one of {size} for {count} micro-batches: {_KEYS if is_raw_key else _PAD}"
        )
    return leaf.reshape(count, size // count, *leaf.shape[1:])
