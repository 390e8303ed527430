"""What a batch of ids is made of: bags of ids (multi-hot features), and distinct ids."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Integer

from jax_hkv import _checks, _ffi
from jax_hkv import index as _index
from jax_hkv._bags import Bagged, Given, Layout, joined_bags
from jax_hkv._compat import is_traced, match_varying, replicated
from jax_hkv._host_bags import (
    MASKED_LENGTHS,
    as_numpy,
    check_on_host,
    flat,
    flat_ids,
    words_of,
    words_of_lists,
)
from jax_hkv._keys import (
    Keys,
    check_fixed,
    check_keys,
    check_unmasked,
    check_whose,
    form_of,
    keys_of,
)
from jax_hkv.index import MAX_SLOTS
from jax_hkv.table import jitted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Jagged:
    """Bags of ids of any length, one after the other: the form of a ragged tensor.

    Bag `j` is positions ``row_splits[j]`` to ``row_splits[j + 1] - 1``. Positions from
    ``row_splits[-1]`` on are padding, so that batches of one capacity are traced once. Splits are
    checked by who takes them: operations outside of ``jax.jit``, ``train_step`` (on devices only
    those of the first batch of a shape) and, of NumPy's, what :func:`jax_hkv.checked` makes.
    Elsewhere decreasing ones are not noticed. Positions before the first split are padding too.

    Attributes:
      ids: flat, ``[n]``: Keys, or an integer array.
      row_splits: ``int32[batch + 1]``, or ``int64`` as NumPy's cumsum makes them, from 0 to at
        most n, not decreasing.
      weights: ``float32[n]``, or None for ones.

    Example:
      >>> Jagged.from_lists([[5, 6], [], [7]], capacity=4).row_splits.tolist()
      [0, 2, 2, 3]
    """

    ids: Any
    row_splits: Int[Any, " splits"]
    weights: Float32[Any, " n"] | None = None

    @property
    def valid(self) -> Bool[Any, " n"]:
        """Which positions are in a bag: the mask of the ids for operations that know no bags.

        Of one Jagged: of several one after the other (:meth:`for_parts`) mask each by itself.

        Example:
          >>> import jax_hkv as hkv
          >>> bags = Jagged.from_lists([[5, 6], [], [7]], capacity=4)
          >>> hkv.contains(hkv.create(128, 2), bags.ids, valid=bags.valid)[1].tolist()
          [False, False, False, False]
          >>> bags.valid.tolist()
          [True, True, True, False]
        """
        splits = self.row_splits
        places = (np if isinstance(splits, np.ndarray) else jnp).arange(
            self.ids.shape[0], dtype=splits.dtype
        )
        return (splits[0] <= places) & (places < splits[-1])

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[int] | Integer[Any, " ids"]],
        *,
        capacity: int | None = None,
        weights: Sequence[Sequence[float] | Float[Any, " ids"]] | None = None,
    ) -> Jagged:
        """From a list of ids for each bag, on the host, without a device; ids keep their 64 bits.

        Args:
          lists: integers from -2**63 to 2**64 - 1, as lists or integer arrays.
          capacity: positions, with the padding; by default as many as there are ids.
          weights: a list for each bag, as long as its ids; padding gets 0.

        Raises:
          TypeError, ValueError: naming the bag, or the argument.
        """
        call = "Jagged.from_lists"
        ids, lengths, factors = words_of_lists(call, lists, weights)
        return _packed(call, ids, lengths, capacity, factors)

    @classmethod
    def from_lengths(
        cls,
        values: Any,
        lengths: Any,
        *,
        capacity: int | None = None,
        weights: Any = None,
    ) -> Jagged:
        """From the ids of all bags, one bag after the other, and how many each bag has.

        This is the form of TorchRec's jagged tensors. It is made on the host, without a device, and
        without a loop over the bags; ids keep their 64 bits.

        Args:
          values: flat, as many as the lengths say together: Keys, or integers as an array or list.
          lengths: integers from 0 on, one for each bag.
          capacity: positions, with the padding; by default as many as there are ids.
          weights: numbers, one for each id; padding gets 0.

        Raises:
          TypeError, ValueError: naming the argument.

        Example:
          >>> Jagged.from_lengths([5, 6, 7], [2, 0, 1], capacity=4).row_splits.tolist()
          [0, 2, 2, 3]
        """
        call = "Jagged.from_lengths"
        is_list = isinstance(values, (list, tuple))
        given = as_numpy(f"{call}: values", values) if is_list else values
        if isinstance(values, Keys):
            check_on_host(f"{call}: values", values.words)
            ids = values.to_numpy()
        elif given is not values and given.dtype.kind in "fO":  # NumPy finds no integer type
            ids = words_of(f"{call}: values", values)
        else:
            ids = Keys.from_numpy(flat_ids(call, "values", given)).to_numpy()
        if ids.ndim != 1:
            raise ValueError(
                f"{call}: values must be flat, the ids of one bag after the other, got "
                f"{list(ids.shape)}: reshape them"
            )
        counts = flat(call, "lengths", lengths, "iu", MASKED_LENGTHS).astype(np.int64)
        if ((counts < 0) | (counts > ids.size)).any() or counts.sum() != ids.size:
            raise ValueError(
                f"{call}: lengths must be from 0 on and say how many of the values each bag has, "
                f"so that their sum is the number of values, {list(ids.shape)}; got a sum of "
                f"{counts.sum()} and a least length of {counts.min(initial=0)}"
            )
        factors = None if weights is None else flat(call, "weights", weights, "iuf")
        if factors is not None and factors.shape != ids.shape:
            raise ValueError(
                f"{call}: weights must be one for each of the {ids.size} values, got {factors.size}"
            )
        return _packed(call, ids, counts, capacity, factors)

    def for_parts(
        self, parts: int, *, capacity: int | None = None, batch: int | None = None
    ) -> Jagged:
        """The same bags as a Jagged for each device or micro-batch, one of these after the other.

        It is what `Placement.put` and a step in micro-batches take: the bags are dealt out in
        order, and each part has splits of its own and as many positions, which a mask beside them,
        ``Padded(parts, valid)``, is of too. It is made on the host, without a device. Positions
        move: what else goes by them (scores, ``admit``) comes along as weights of a Jagged of the
        same splits, and is the `weights` of what is returned.

        Args:
          parts: of this process: its devices, times the micro-batches of a step.
          capacity: positions of each part, with the padding; by default as many as the part with
            the most ids has, so that every number of them is traced anew.
          batch: bags of all parts together; by default as many as there are. What is missing, in
            the last batch of a data set, is made up by empty ones.

        Raises:
          TypeError, ValueError: naming the argument, or what is wrong with ids, splits or weights.

        Example:
          >>> bags = Jagged.from_lists([[5, 6], [], [7], [8]])
          >>> two = bags.for_parts(2, capacity=3)
          >>> two.row_splits.tolist(), two.ids.to_numpy().tolist()
          ([0, 2, 2, 0, 1, 2], [5, 6, 0, 7, 8, 0])
        """
        call = "Jagged.for_parts"
        for leaf in jax.tree.leaves(self):
            check_on_host(f"{call}: the bags", leaf)
        parts = _checks.as_integer(call, "parts", parts, 1, MAX_SLOTS)
        is_keys = isinstance(self.ids, Keys)
        if is_keys:
            check_unmasked(f"{call}: ids", self.ids.words)
            ids = np.asarray(self.ids.words)
            if ids.ndim != 2:
                raise ValueError(
                    f"{call}: ids must be flat, the ids of one bag after the other, got Keys of "
                    f"shape {list(ids.shape[:-1])}: reshape them"
                )
        else:
            ids = flat_ids(call, "ids", self.ids)
        splits = known_splits(call, "row_splits", self.row_splits, len(ids))
        given = len(splits) - 1
        batch = given if batch is None else _checks.as_integer(call, "batch", batch, 0, MAX_SLOTS)
        if batch < given or batch % parts:
            least = max(-(-given // parts), 1) * parts
            raise ValueError(
                f"{call}: batch must be a multiple of the {parts} parts, with room for {given} "
                f"bags, got {batch}: with batch={least}, say, empty bags fill it up"
            )
        ends = np.append(splits, np.full(batch - given, splits[-1]))
        each = batch // parts
        ends = ends[each * np.arange(parts)[:, None] + np.arange(each + 1)]
        most = int((ends[:, -1] - ends[:, 0]).max())
        room = most if capacity is None else capacity
        room = _checks.as_integer(call, "capacity", room, 0, MAX_SLOTS // parts)
        if room < most:
            raise ValueError(
                f"{call}: capacity must be at least the number of ids of each part, {most} of one "
                f"of them, got {room}: raise it, or leave ids out"
            )

        def dealt(array: np.ndarray) -> np.ndarray:
            out = np.zeros((parts, room, *array.shape[1:]), array.dtype)
            for own, first, last in zip(out, ends[:, 0], ends[:, -1], strict=True):
                own[: last - first] = array[first:last]
            return out.reshape(-1, *array.shape[1:])

        weights = self.weights
        if weights is not None:
            weights = flat(call, "weights", weights, "iuf").astype(np.float32)
            if len(weights) != len(ids):
                raise ValueError(
                    f"{call}: weights must be one for each of the {len(ids)} positions, got "
                    f"{len(weights)}"
                )
            weights = dealt(weights)
        splits = (ends - ends[:, :1]).astype(np.int32).reshape(-1)
        return Jagged(Keys(dealt(ids)) if is_keys else dealt(ids), splits, weights)


def concatenate(batches: Sequence[Any]) -> Any:
    """The batches of this process's devices as one, for :meth:`jax_hkv.sharding.Placement.put`.

    Args:
      batches: one for each device, pytrees of arrays of equal shapes.

    Raises:
      TypeError: if they are no list.
      ValueError: if their shapes differ, or if there is none.

    Example:
      >>> bags = [[[5, 6], []], [[7], [8]]]
      >>> concatenate([Jagged.from_lists(own, capacity=4) for own in bags]).row_splits.tolist()
      [0, 2, 2, 0, 1, 2]
    """
    call = "sharding.concatenate"
    batches = _checks.as_list(call, "batches", batches, "batches, one for each device")
    if not batches:
        raise ValueError(f"{call}: batches must be those of this process's devices, got none")
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(batch)] for batch in batches]
    for number, own in enumerate(shapes):
        if own != shapes[0]:
            raise ValueError(
                f"{call}: batches must have arrays of equal shapes, got "
                f"{shapes[0]} for device 0 and {own} for device {number}: make all Jagged with the "
                "same capacity= and number of bags, and pad other arrays"
            )
    return jax.tree.map(lambda *leaves: np.concatenate([*map(np.asarray, leaves)]), *batches)


def is_jagged(node: Any) -> bool:
    """Whether a node of a pytree is a :class:`Jagged`."""
    return isinstance(node, Jagged)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Padded:
    """Bags of ids of one length, some of whose positions may be padding, with weights beside them.

    Attributes:
      ids: ``[*batch, hotness]``, or ``[batch]`` of one id each: Keys, or an integer array. Or a
        :class:`Jagged` with its own weights, of which `valid` masks positions.
      valid: ``bool`` of the ids' shape, False for padding; None: all are ids.
      weights: ``float32`` of the ids' shape; None: ones.
    """

    ids: Any
    valid: Bool[Any, "*batch hotness"] | None = None
    weights: Float32[Any, "*batch hotness"] | None = None

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[int] | Integer[Any, " ids"]],
        *,
        hotness: int | None = None,
        keep: Literal["first", "last"] | None = None,
        weights: Sequence[Sequence[float] | Float[Any, " ids"]] | None = None,
    ) -> Padded:
        """From a list of ids for each bag, on the host, without a device; ids keep their 64 bits.

        Args:
          lists: see :meth:`Jagged.from_lists`.
          hotness: positions of each bag; by default those of the longest.
          keep: which ids of a list that is longer stay, the "first" or the "last" ones; None: such
            a list is an error.
          weights: a list for each bag, as long as its ids; padding gets 0.

        Returns:
          Keys ``[batch, hotness]`` with their mask; a list stands at the beginning of its bag.

        Raises:
          TypeError, ValueError: naming the bag, or the argument.

        Example:
          >>> bags = Padded.from_lists([[5, 6, 7], [8]], hotness=2, keep="last")
          >>> bags.ids.to_numpy().tolist(), bags.valid.tolist()
          ([[6, 7], [8, 0]], [[True, True], [True, False]])
        """
        call = "Padded.from_lists"
        ids, lengths, factors = words_of_lists(call, lists, weights)
        most = int(lengths.max(initial=0))
        hotness = most if hotness is None else hotness
        hotness = _checks.as_integer(call, "hotness", hotness, 0, MAX_SLOTS)
        if keep not in (None, "first", "last"):
            raise ValueError(f'{call}: keep must be "first", "last" or None, got {keep!r}')
        if keep is None and hotness < most:
            raise ValueError(
                f"{call}: hotness must be at least {most}, the ids of bag {lengths.argmax()}, got "
                f'{hotness}: raise it, or say keep="first" or keep="last" to leave the others out'
            )
        position = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if keep == "last":
            position -= np.repeat(np.maximum(lengths - hotness, 0), lengths)
        stays = (position >= 0) & (position < hotness)
        valid = np.arange(hotness) < lengths[:, None]
        words = np.zeros(valid.shape, np.uint64)
        words[valid] = ids[stays]
        if factors is not None:
            own, factors = factors, np.zeros(valid.shape, np.float32)
            factors[valid] = own[stays]
        return cls(Keys.from_numpy(words), valid, factors)


def _packed(
    call: str, ids: np.ndarray, lengths: np.ndarray, capacity: int | None, weights: Any
) -> Jagged:
    """Bags of 64-bit words, padded to a capacity."""
    total = len(ids)
    capacity = total if capacity is None else capacity
    capacity = _checks.as_integer(call, "capacity", capacity, 0, MAX_SLOTS)
    if capacity < total:
        raise ValueError(
            f"{call}: capacity must be at least the number of ids, {total}, got {capacity}: raise "
            "it, or leave ids out"
        )
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    padding = (0, capacity - total)
    factors = None if weights is None else np.pad(weights.astype(np.float32), padding)
    return Jagged(Keys.from_numpy(np.pad(ids, padding)), splits, factors)


def as_given(
    call: str,
    ids: Any,
    weights: Any,
    valid: Any,
    *,
    is_each: bool = False,
    are_single: bool = False,
) -> tuple[Given, Layout]:
    """What a caller gave as bags of ids, checked.

    With `is_each` every id is a bag by itself, those of a Jagged too; with `are_single` those along
    one axis are, as those of a Padded.
    """
    if isinstance(ids, Padded):
        remedy = "a Padded has them: Padded(ids, valid, weights)"
        _check_alone(call, ids, remedy, weights=weights, valid=valid)
        ids, valid, weights, are_single = ids.ids, ids.valid, ids.weights, True
    if isinstance(ids, Jagged):
        keys, splits, factors, mask = _checked_jagged(call, ids, weights, valid)
        if not is_each:
            layout = Layout(keys.shape, (splits.shape[0] - 1,), factors is not None)
            return Given(keys, mask, factors, splits), layout
        is_in_bag = Jagged(keys, splits).valid
        ids, weights, valid = keys, factors, is_in_bag if mask is None else is_in_bag & mask
    keys = check_keys(call, "ids", ids)
    is_each |= are_single and len(keys.shape) == 1
    if not keys.shape and not is_each:
        raise ValueError(
            f"{call}: ids must have the shape [batch, hotness], or be a jax_hkv.Jagged, got a "
            "single id: give it as ids[None, None]"
        )
    mask = _checks.as_mask(call, "valid", valid, keys.shape)
    factors = as_weights(call, weights, keys.shape)
    shape = (*keys.shape, 1) if is_each else keys.shape
    return Given(keys, mask, factors, None), Layout(shape, shape[:-1], weights is not None)


def check_whose_bags(call: str, argument: str, ids: Any, namespace: Any) -> None:
    """Raises for ids, or bags of them, that do not say whose they are, where they are to."""
    while isinstance(ids, (Jagged, Padded)):
        ids, argument = ids.ids, f"{argument}.ids"
    check_unmasked(f"{call}: {argument}", ids)
    check_whose(call, argument, ids, namespace)


@jitted("layout")
def as_bagged(given: Given, layout: Layout) -> Bagged:
    """Ids and the bag of each, with the weights as they were given."""
    bags, valid = joined_bags([given], [layout])
    return Bagged(keys_of(given.keys).reshape(-1), valid, bags)


def _check_alone(call: str, given: Any, remedy: str, **arguments: Any) -> None:
    for name, argument in arguments.items():
        if argument is not None:
            raise ValueError(
                f"{call}: {name} cannot be given beside a {type(given).__name__}, got "
                f"{type(argument).__name__}: {remedy}"
            )


def _checked_jagged(
    call: str, given: Jagged, weights: Any, valid: Any
) -> tuple[Any, Int32[Array, " batch+1"], Float32[Array, " n"] | None, Bool[Array, " n"] | None]:
    _check_alone(call, given, "they are Jagged(ids, row_splits, weights)", weights=weights)
    keys = check_keys(call, "ids.ids", given.ids)
    if len(keys.shape) != 1:
        raise ValueError(
            f"{call}: the ids of a Jagged must be flat, got shape {list(keys.shape)}: reshape them "
            "to [n], with row_splits that say where bags begin"
        )
    splits = as_splits(call, "ids.row_splits", given.row_splits, keys.shape[0])
    mask = _checks.as_mask(call, "valid", valid, keys.shape)
    return keys, splits, as_weights(call, given.weights, keys.shape), mask


def as_weights(call: str, weights: Any, shape: tuple[int, ...]) -> Float32[Array, " n"] | None:
    """Weights of the given shape, flat."""
    if weights is None:
        return None
    expected = f"float32{list(shape)}, one for each id"
    array = _checks.as_array(call, "weights", weights, expected)
    if array.dtype == jnp.float64:  # what numbers are where x64 is on
        array = array.astype(jnp.float32)
    if array.dtype != jnp.float32 or array.shape != shape:
        raise TypeError(
            f"{call}: weights must be {expected}, got {form_of(array)}: "
            f"{_checks.remedy_of(array, jnp.float32, shape)}"
        )
    return array.reshape(-1)


def as_splits(call: str, argument: str, splits: Any, count: int) -> Int32[Array, " batch+1"]:
    """Row splits, their values checked where they are known, and cut to `count` where not."""
    if not is_traced(splits):
        known_splits(call, argument, splits, count)
        splits = splits.astype(np.int32)
    elif _check_form_of_splits(call, argument, splits) == np.int64:
        splits = jnp.clip(splits, 0, count).astype(jnp.int32)  # as native calls do with int32
    return replicated(jnp.asarray(splits))


def are_splits(known: np.ndarray, count: int) -> bool:
    """Whether numbers are the row splits of bags of `count` positions."""
    return bool(known[0] == 0 and (known[1:] >= known[:-1]).all() and known[-1] <= count)


def known_splits(call: str, argument: str, splits: Any, count: int) -> np.ndarray:
    """Row splits on the host, without a device, checked."""
    _check_form_of_splits(call, argument, splits)
    known = np.asarray(splits)
    if not are_splits(known, count):
        texts = [*map(str, known.tolist())]
        texts = texts if len(texts) < 20 else [*texts[:8], "...", *texts[-8:]]
        raise ValueError(
            f"{call}: {argument} must start at 0, not decrease, and end at {count} (the number "
            f"of positions) or before, got [{', '.join(texts)}]: they are the cumulative "
            "lengths of the bags, with 0 in front (of a Jagged of each device or micro-batch "
            "those of each: for Placement.step, Placement.run and train_step(micro_batches=))"
        )
    return known.astype(np.int32)


def _check_form_of_splits(call: str, argument: str, splits: Any) -> Any:
    dtype, shape = getattr(splits, "dtype", None), getattr(splits, "shape", ())
    if dtype not in (np.dtype(np.int32), np.dtype(np.int64)) or len(shape) != 1 or shape[0] < 1:
        raise TypeError(
            f"{call}: {argument} must be int32 or int64 [batch + 1], got {form_of(splits)}: make "
            "it with np.concatenate([[0], np.cumsum(lengths)]), or use Jagged.from_lists"
        )
    return dtype


class Unique(NamedTuple):
    """The distinct keys of a batch of n; see :func:`unique`.

    Attributes:
      keys: ``[size]``, in order of first occurrence; zero behind `count`.
      inverse: of the batch's shape: the number of each position's key in `keys`, -1 where it is
        masked or its key was left out.
      counts: ``int32[size]``, how often each key occurs; zero behind `count`.
      count: how many keys there are in `keys`.
      overflow: how many distinct keys were left out.
    """

    keys: Keys
    inverse: Int32[Array, "*batch"]
    counts: Int32[Array, " size"]
    count: Int32[Array, ""]
    overflow: Int32[Array, ""]

    @property
    def valid(self) -> Bool[Array, " size"]:
        """Which of `keys` are keys: the mask that a lookup of them needs."""
        return jax.lax.iota(jnp.int32, self.keys.shape[0]) < self.count

    def expand(self, rows: Any) -> Float[Array, " ..."]:
        """What belongs to the distinct keys, for each position of the batch; differentiable.

        The derivative sums the positions of each key by the fixed tree of docs/semantics.md,
        section 8: the same bits on every run, which XLA's derivative of ``rows[inverse]`` does not
        promise on a GPU. It is one of reverse mode, also of several losses at once
        (``jax.jacrev``), and has derivatives itself.

        Args:
          rows: float32, bfloat16 or float16 ``[size, ...]``, in the order of `keys`.

        Returns:
          ``[*batch, ...]``; zeros where a position is masked or its key was left out (a negative
          index of JAX would be the last row).

        Raises:
          TypeError: if there is not a row for each key.
        """
        size = self.keys.shape[0]
        array = _checks.as_array("Unique.expand", "rows", rows, f"an array [{size}, ...]")
        if array.dtype not in _ffi.FLOATS or not array.ndim or array.shape[0] != size:
            raise TypeError(
                f"Unique.expand: rows must be float32, bfloat16 or float16 of shape [{size}, ...], "
                f"a row for each of `keys`, got {array.dtype}{list(array.shape)}"
            )
        of_keys, *groups = match_varying((array, self.inverse.reshape(-1), self.count))
        expanded: Any = _expanded(of_keys.reshape(size, math.prod(array.shape[1:])), *groups, size)
        return expanded.reshape(*self.inverse.shape, *array.shape[1:])


# The next two are each other's derivative.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _expanded(
    rows: Float[Array, "size dim"], inverse: Int32[Array, " n"], count: Int32[Array, ""], size: int
) -> Float[Array, "n dim"]:
    del count
    if not size:
        return jnp.zeros((inverse.shape[0], rows.shape[1]), rows.dtype)
    return jnp.where(inverse[:, None] >= 0, _index.take(rows, inverse), jnp.zeros((), rows.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(
    rows: Float[Array, "n dim"], inverse: Int32[Array, " n"], count: Int32[Array, ""], size: int
) -> Float[Array, "size dim"]:
    inverse = jnp.where(inverse < size, inverse, _index.NO_SLOT)
    groups = _index.Groups(rows, inverse, inverse, inverse, count[None])
    missing = max(size - inverse.shape[0], 0)
    sums = _index.combine(groups, _index.Terms(rows), size - missing)
    return jnp.pad(sums, ((0, missing), (0, 0))).astype(rows.dtype)


def _is_derived_by(fn: Any, transpose: Any) -> None:
    def forward(rows: Any, inverse: Any, count: Any, size: int) -> Any:
        return fn(rows, inverse, count, size), (inverse, count)

    def backward(size: int, groups: Any, gradient: Any) -> Any:
        return transpose(gradient, *groups, size), None, None

    fn.defvjp(forward, backward)


_is_derived_by(_expanded, _summed)
_is_derived_by(_summed, _expanded)


def unique(keys: Any, *, valid: Any = None, size: int | None = None) -> Unique:
    """The distinct keys of a batch, in order of first occurrence (docs/semantics.md, section 6).

    Args:
      keys: of any shape: Keys, or an integer array.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      size: room for distinct keys, by default as many as there are positions. Where there are more
        distinct keys, those of the latest first occurrences are left out, and counted.

    Returns:
      The keys. Behind the last one they are zeros, which are ids like any others: look them up with
      ``valid=found.valid``, and give the rows to the batch by ``found.expand(rows)``.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> found = unique(np.array([7, 5, 7], np.int32))
      >>> found.keys.to_numpy().tolist(), found.inverse.tolist(), found.counts.tolist()
      ([7, 5, 0], [0, 1, 0], [2, 1, 0])
      >>> found.valid.tolist(), found.expand(np.array([1, 2, 3], np.float32)).tolist()
      ([True, True, False], [1.0, 2.0, 1.0])
    """
    given = check_keys("unique", "keys", keys)
    check_fixed("unique", "keys", given.shape)
    mask = _checks.as_mask("unique", "valid", valid, given.shape)
    if size is not None:
        size = _checks.as_integer("unique", "size", size, 0, MAX_SLOTS)
    return _unique(given, mask, size=math.prod(given.shape) if size is None else size)


@jitted("size")
def _unique(given: Any, valid: jax.Array | None, size: int) -> Unique:
    groups = _index.unique(*_checks.flat_batch(given, valid))
    positions = math.prod(given.shape)
    kept, missing = min(size, positions), max(size - positions, 0)
    count = groups.count[0]
    inverse = jnp.where(groups.inverse < size, groups.inverse, _index.NO_SLOT)
    return Unique(
        keys=Keys(jnp.pad(groups.keys[:kept], ((0, missing), (0, 0)))),
        inverse=inverse.reshape(given.shape),
        counts=jnp.pad(_index.occurrences(groups).counts[:kept], (0, missing)),
        count=jnp.minimum(count, size),
        overflow=jnp.maximum(count - size, 0),
    )
